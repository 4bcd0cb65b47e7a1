"""Steps that exceed a bound of rows are repeated, and train bit for bit as eager steps."""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy
import pytest
import torch
import torch.distributed as dist

from megatron_cg.tools.cpu.launch import run_processes
from tests.unit.moe.steps_of_megatron import Helper, MegatronTrainer, trainer_of

STEPS, WARMUP, LAYERS, MICROBATCHES, FACTOR = 7, 2, 2, 2, 1.05


@dataclass(frozen=True)
class Pass:
    """A forward pass of a layer."""

    step: int
    rank: int
    microbatch: int
    layer: int


@dataclass(frozen=True)
class Case:
    """A model, and the passes in which its bound counts as exceeded on this rank's device.

    Without ``exceeds`` the bound is a real one, of ``FACTOR``.
    """

    exceeds: Callable[[Pass], bool] | None = lambda one: one.step == 4
    repeated: tuple[int, ...] = (4,)
    options: Mapping[str, Any] = field(default_factory=dict)
    dropout: float = 0.0
    fast_path: bool = True
    verify_interval: int = 0
    again: int | None = None
    """The step before which graphs are deleted and captured again."""
    evaluated: int | None = None
    """The step before which the model is evaluated."""


SIGMOID = {
    "moe_router_score_function": "sigmoid",
    "moe_router_enable_expert_bias": True,
    "moe_router_load_balancing_type": "seq_aux_loss",
    "moe_router_dtype": "fp32",
}
LOSSES = {"moe_z_loss_coeff": 1e-3, "moe_input_jitter_eps": 0.01}
GLOBAL = {"moe_router_load_balancing_type": "global_aux_loss"}
RECOMPUTED = {
    "recompute_granularity": "full",
    "recompute_method": "uniform",
    "recompute_num_layers": 1,
    **SIGMOID,
}
REAL = tuple(range(WARMUP, STEPS))
CASES = {
    "never": Case(lambda _: False, ()),
    "every pass": Case(lambda _: True, REAL),
    "one rank": Case(lambda one: one.step == 4 and one.rank == 1),
    "the other rank": Case(lambda one: one.step == 4 and one.rank == 0),
    "first microbatch": Case(lambda one: one.step == 4 and one.microbatch == 0),
    "last microbatch": Case(lambda one: one.step == 4 and one.microbatch == 1),
    "last layer of one rank": Case(
        lambda one: (one.step, one.rank, one.microbatch, one.layer) == (4, 0, 1, LAYERS - 1)
    ),
    "first layer of one rank": Case(
        lambda one: (one.step, one.rank, one.microbatch, one.layer) == (4, 1, 0, 0)
    ),
    "three in a row": Case(lambda one: one.step in {3, 4, 5}, (3, 4, 5)),
    "first and last step": Case(lambda one: one.step in {2, 6}, (2, 6)),
    "without the fast path": Case(fast_path=False),
    "dropout": Case(dropout=0.2),
    "sigmoid, bias": Case(options=SIGMOID),
    "z-loss, jitter": Case(options=LOSSES),
    "loss over all microbatches": Case(options=GLOBAL),
    "captured again": Case(again=4),
    "evaluated": Case(evaluated=4),
    "verified": Case(verify_interval=1),
    "verified, one layer of one rank": Case(
        lambda one: (one.step, one.rank, one.microbatch, one.layer) == (4, 1, 0, 0),
        verify_interval=1,
    ),
    "a real bound": Case(None, REAL),
    "a real bound, recomputed": Case(None, REAL, RECOMPUTED),
    "recomputed, verified": Case(None, REAL, RECOMPUTED, verify_interval=1),
    "a real bound, all at once": Case(None, REAL, SIGMOID | LOSSES, 0.2, verify_interval=2),
}


def forced_bound(exceeds: Callable[[Pass], bool]) -> Any:
    """A bound that counts as exceeded in these passes."""
    from megatron_cg.moe.row_bound import RowBound

    class Forced(RowBound):
        called = 0
        switches = torch.zeros(LAYERS, dtype=torch.int64)

        def watch(self, counts: torch.Tensor) -> None:
            switch = self.switches[self.called % LAYERS]
            self.called += 1
            super().watch(counts * (1 + 1000 * switch))
            # Nothing is sent then, so the numbers are wrong.
            counts.mul_(1 - switch)

        def before(self, step: int, microbatch: int) -> None:
            here = step, dist.get_rank(), microbatch
            on = [exceeds(Pass(*here, layer)) for layer in range(LAYERS)]
            self.switches.copy_(torch.tensor(on))

    return Forced(1000.0)


def digest(tensors: Any) -> str:
    """The bits of tensors, in order."""
    found = hashlib.sha256()
    for tensor in tensors:
        local = getattr(tensor, "_local_tensor", tensor).detach().contiguous()
        found.update(local.flatten().view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


def state_of(trainer: MegatronTrainer) -> dict[str, Any]:
    """All that a step changes."""
    from megatron.core.rerun_state_machine import get_rerun_state_machine
    from megatron.core.tensor_parallel.random import get_cuda_rng_tracker
    from megatron.core.transformer.moe.moe_logging import get_moe_metrics_tracker

    machine = get_rerun_state_machine()
    moments = [state for one in trainer._parameters for state in _moments(trainer, one)]
    metrics = get_moe_metrics_tracker().metrics
    return {
        "shards": digest(trainer._parameters),
        "moments": digest(moments),
        "buffers": {name: digest([one]) for name, one in trainer.model.named_buffers()},
        "metrics": {name: entry.values.tolist() for name, entry in metrics.items()},
        "random": hashlib.sha256(repr(random.getstate()).encode()).hexdigest(),
        "numpy": hashlib.sha256(repr(numpy.random.get_state()).encode()).hexdigest(),
        "torch": digest([torch.get_rng_state()]),
        "tracker": {name: digest([one]) for name, one in get_cuda_rng_tracker().states_.items()},
        "machine": [dict(machine.large_value_counts), dict(machine.max_values)],
        "read": trainer.read,
    }


def _moments(trainer: MegatronTrainer, parameter: Any) -> list[torch.Tensor]:
    state = trainer._optimizer.state.get(parameter, {})
    return [state[name] for name in ("exp_avg", "exp_avg_sq") if name in state]


def train(case: Case, ours: bool) -> dict[str, Any]:
    """Losses and norms to the last bit, the state after each step, and the repeated steps."""
    from megatron.core.transformer.moe.moe_logging import get_moe_metrics_tracker

    from megatron_cg.backends.tape.tape_backend import TapeBackend
    from megatron_cg.consensus.exchange import Agreement
    from megatron_cg.events import StepRepeated, subscribe
    from megatron_cg.integrations.megatron.full_recompute import allow_full_recompute
    from megatron_cg.integrations.megatron.repeat import follow, repeat_steps
    from megatron_cg.moe import row_bound
    from megatron_cg.moe.install import bound_rows, use_device_counts
    from megatron_cg.moe.row_bound import RowBound
    from megatron_cg.replay.mismatch_policy import ReplayPolicy
    from megatron_cg.tools.cpu.grouped_linear import in_place_of_te
    from megatron_cg.tools.cpu.training_plan import CpuModelConfig, TrainingPlan

    shape = CpuModelConfig(
        layers=LAYERS,
        experts=4,
        grouped=True,
        expert_parallel=2,
        dropout=case.dropout,
        options=case.options,
        graph_modules=("attn", "moe") if ours else ("attn",),
    )
    plan = TrainingPlan(shape, graphs=ours, microbatches=MICROBATCHES)
    events: list[Any] = []
    random.seed(1)
    numpy.random.seed(1)
    with ExitStack() as undo:
        undo.enter_context(patch.object(row_bound, "MULTIPLE", 1))
        undo.callback(allow_full_recompute())
        if ours:
            undo.enter_context(in_place_of_te())
            undo.callback(use_device_counts())
            bound = RowBound(FACTOR) if case.exceeds is None else forced_bound(case.exceeds)
            undo.callback(bound_rows(bound))
        trainer = undo.enter_context(trainer_of(plan))
        if ours:
            trainer.before = getattr(bound, "before", trainer.before)
            undo.callback(subscribe(events.append))
            undo.callback(repeat_steps())
            undo.callback(follow(Helper(trainer)))
        steps, states = [], []
        policy = ReplayPolicy("error", case.verify_interval)
        for step in range(STEPS):
            if ours and step in (WARMUP, case.again):
                if trainer.session is not None:
                    trainer.session.close()
                agreement = Agreement()
                session = trainer.capture(
                    TapeBackend(), agreement, policy=policy, fast_path=case.fast_path
                )
                undo.callback(session.close)
            if step in (WARMUP, case.again, case.evaluated):
                # As Megatron does after a capture, and after the line of a log.
                get_moe_metrics_tracker().clear()
            if step == case.evaluated:
                steps.append([float(trainer.evaluate()).hex()])
            steps.append([number.hex() for number in trainer.step()])
            states.append(state_of(trainer))
        repeated = [one for one in events if isinstance(one, StepRepeated)]
        return {
            "steps": steps,
            "states": states,
            "repeated": [one.step - 1 for one in repeated if one.step is not None],
            "told": all(one.rows > one.bound > 0 for one in repeated),
            "passes": trainer.forward_passes,
            "counts": trainer.session.counters.as_dict() if trainer.session is not None else {},
        }


def train_all(folder: Path) -> None:
    eager: dict[str, Any] = {}
    found = {}
    for name, case in CASES.items():
        key = repr((case.options, case.dropout, case.evaluated, case.again))
        if key not in eager:
            eager[key] = train(case, ours=False)
        found[name] = {"eager": eager[key], "ours": train(case, ours=True)}
    (folder / f"{dist.get_rank()}.json").write_text(json.dumps(found))


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder = tmp_path_factory.mktemp("repeats")
    run_processes(partial(train_all, folder))
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(2)]


@pytest.mark.parametrize("name", CASES)
def test_losses_and_norms_are_those_of_eager_steps(
    results: list[dict[str, Any]], name: str
) -> None:
    for found in results:
        assert found[name]["ours"]["steps"] == found[name]["eager"]["steps"]


@pytest.mark.parametrize("name", CASES)
def test_everything_is_as_after_eager_steps(results: list[dict[str, Any]], name: str) -> None:
    for found in results:
        ours, eager = found[name]["ours"]["states"], found[name]["eager"]["states"]
        for step, (one, other) in enumerate(zip(ours, eager, strict=True)):
            assert one == other, f"after step {step}"


@pytest.mark.parametrize("name", CASES)
def test_the_steps_that_exceed_the_bound_are_repeated(
    results: list[dict[str, Any]], name: str
) -> None:
    case = CASES[name]
    for found in results:
        ours = found[name]["ours"]
        assert ours["repeated"] == list(case.repeated) and ours["told"]
        passes = MICROBATCHES * (STEPS + len(case.repeated)) + (case.evaluated is not None)
        assert ours["passes"] == passes
        counts = ours["counts"]
        assert counts["mismatched"] == 0
        if case.again is None and case.evaluated is None:
            assert counts["repeated"] == len(case.repeated)
            assert counts["replayed"] == LAYERS * MICROBATCHES * (STEPS - WARMUP)
            assert counts["eager"] == LAYERS * MICROBATCHES * len(case.repeated)
        assert (counts["verified"] > 0) == (case.verify_interval > 0)
