"""Why gradient-accumulation fusion is refused, seen on the released Megatron-FSDP.

Megatron's own linear layers write their weight gradients as Transformer Engine's do: into
``get_main_grad()``, with ``grad_added_to_main_grad`` set from Python.
"""

from contextlib import ExitStack
from typing import Any
from unittest.mock import patch

import pytest
import torch

from megatron_cg.backends.tape.tape_backend import TapeBackend
from megatron_cg.consensus.exchange import Agreement
from megatron_cg.errors import CaptureError
from megatron_cg.tools.cpu.training_plan import CpuModelConfig
from tests.unit.ranks import on_ranks
from tests.unit.trainers import trainer_of

STEPS, CAPTURED = 3, 1
REFUSED = "megatron_cg.capture.observer.Observer._refuse_marked_weights"
FUSED_WEIGHTS = ("qkv.weight", "proj.weight", "fc1.weight", "fc2.weight")


def train(way: str) -> dict[str, Any]:
    from megatron.core.tensor_parallel import layers as linear

    with ExitStack() as undo:
        # Apex, without which Megatron makes no such layer; under Megatron-FSDP it is not called.
        undo.enter_context(patch.object(linear, "_grad_accum_fusion_available", True))
        # A placeholder of zeros instead of memory as it was, so that the result is always the same.
        zero = patch.object(torch.nn.Parameter, "zero_out_wgrad", True, create=True)
        undo.enter_context(zero)
        if way == "unmarked":
            undo.enter_context(patch(REFUSED, lambda _unit: None))
        shape = CpuModelConfig(
            layers=2,
            options={"gradient_accumulation_fusion": True},
            graph_modules=("attn", "mlp"),
            bf16=False,
        )
        made = trainer_of(shape, graphs=way != "eager", microbatches=2)
        trainer = undo.enter_context(made)
        steps, error = [], ""
        for step in range(STEPS):
            if way != "eager" and step == CAPTURED:
                try:
                    undo.callback(trainer.capture(TapeBackend(), Agreement()).close)
                except CaptureError as caught:
                    error = str(caught)
            steps.append([number.hex() for number in trainer.step()])
        shards = [
            parameter.grad.to_local()
            for name, parameter in trainer._fsdp.named_parameters()
            if name.endswith(FUSED_WEIGHTS) and parameter.grad is not None
        ]
        filled = [bool(shard.any()) for shard in shards if shard.numel()]
        return {"steps": steps, "error": error, "filled": filled}


def train_all() -> dict[str, Any]:
    return {way: train(way) for way in ("eager", "marked", "unmarked")}


@pytest.mark.refuses("gradient-accumulation-fusion")
def test_a_layer_that_writes_its_gradient_by_itself_is_not_captured() -> None:
    for found in on_ranks(train_all):
        eager, marked, graphs = found["eager"], found["marked"], found["unmarked"]
        assert marked["steps"] == eager["steps"]
        assert "linear_proj.weight into main_grad by itself" in marked["error"]
        assert "4 such weights" in marked["error"]
        # A replay would hand over the placeholder.
        assert graphs["steps"][:CAPTURED] == eager["steps"][:CAPTURED]
        assert graphs["steps"][CAPTURED] != eager["steps"][CAPTURED]
        assert eager["filled"] and all(eager["filled"])
        assert len(graphs["filled"]) == len(eager["filled"]) and not any(graphs["filled"])
