"""Steps that exceed a bound of rows are repeated, and train bit for bit as eager steps."""

import hashlib
import random
from collections.abc import Mapping
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import product
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy
import pytest
import torch
import torch.distributed as dist
from megatron.core import tensor_parallel
from megatron.core.rerun_state_machine import get_rerun_state_machine
from megatron.core.tensor_parallel.random import get_cuda_rng_tracker
from megatron.core.transformer.moe.moe_logging import get_moe_metrics_tracker
from torch.utils._pytree import tree_map_only

from megatron_cg.consensus.exchange import Agreement
from megatron_cg.experts import row_bound
from megatron_cg.experts.install import use_device_counts
from megatron_cg.experts.row_bound import RowBound
from megatron_cg.experts.stash import Stash
from megatron_cg.integrations import repeated_step
from megatron_cg.integrations.megatron.steps import repeat_steps
from megatron_cg.recompute.layers import allow_full_recompute
from megatron_cg.replay.mismatch_policy import ReplayPolicy
from megatron_cg.tape.tape_backend import TapeBackend
from megatron_cg.tape.training_plan import CpuModelConfig, TrainingPlan
from tests.functional.loops import RECOMPUTE
from tests.unit.experts.steps_of_megatron import MegatronTrainer, repeats, trainer_of
from tests.unit.grouped_linear import grouped_experts, in_place_of_te
from tests.unit.ranks import on_ranks

WARMUP, LAYERS, MICROBATCHES, RANKS, FACTOR = 1, 2, 2, 2, 1.05
Passes = frozenset[tuple[int, int, int]]
"""In which the bound counts as exceeded, on the rank's device: rank, microbatch and layer.

The layer of multi-token prediction comes last.
"""
NEVER: Passes = frozenset()
EVERY: Passes = frozenset(product(range(RANKS), range(MICROBATCHES), range(LAYERS + 1)))


def of(place: int, number: int) -> Passes:
    return frozenset(one for one in EVERY if one[place] == number)


@dataclass(frozen=True)
class Case:
    """A model, and for each of its steps with graphs the passes that exceed the bound.

    With ``real`` the bound is a real one, of ``FACTOR``, and every step exceeds it.
    """

    exceeds: tuple[Passes, ...] = (NEVER, EVERY, NEVER)
    real: bool = False
    stash: bool = False
    """Whether the bound is of the rows that all layers keep, and not of those of one exchange."""
    options: Mapping[str, Any] = field(default_factory=dict)
    dropout: float = 0.0
    fast_path: bool = True
    verify_interval: int = 0
    verifies_steps: bool = False
    again: int | None = None
    """The step before which graphs are deleted and captured again."""
    evaluated: int | None = None
    """The step before which the model is evaluated."""

    @property
    def layers(self) -> int:
        return LAYERS + int(self.options.get("mtp_num_layers", 0))

    @property
    def steps(self) -> int:
        return WARMUP + len(self.exceeds)

    @property
    def repeated(self) -> list[int]:
        found = enumerate(self.exceeds, WARMUP)
        return [step for step, exceeds in found if self.real or exceeds]

    @property
    def verified(self) -> list[int]:
        """The steps that are to be compared with eager ones."""
        with_graphs = range(WARMUP, self.steps) if self.verifies_steps else ()
        return [step for step in with_graphs if step not in self.repeated]

    @property
    def eager(self) -> str:
        """Equal for cases with equal eager steps, of which some have more."""
        return repr((self.options, self.dropout, self.evaluated, self.again))


GLOBAL = {"moe_router_load_balancing_type": "global_aux_loss"}
ON_META = {"init_model_with_meta_device": True}
SIGMOID = {
    "moe_router_score_function": "sigmoid",
    "moe_router_enable_expert_bias": True,
    "moe_router_load_balancing_type": "seq_aux_loss",
    "moe_router_dtype": "fp32",
}
LOSSES = {"moe_z_loss_coeff": 1e-3, "moe_input_jitter_eps": 0.01}
RECOMPUTED = {**RECOMPUTE, **SIGMOID}
MOE_ACT = {"recompute_granularity": "selective", "recompute_modules": ["moe_act"]}
FIRST_OF_ONE = of(0, 1) & of(1, 0) & of(2, 0)
PLACES: dict[str, Passes] = {
    "every pass, at first": EVERY,
    "never": NEVER,
    "one rank": of(0, 1),
    "never after one rank": NEVER,
    "the other rank": of(0, 0),
    "first microbatch": of(1, 0),
    "last microbatch": of(1, 1),
    "never after both microbatches": NEVER,
    "last layer of one rank": of(0, 0) & of(1, 1) & of(2, LAYERS - 1),
    "first layer of one rank": FIRST_OF_ONE,
    "never after one layer": NEVER,
    **{f"every pass, {number} in a row": EVERY for number in (1, 2, 3)},
}
"""Steps of one run, in this order."""
ALL_AT_ONCE = SIGMOID | LOSSES
AGAIN = Case(
    (NEVER, EVERY, EVERY, NEVER, EVERY),
    options=ALL_AT_ONCE,
    dropout=0.2,
    again=3,
    evaluated=4,
    verifies_steps=True,
)
CASES = {
    "each place in its step": Case(tuple(PLACES.values())),
    "loss over all microbatches, without the fast path": Case(options=GLOBAL, fast_path=False),
    "captured again, evaluated, all at once": AGAIN,
    "verified": Case((NEVER, EVERY, NEVER, FIRST_OF_ONE, NEVER), verify_interval=1),
    "a real bound, all at once, made on meta": Case(
        real=True, options=ALL_AT_ONCE | ON_META, dropout=0.2
    ),
    "a real bound, recomputed, verified": Case(real=True, options=RECOMPUTED, verify_interval=2),
    "kept, each layer on one rank and on all, MTP": Case(
        (NEVER, *(of(2, n) & part for n in range(LAYERS + 1) for part in (of(0, n % 2), EVERY))),
        stash=True,
        options={"mtp_num_layers": 1},
    ),
    "kept, captured again, evaluated, all at once": replace(AGAIN, stash=True),
    "kept, verified": Case(
        (NEVER, EVERY, NEVER, FIRST_OF_ONE, NEVER), stash=True, verify_interval=1
    ),
    "kept, a real bound": Case(real=True, stash=True, options=ALL_AT_ONCE | ON_META, dropout=0.2),
    "kept, recomputed": Case((NEVER,) * 3, stash=True, options=RECOMPUTED, verify_interval=2),
    "kept, activations recomputed": Case((NEVER, EVERY, NEVER), stash=True, options=MOE_ACT),
}
"""What a step changes is compared after each, so one case has all that draws numbers or counts."""


class Forced:
    """A bound that counts as exceeded in some passes of each step with graphs."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.switches, self.called = torch.zeros(LAYERS + 1, dtype=torch.int64), 0

    def before(self, steps: tuple[Passes, ...], step: int, microbatch: int) -> None:
        exceeds = steps[step - WARMUP] if step >= WARMUP else NEVER
        here = dist.get_rank(), microbatch
        on = [(*here, layer) in exceeds for layer in range(LAYERS + 1)]
        self.switches.copy_(torch.tensor(on))


class ForcedBound(Forced, RowBound):
    def watch(self, counts: torch.Tensor) -> None:
        switch = self.switches[self.called % LAYERS]
        self.called += 1
        super().watch(counts * (1 + 1000 * switch))
        # Nothing is sent then, so the numbers are wrong.
        counts.mul_(1 - switch)


class ForcedStash(Forced, Stash):
    def __init__(self, factor: float) -> None:
        super().__init__(factor)
        self.layers: dict[Any, int] = {}

    def keeping(self, experts: Any, counts: torch.Tensor, rows: int, layer: Any) -> Any:
        switch = self.switches[self.layers.setdefault(layer, len(self.layers))]
        return super().keeping(experts, counts * (1 + 1000 * switch), rows, layer)


def bound_of(case: Case) -> RowBound:
    factor = FACTOR if case.real else 1000.0
    if not case.stash:
        return RowBound(factor) if case.real else ForcedBound(factor)
    bound = RowBound(None, 1.25)
    bound.stash = Stash(0.4) if case.real else ForcedStash(1.25)
    return bound


def listed(tensor: Any) -> Any:
    return getattr(tensor, "_local_tensor", tensor).tolist()


def digest(value: Any) -> str:
    bits = tree_map_only(torch.Tensor, listed, value)
    return hashlib.sha256(repr(bits).encode()).hexdigest()


def state_of(trainer: MegatronTrainer) -> dict[str, str]:
    machine, states = get_rerun_state_machine(), trainer._optimizer.state
    metrics = get_moe_metrics_tracker().metrics
    values = {
        "shards": trainer._parameters,
        "moments": [
            [states.get(one, {}).get(name) for name in ("exp_avg", "exp_avg_sq")]
            for one in trainer._parameters
        ],
        "buffers": dict(trainer.model.named_buffers()),
        "metrics": {name: entry.values for name, entry in metrics.items()},
        "random": random.getstate(),
        "numpy": numpy.random.get_state(),
        "torch": torch.get_rng_state(),
        "tracker": get_cuda_rng_tracker().states_,
        "machine": [dict(machine.large_value_counts), dict(machine.max_values)],
        "read": trainer.read,
    }
    return {name: digest(value) for name, value in values.items()}


def train(case: Case, steps: int, ours: bool) -> dict[str, Any]:
    shape = CpuModelConfig(
        layers=LAYERS,
        experts=4,
        grouped=grouped_experts,
        expert_parallel=2,
        dropout=case.dropout,
        options=case.options,
        graph_modules=("attn", "moe") if ours else ("attn",),
    )
    plan = TrainingPlan(shape, graphs=ours, microbatches=MICROBATCHES)
    random.seed(1)
    numpy.random.seed(1)
    of_te = SimpleNamespace(is_fp8_enabled=lambda: False)
    with ExitStack() as undo:
        undo.enter_context(patch.object(row_bound, "MULTIPLE", 1))
        for name, value in {
            "FP8GlobalStateManager": of_te,
            "activation_recompute_forward": lambda **_named: nullcontext(),
            "fp8_autocast": lambda **_named: nullcontext(),
        }.items():
            undo.enter_context(patch.object(tensor_parallel.random, name, value, create=True))
        repeated = undo.enter_context(patch.object(repeated_step, "step_repeated"))
        verified = undo.enter_context(patch.object(repeated_step, "step_verified"))
        undo.callback(allow_full_recompute())
        if ours:
            undo.enter_context(in_place_of_te())
            bound = bound_of(case)
            undo.callback(use_device_counts(bound))
        trainer = undo.enter_context(trainer_of(plan))
        if ours:
            forced = bound.stash or bound
            if isinstance(forced, Forced):
                trainer.before = partial(forced.before, case.exceeds)
            undo.callback(repeat_steps())
            undo.callback(repeats(trainer))
        numbers, states = [], []
        policy = ReplayPolicy("error", case.verify_interval, int(case.verifies_steps))
        for step in range(steps):
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
                numbers.append([float(trainer.evaluate()).hex()])
            numbers.append([number.hex() for number in trainer.step()])
            states.append(state_of(trainer))
        return {
            "steps": numbers,
            "states": states,
            "repeated": [call.args[0] - 1 for call in repeated.call_args_list],
            "verified": [call.args[0] - 1 for call in verified.call_args_list],
            "told": all(
                call.args[1].rows > call.args[1].bound > 0 for call in repeated.call_args_list
            ),
            "passes": trainer.forward_passes,
            "counts": trainer.session.counters.as_dict() if trainer.session is not None else {},
        }


def train_all() -> dict[str, Any]:
    # What Megatron's router compiles takes longer than the steps; test_verify.py compiles it.
    torch.compiler.set_stance("force_eager")
    eager = {}
    for case in sorted(CASES.values(), key=lambda one: one.steps, reverse=True):
        if case.eager not in eager:
            eager[case.eager] = train(case, case.steps, ours=False)
    return {
        name: {"eager": eager[case.eager], "ours": train(case, case.steps, ours=True)}
        for name, case in CASES.items()
    }


@pytest.fixture(scope="module")
def results() -> list[dict[str, Any]]:
    return on_ranks(train_all)


@pytest.mark.parametrize("name", CASES)
def test_everything_is_as_after_eager_steps_and_those_beyond_the_bound_are_repeated(
    results: list[dict[str, Any]], name: str
) -> None:
    case = CASES[name]
    numbers = case.steps + (case.evaluated is not None)
    for found in results:
        ours, eager = found[name]["ours"], found[name]["eager"]
        assert len(ours["steps"]) == numbers and len(ours["states"]) == case.steps
        assert ours["steps"] == eager["steps"][:numbers]
        for step, state in enumerate(ours["states"]):
            assert state == eager["states"][step], f"after step {step}"
        assert ours["repeated"] == case.repeated and ours["told"]
        assert ours["verified"] == case.verified
        twice = len(case.repeated) + len(case.verified)
        passes = MICROBATCHES * (case.steps + twice) + (case.evaluated is not None)
        assert ours["passes"] == passes
        counts = ours["counts"]
        assert counts["mismatched"] == 0
        if case.again is None and case.evaluated is None:
            assert counts["repeated"] == len(case.repeated)
            assert counts["replayed"] == case.layers * MICROBATCHES * len(case.exceeds)
            assert counts["eager"] == case.layers * MICROBATCHES * len(case.repeated)
        assert (counts["verified"] > 0) == (case.verify_interval > 0)
