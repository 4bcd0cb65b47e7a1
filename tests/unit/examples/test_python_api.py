"""The loop on megatron-core's Python API: short, and the same numbers with graphs as without."""

import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import megatron_cg
from megatron_cg.capture.session import open_sessions
from megatron_cg.errors import ConfigurationError, HookError
from megatron_cg.fsdp.megatron_fsdp import _KEEPS, find_megatron_fsdp
from megatron_cg.tape.tape_backend import TapeBackend
from megatron_cg.tape.training_plan import CpuModelConfig
from megatron_cg.upstream.symbols import installed_version
from tests.unit.trainers import microbatch_of, new_trainer

SCRIPT = Path(__file__).resolve().parents[3] / "examples" / "python_api.py"


@pytest.fixture
def example(one_rank: None) -> Iterator[Any]:
    """The script as a module, and Megatron's globals as they were."""
    if installed_version("transformer-engine") is not None:
        pytest.skip("Megatron's optimizer takes TE's kernels where TE is, and they need a GPU")
    from megatron.core import num_microbatches_calculator as calculator

    spec = importlib.util.spec_from_file_location("python_api", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    yield module
    calculator.unset_num_microbatches_calculator()


def train(example: Any, *words: str) -> None:
    from megatron.core import num_microbatches_calculator as calculator
    from megatron.core import parallel_state

    parallel_state.destroy_model_parallel()
    calculator.unset_num_microbatches_calculator()
    sys.argv[1:] = words
    example.train()


def test_it_has_the_same_losses_with_and_without_graphs(
    example: Any, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", [str(SCRIPT)])
    assert len(SCRIPT.read_text().splitlines()) < 100
    train(example, "--eager")
    eager = capsys.readouterr().out
    train(example)
    graphed = capsys.readouterr().out
    steps = [line for line in graphed.splitlines() if line.startswith("step ")]
    assert len(steps) == example.STEPS and steps == eager.splitlines()
    assert "4 captured, 40 replayed, 0 eager, 0 mismatched" in graphed
    assert open_sessions() == 0


@pytest.fixture
def model(one_rank: None) -> Any:
    from megatron_cg.tape.cpu_model import build

    return build(CpuModelConfig(layers=1, fsdp_options={"fsdp_double_buffer": False}))


def test_a_model_that_cannot_be_graphed_is_refused_for_every_reason(model: Any) -> None:
    from megatron_cg.clients.loop import GraphedLayers

    model.config.gradient_accumulation_fusion = True
    sizes: dict[str, Any] = {"seq_length": 16, "micro_batch_size": 2}
    with pytest.raises(ConfigurationError) as error:
        GraphedLayers(model, None, **sizes, backend=TapeBackend())
    found = [violation.rule for violation in error.value.violations]
    assert found == ["double-buffer", "gradient-accumulation-fusion"]
    model.config.cuda_graph_impl = "none"
    with pytest.raises(HookError, match="cuda_graph_impl of the model's config is none"):
        GraphedLayers(model, None, **sizes, backend=TapeBackend())
    with pytest.raises(HookError, match="Linear is not under Megatron-FSDP"):
        GraphedLayers(torch.nn.Linear(1, 1), None, **sizes, backend=TapeBackend())


@pytest.fixture
def trainer(one_rank: None) -> Iterator[Any]:
    """A trainer of one layer, and the number of microbatches that Megatron's loops have."""
    with microbatch_of(2):
        made = new_trainer()
        made.model.config.cuda_graph_warmup_steps = 1
        yield made


def graphed(trainer: Any, **options: Any) -> megatron_cg.GraphedLayers:
    sizes: dict[str, Any] = {"seq_length": 16, "micro_batch_size": 2, "backend": "tape"}
    return megatron_cg.GraphedLayers(trainer.model, trainer._optimizer, **sizes, **options)


def test_steps_after_closing_are_eager_though_nothing_was_captured(trainer: Any) -> None:
    with graphed(trainer) as graphs, graphs.step():
        trainer.step()
    for _ in range(2):
        with graphs.step():
            trainer.step()
    assert graphs.counters.captured == 0


def test_close_undoes_what_the_helper_changed_also_after_a_failed_start(
    trainer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from megatron_cg.clients import loop as api

    def failing(*_given: Any) -> None:
        raise MemoryError

    fsdp: Any = find_megatron_fsdp(trainer.model)
    config = fsdp.param_and_grad_buffer.ddp_config
    setattr(config, _KEEPS, True)  # as for a run with cuda_graph_impl on a GPU
    before = dict(vars(config))
    with graphed(trainer, fast_path=False):
        assert vars(config) != before
    assert vars(config) == before
    monkeypatch.setattr(api, "graphs_close_in_time", failing)
    with pytest.raises(MemoryError):
        graphed(trainer)
    assert vars(config) == before
