"""Megatron-Bridge imported before ``enable()`` and after it; ``tests/functional`` has the real one.

Here a package with the symbols of Megatron-Bridge 0.6.2 holds real configs of megatron-core.
"""

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from megatron.core.datasets import utils as helpers
from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.optimizer import OptimizerConfig
from megatron.core.transformer.transformer_config import TransformerConfig

import megatron_cg
from megatron_cg.clients.bridge import _warn_once as told
from megatron_cg.errors import ConfigurationError, UpstreamChangedError
from megatron_cg.integrations.megatron import patches

CONFIG, INITIALIZE = (f"megatron.bridge.training.{name}" for name in ("config", "initialize"))
COMPILES = Path(helpers.__file__).with_name("Makefile").exists()
"""Whether megatron-core is a clone, which compiles its helpers; wheels have them compiled."""
VALIDATES = """
class ConfigContainer:
    def __init__(self, **given):
        vars(self).update(given)

    def validate(self):
        self.model.finalized = True
"""


@pytest.fixture
def bridge(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    folder = tmp_path / "megatron" / "bridge" / "training"
    folder.mkdir(parents=True)
    (folder / "config.py").write_text(VALIDATES)
    (folder / "initialize.py").write_text(
        "from megatron.core.datasets.utils import compile_helpers\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    finders = list(sys.meta_path)
    yield folder
    megatron_cg.disable()
    assert sys.meta_path == finders
    for name in [name for name in sys.modules if name.startswith("megatron.bridge")]:
        del sys.modules[name]


def container(kind: Any, **ddp: bool) -> Any:
    graphs: Any = {"cuda_graph_impl": "transformer_engine", "cuda_graph_modules": ["attn"]}
    fits = ddp.items() >= FITS.items()
    return kind(
        model=TransformerConfig(num_layers=2, hidden_size=8, num_attention_heads=2, **graphs),
        ddp=DistributedDataParallelConfig(use_megatron_fsdp=True, **ddp),
        optimizer=OptimizerConfig(),
        dist=SimpleNamespace(use_megatron_fsdp=False),
        rng=SimpleNamespace(te_rng_tracker=fits),
        train=SimpleNamespace(micro_batch_size=2),
        dataset=SimpleNamespace(enable_in_batch_packing=True),
        comm_overlap=None,
        mixed_precision=None,
    )


FITS = {"fsdp_double_buffer": True, "fsdp_db_use_persist_buf_on_alloc_fail": True}


@pytest.mark.parametrize("first", [True, False])
def test_a_configuration_is_checked_before_bridge_does(
    bridge: Path, first: bool, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    if first:
        importlib.import_module(CONFIG), importlib.import_module(INITIALIZE)
    megatron_cg.enable(backend="tape")
    kind = importlib.import_module(CONFIG).ConfigContainer
    if not COMPILES:
        importlib.import_module(INITIALIZE).compile_helpers()  # Megatron's own exits with 1
        assert "has no Makefile" in capsys.readouterr().out
    cfg = container(kind)
    with pytest.raises(ConfigurationError) as error:
        cfg.validate()
    rules = [violation.rule for violation in error.value.violations]
    packed = ["packed-micro-batch", "packed-unmeasured"]
    assert rules == ["double-buffer", "persistent-fallback", *packed, "te-rng-tracker"]
    assert "cfg.model.attention_dropout=0" in str(error.value)
    assert "set cfg.ddp.fsdp_double_buffer=True" in str(error.value)
    assert "cfg.dataset.enable_in_batch_packing" in str(error.value)
    assert "set cfg.train.micro_batch_size=1" in str(error.value)
    assert not hasattr(cfg.model, "finalized")
    told.cache_clear()
    cfg.ddp.use_megatron_fsdp = False
    cfg.validate(), cfg.validate()
    assert caplog.text.count("without cfg.ddp.use_megatron_fsdp graphs are Megatron's own") == 1
    cfg.dist.use_megatron_fsdp, cfg.model.cuda_graph_impl = True, "none"
    cfg.validate()
    assert cfg.model.finalized
    # A helper of this model would be checked.
    assert patches._enabled is not None and not patches._enabled.checked
    cfg = container(kind, **FITS)
    cfg.dataset.enable_in_batch_packing = False
    cfg.validate()
    cfg.validate()
    megatron_cg.disable()
    container(kind).validate()
    if not COMPILES:
        with pytest.raises(SystemExit):
            importlib.import_module(INITIALIZE).compile_helpers()


def test_a_bridge_without_the_method_is_refused_by_name(bridge: Path) -> None:
    (bridge / "config.py").write_text("class ConfigContainer: ...")
    megatron_cg.enable()
    with pytest.raises(UpstreamChangedError, match=r"megatron-bridge .*ConfigContainer.validate"):
        importlib.import_module(CONFIG)
