"""What Megatron saves of passes is what it saves of eager ones; a captured router has no trace."""

from __future__ import annotations

import hashlib
import random
import tempfile
from contextlib import ExitStack, nullcontext
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy
import pytest
import torch

from megatron_cg.backends.tape.tape_backend import TapeBackend
from megatron_cg.errors import HookError
from megatron_cg.tools.cpu.training_plan import CpuModelConfig, TrainingPlan
from tests.unit.counted import expect
from tests.unit.moe.steps_of_megatron import Helper, trainer_of
from tests.unit.ranks import on_ranks
from tests.unit.trainers import trainer_of as trainer_on_cpu

WARMUP, STEPS, LAYERS, MICROBATCHES = 1, 4, 2, 2
FACTOR = 1.05
"""A bound that every step of this model exceeds."""
EVERY = 2
"""Passes of the second and the fourth step are saved."""
SAVED = ("save_activations_interval", "save_dgrads_interval")


def bits(found: Any) -> Any:
    """Tensors as digests, in JSON's types."""
    if isinstance(found, torch.Tensor):
        data = found.contiguous().flatten().view(torch.uint8).numpy().tobytes()
        return hashlib.sha256(data).hexdigest()
    if isinstance(found, dict):
        return {str(key): bits(value) for key, value in found.items()}
    return [bits(one) for one in found] if isinstance(found, list | tuple) else str(found)


def saved_in(folder: Path) -> dict[str, Any]:
    """The files that Megatron wrote."""
    found: dict[str, Any] = {}
    for file in sorted(path for path in folder.rglob("*") if path.is_file()):
        text = file.suffix == ".jsonl"
        read = file.read_text().splitlines() if text else torch.load(file, weights_only=False)
        found[str(file.relative_to(folder))] = bits(read)
    return found


def train(option: str, *, ours: bool) -> dict[str, Any]:
    """Four steps, eagerly or with graphs that have too little room, and what was saved."""
    from megatron.training import activation_logging, dgrad_logging
    from megatron.training.global_vars import get_args

    from megatron_cg.consensus.exchange import Agreement
    from megatron_cg.integrations.megatron.repeat import follow, repeat_steps
    from megatron_cg.moe import row_bound
    from megatron_cg.moe.install import bound_rows, use_device_counts
    from megatron_cg.moe.row_bound import RowBound
    from megatron_cg.tools.cpu.grouped_linear import GroupedLinear, in_place_of_te

    shape = CpuModelConfig(
        layers=LAYERS,
        experts=4,
        grouped=True,
        expert_parallel=2,
        graph_modules=("attn", "moe") if ours else ("attn",),
    )
    random.seed(1)
    numpy.random.seed(1)
    with ExitStack() as undo:
        folder = Path(undo.enter_context(tempfile.TemporaryDirectory(prefix="megatron-cg-")))
        grouped = (GroupedLinear,)
        undo.enter_context(patch.object(activation_logging, "_GROUPED_LINEAR_TYPES", grouped))
        for module in (activation_logging, dgrad_logging):
            undo.enter_context(patch.object(module, "_LOGGER", None))
            # Without Transformer Engine some of its layers are no types.
            kinds = [kind for kind in module.LINEAR_TYPES if isinstance(kind, type)]
            undo.enter_context(patch.object(module, "LINEAR_TYPES", (*kinds, *grouped)))
        undo.enter_context(patch.object(row_bound, "MULTIPLE", 1))
        if ours:
            undo.enter_context(in_place_of_te())
            undo.callback(use_device_counts())
            undo.callback(bound_rows(RowBound(FACTOR)))
        plan = TrainingPlan(shape, graphs=ours, microbatches=MICROBATCHES)
        trainer = undo.enter_context(trainer_of(plan))
        args = get_args()
        args.save = str(folder)
        setattr(args, option, EVERY)
        if ours:
            undo.callback(repeat_steps())
            helper: Any = Helper(trainer)
            undo.callback(follow(helper))
        numbers, counts = [], []
        for step in range(STEPS):
            if ours and step == WARMUP:
                session = trainer.capture(TapeBackend(), Agreement())
                undo.callback(session.close)
            numbers.append([number.hex() for number in trainer.step()])
            if trainer.session is not None:
                counters = trainer.session.counters
                counts.append([counters.replayed, counters.eager, counters.repeated])
        return {"numbers": numbers, "counts": counts, "saved": saved_in(folder)}


def train_all(option: str) -> dict[str, Any]:
    torch.compiler.set_stance("force_eager")
    return {"eager": train(option, ours=False), "graphs": train(option, ours=True)}


@pytest.mark.parametrize("option", SAVED)
def test_a_step_whose_passes_are_saved_runs_eagerly_once(option: str) -> None:
    """Megatron's hooks are on modules in the graphs then, so nothing replays."""
    for found in on_ranks(partial(train_all, option)):
        eager, graphs = found["eager"], found["graphs"]
        assert graphs["numbers"] == eager["numbers"]
        assert graphs["saved"] == eager["saved"] and len(eager["saved"]) == STEPS // EVERY
        # Replays, eager passes and repeated steps so far; the step in between is repeated.
        assert graphs["counts"] == [[0, 4, 0], [4, 8, 1], [4, 12, 1]]


def test_tokens_of_experts_are_not_saved_under_megatron_fsdp() -> None:
    """With or without graphs: Megatron does not know the names that modules have there."""
    for found in on_ranks(partial(train_all, "save_tokens_per_expert_interval")):
        assert found["graphs"]["numbers"] == found["eager"]["numbers"]
        assert found["graphs"]["saved"] == found["eager"]["saved"] == {}
        assert found["graphs"]["counts"] == [[4, 4, 1], [8, 8, 2], [12, 12, 3]]


@pytest.mark.refuses("routing-trace")
@pytest.mark.parametrize("scopes", [("attn",), ("attn", "moe_router")], ids=" ".join)
def test_a_captured_router_has_no_trace(
    scopes: tuple[str, ...], one_rank: None, tmp_path: Path
) -> None:
    from megatron.core.transformer.moe.router_trace import RouterTracer

    shape = CpuModelConfig(layers=LAYERS, experts=4, graph_modules=scopes)
    tracer = RouterTracer(str(tmp_path), STEPS, 0, training_mode=True)
    with trainer_on_cpu(shape, graphs=True) as trainer:
        tracer.register_hooks(trainer.model)
        trainer.step()
        captured = "moe_router" in scopes
        with pytest.raises(HookError, match="RouterTracer") if captured else nullcontext():
            session = trainer.capture(TapeBackend())
            trainer.step()
            expect(session.counters, replayed=LAYERS)
        assert len(tracer.records) == (LAYERS if captured else 2 * LAYERS)
