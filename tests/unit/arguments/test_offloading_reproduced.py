"""Why fine-grained activation offloading is refused: what Megatron's own graphs of it leave behind.

The rule is not asked here. Megatron's offloading, its layers and Megatron-FSDP are the real ones,
and every copy is a recorded operation. On a CPU a copy ends when its call returns, so nothing here
depends on the order of streams.
"""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from megatron.core.pipeline_parallel import fine_grained_activation_offload as offload
from torch.utils._python_dispatch import _disable_current_modes

from megatron_cg.backends.tape.tape_backend import TapeBackend
from megatron_cg.backends.tape.tape_memory import Pool
from megatron_cg.tools.cpu.cpu_model import transformer_layers
from megatron_cg.tools.cpu.train import Trainer
from megatron_cg.tools.cpu.training_plan import CpuModelConfig, TrainingPlan
from tests.unit.counted import expect

LAYERS, WARMUP = 3, 2
Steps = list[tuple[float, float]]
"""The loss and the gradient norm of each."""
OFFLOADED = {
    "fine_grained_activation_offloading": True,
    "offload_modules": ["qkv_linear"],
    "min_offloaded_tensor_size": 1,
    "cuda_graph_warmup_steps": WARMUP,
}
Interface = offload.FineGrainedActivationOffloadingInterface


class AsMegatronCaptures(TapeBackend):
    """The tape, with the two hooks that Megatron's helper gives to Transformer Engine."""

    def capture(self, *args: Any, **options: Any) -> Any:
        options |= {
            "pre_warmup_hook": Interface.disable_offload,
            "post_warmup_hook": Interface.enable_offload,
        }
        return super().capture(*args, **options)


@pytest.fixture
def offloading(one_rank: None, replays_alone: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Megatron's offloading on a CPU: a tensor there counts as one on the GPU.

    Host buffers do not belong to the tape, as pinned memory does not belong to a graph. Freed
    memory keeps its contents: the most that a GPU can do for a graph that reads it.
    """
    te: Any = SimpleNamespace(CPUOffloadEnabled=False)
    monkeypatch.setattr(
        "megatron.core.extensions.transformer_engine.cpu_offload", te, raising=False
    )
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda *_: None)
    monkeypatch.setattr(
        offload.ChunkOffloadHandler,
        "_can_manage_tensor_for_offload",
        staticmethod(lambda tensor: not isinstance(tensor, torch.nn.Parameter)),
    )
    own = offload.OffloadTensorPool.allocate

    def allocate(*args: Any, **named: Any) -> torch.Tensor:
        with _disable_current_modes():
            found: torch.Tensor = own(*args, **named)
            return found

    monkeypatch.setattr(offload.OffloadTensorPool, "allocate", allocate)
    monkeypatch.setattr(Pool, "poison", lambda *_: None)
    monkeypatch.setattr(offload.PipelineOffloadManager, "OFFLOAD_MGR", None)


def train(*, captured: bool = False, offloaded: bool = True, eager: int | None = None) -> Steps:
    """The losses and norms of all steps, each ended as Megatron's schedule ends it.

    Args:
        captured: whether layers get graphs.
        offloaded: whether activations go to the host.
        eager: a layer without its graph in one step.
    """
    from megatron.core import parallel_state

    offload.PipelineOffloadManager.reset_instance()
    options = OFFLOADED if offloaded else {}
    shape = CpuModelConfig(layers=LAYERS, bf16=False, graph_modules=("attn",), options=options)
    trainer = Trainer(TrainingPlan(shape, graphs=captured))
    steps = [one_step(trainer) for _ in range(WARMUP)]
    if captured:
        session = trainer.capture(AsMegatronCaptures())
        Interface.reset()
        pools = offload.PipelineOffloadManager.get_instance().cpu_tensor_pool._pools
        held = dict(pools)  # Somebody has to, or the memory is freed under the graphs.
        pools.clear()  # No eager pass gets the host buffers of the graphs.
    steps.append(one_step(trainer, eager))
    steps.append(one_step(trainer))
    if captured:
        replays = 2 * LAYERS - (eager is not None)
        expect(session.counters, captured=LAYERS, replayed=replays, mismatched=0)
        session.close()
        assert bool(held) is offloaded
    parallel_state.destroy_model_parallel()
    return steps


def one_step(trainer: Trainer, eager: int | None = None) -> tuple[float, float]:
    """One step, in which the layer ``eager`` has no graph."""
    with pytest.MonkeyPatch.context() as patch:
        if eager is not None:
            patch.setattr(transformer_layers(trainer.model)[eager], "cuda_graphs", [])
        found = trainer.step()
    Interface.reset()
    return found


@pytest.mark.refuses("activation-offloading")
def test_with_all_layers_in_each_step_offloading_has_the_eager_bits(offloading: None) -> None:
    eager = train(offloaded=False)
    assert train() == eager
    assert train(captured=True) == eager


@pytest.mark.refuses("activation-offloading")
@pytest.mark.parametrize("layer", range(LAYERS))
def test_the_graph_of_a_layer_reloads_for_the_layer_before(layer: int, offloading: None) -> None:
    """Without it, the layer before computes gradients from activations of an older pass."""
    eager = train(offloaded=False)
    assert train(captured=True, offloaded=False, eager=layer) == eager
    steps = train(captured=True, eager=layer)
    if layer == 0:
        assert steps == eager
        return
    assert steps[:WARMUP] == eager[:WARMUP]
    (loss, norm), (eager_loss, eager_norm) = steps[WARMUP], eager[WARMUP]
    assert loss == eager_loss and math.isfinite(norm)
    assert norm != eager_norm
