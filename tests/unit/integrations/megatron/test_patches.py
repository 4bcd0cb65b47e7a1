"""What enable() changes in Megatron, and that disable() undoes it."""

import argparse
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from megatron.core.transformer.cuda_graphs import TECudaGraphHelper
from megatron.training import arguments, training

import megatron_cg
from megatron_cg.__main__ import main
from megatron_cg.arguments.schema import GraphArguments
from megatron_cg.errors import ConfigurationError
from megatron_cg.integrations.megatron import patches
from tests.unit.interpreted import ROOT, run
from tests.unit.recompute.test_recompute_in_layers import config


@pytest.fixture(autouse=True)
def undone() -> Iterator[None]:
    yield
    megatron_cg.disable()


def parse(*words: str) -> argparse.Namespace:
    parser = arguments.add_megatron_arguments(argparse.ArgumentParser(allow_abbrev=False))
    namespace: argparse.Namespace = parser.parse_args(words)
    return namespace


def test_enable_adds_our_group_and_disable_takes_it_off() -> None:
    with pytest.raises(SystemExit):
        parse("--cg-layers", "attn:0-")
    megatron_cg.enable()
    megatron_cg.enable()
    assert parse("--cg-layers", "attn:0-").cg_layers == ["attn:0-"]
    megatron_cg.disable()
    megatron_cg.disable()
    with pytest.raises(SystemExit):
        parse("--cg-layers", "attn:0-")


def test_a_run_without_graphs_keeps_megatrons_helper(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arguments, "validate_args", lambda args, defaults=None: args)
    megatron_cg.enable()
    args = parse("--use-megatron-fsdp")
    assert arguments.validate_args(args, {}) is args
    assert training.TECudaGraphHelper is TECudaGraphHelper
    megatron_cg.disable()


def test_experts_stay_as_they_are_by_default(monkeypatch: pytest.MonkeyPatch) -> None:
    used: list[Any] = []

    def use(*_: Any, gemm: str, **_named: Any) -> Any:
        used.append(gemm)
        return lambda: None

    monkeypatch.setattr("megatron_cg.experts.install.use_device_counts", use)
    for gemm in ("te", "cublas", "torch"):
        given = GraphArguments(cg_grouped_gemm=gemm)
        patches._build_models_for(given, full_recompute=False)()
    assert used == ["cublas", "torch"]


GRAPHS = (
    "--use-megatron-fsdp --fsdp-double-buffer --fsdp-db-use-persist-buf-on-alloc-fail --bf16 "
    "--num-layers 4 --no-gradient-accumulation-fusion --cuda-graph-impl transformer_engine "
    "--attention-dropout 0 --hidden-dropout 0 --cuda-graph-modules attn"
).split()


@pytest.fixture
def our_rules_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Megatron accepts all flags, and Transformer Engine seems to be installed."""
    monkeypatch.delenv("CUDA_DEVICE_MAX_CONNECTIONS", raising=False)
    monkeypatch.setattr(arguments, "validate_args", lambda args, defaults=None: args)
    monkeypatch.setattr("megatron_cg.arguments.schema.installed_version", lambda _name: "2.20.2")


def test_settings_of_enable_are_the_defaults_of_flags(our_rules_alone: None) -> None:
    megatron_cg.enable(verify_interval=5, layers=["attn:1"], fast_path=False)
    arguments.validate_args(parse("--use-megatron-fsdp"), {})  # a run without graphs
    arguments.validate_args(parse(*GRAPHS, "--cg-layers", "attn:2"), {})
    assert patches.settings_now() == GraphArguments(
        cg_verify_interval=5, cg_layers=("attn:2",), cg_no_fsdp_fast_path=True
    )
    with pytest.raises(ConfigurationError, match="no effect"):
        arguments.validate_args(parse("--use-megatron-fsdp", "--cg-on-failure", "eager"), {})


@pytest.mark.parametrize("granularity", ["full", "selective"])
def test_a_run_that_recomputes_layers_may_build_its_model(
    our_rules_alone: None, granularity: str
) -> None:
    megatron_cg.enable()
    words = [*GRAPHS, "mlp", "--recompute-granularity", granularity]
    arguments.validate_args(parse(*words), {})
    if granularity == "full":
        assert config().recompute_granularity == "full"
        megatron_cg.disable()
    with pytest.raises(AssertionError, match="only supported with full iteration"):
        config()


def test_a_bad_run_ends_before_megatron_validates(monkeypatch: pytest.MonkeyPatch) -> None:
    reached: list[Any] = []
    monkeypatch.setattr(
        arguments, "validate_args", lambda args, defaults=None: reached.append(args)
    )
    megatron_cg.enable()
    words = [word for word in GRAPHS if word != "--fsdp-double-buffer"]
    words.append("--optimizer-cuda-graph")
    with pytest.raises(ConfigurationError) as error:
        arguments.validate_args(parse(*words), {})
    assert "--fsdp-double-buffer" in str(error.value) and "--optimizer-cuda" in str(error.value)
    assert reached == []
    megatron_cg.disable()


@pytest.mark.parametrize("options", [[], ["-P"]])
def test_the_launcher_gives_a_script_the_path_that_python_gives(
    options: list[str], tmp_path: Path
) -> None:
    (tmp_path / "scripts").mkdir()
    (tmp_path / "scripts" / "train.py").write_text("import sys; print(sys.path[:5])")
    (tmp_path / "link.py").symlink_to("scripts/train.py")
    plain, ours = (
        run(*options, *words, "link.py", folder=tmp_path, PYTHONPATH=str(ROOT)).stdout
        for words in ((), ("-m", "megatron_cg"))
    )
    assert plain == ours and (f"{tmp_path}/scripts'" in plain) is not bool(options)


def test_the_launcher_runs_a_script_as_python_would(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "beside.py").write_text("word = 'found'\n")
    script = tmp_path / "script.py"
    script.write_text(
        "import sys, beside\n"
        "from megatron_cg.integrations.megatron import patches\n"
        "print(__name__, sys.argv[1:], beside.word, patches._enabled is not None)\n"
    )
    monkeypatch.setattr(sys, "argv", ["megatron_cg", str(script), "--lr", "1"])
    monkeypatch.setattr(sys, "path", list(sys.path))
    cache = "CUBLASLT_HEURISTICS_CACHE_CAPACITY"
    monkeypatch.setenv(cache, "5")
    main()
    assert capsys.readouterr().out == "__main__ ['--lr', '1'] found True\n"
    assert patches._enabled is None and os.environ[cache] == "5"
    monkeypatch.delenv(cache)
    monkeypatch.setattr(sys, "argv", ["megatron_cg", str(script)])
    main()
    assert os.environ[cache] == "262144"
