"""What can go wrong between capture and replay, done to a real model on the tape, is seen.

Each fault is put into an eager run and into one with graphs, at the same step.
"""

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

import pytest
import torch

from megatron_cg.tape.tape_backend import TapeBackend
from megatron_cg.tape.training_plan import CpuModelConfig
from tests.unit.counted import expect
from tests.unit.trainers import compared, layers_of

pytestmark = pytest.mark.fault
LAYERS, BEFORE, AFTER = 2, 2, 2
ROUTER = ("attn", "moe_router")
LOGGER = "megatron_cg.replay.mismatch_policy"
Fault = Callable[[Any], Any]
"""Does its worst to a trainer; may return a context manager for the next step."""


def with_keyword(name: str, change: Callable[[Any], Any]) -> Fault:
    def hook(_module: Any, args: Any, kwargs: Any) -> Any:
        return args, {**kwargs, name: change(kwargs.get(name))}

    def fault(trainer: Any) -> None:
        layers_of(trainer)[0].register_forward_pre_hook(hook, with_kwargs=True)

    return fault


def hook_beside(trainer: Any) -> None:
    """On a module inside the graph that has hooks of Megatron-FSDP's."""
    inside = layers_of(trainer)[0].modules()
    next(inside)
    module = next(module for module in inside if module._forward_pre_hooks)
    module.register_forward_pre_hook(lambda _module, args: (args[0] * 2, *args[1:]))


def metrics_replaced(_trainer: Any) -> None:
    from megatron.core.transformer.moe.moe_logging import destroy_moe_metrics_tracker

    destroy_moe_metrics_tracker()


@dataclass(frozen=True)
class Case:
    """A fault, and what the model needs for it."""

    fault: Fault
    words: str
    """What is said of the layer."""
    scopes: tuple[str, ...] = ("attn", "mlp")
    experts: int = 0
    fsdp: dict[str, Any] = field(default_factory=dict)
    """Of Megatron-FSDP."""


class Numeric(TapeBackend):
    """The tape with a state of numerics, as TE has one of FP8."""

    recipe = "none"

    def numerics(self) -> Any:
        return self.recipe

    def captured_numerics(self, index: int, options: Any) -> Any:
        return "none"


FAULTS: dict[str, Case] = {
    "object": Case(
        with_keyword("sequence_len_offset", lambda _old: 0),
        "argument sequence_len_offset was not given at capture and is 0 now",
    ),
    "shape": Case(
        with_keyword("attention_mask", lambda old: old.repeat(2, 1, 1, 1)),
        "attention_mask was (1, 1, 16, 16) at capture and is (2, 1, 16, 16) now",
    ),
    "autocast": Case(
        lambda _: torch.autocast("cpu", dtype=torch.float16),
        "for cpu was off at capture and is torch.float16 now",
    ),
    "fp8": Case(
        lambda _: patch.object(Numeric, "recipe", "tensorwise"),
        "was none at capture and is tensorwise now",
    ),
    "metrics": Case(metrics_replaced, "metrics tracker was the MoEMetricsTracker", ROUTER, 4),
}
"""By the clause that has to see it. ``test_inputs.py`` and ``test_depends_on.py`` have more."""
BESIDE = Case(
    hook_beside,
    "at capture and is with 2 others now",
    fsdp={"megatron_fsdp_enable_fine_grained_param_gather": True},
)


@pytest.mark.parametrize(
    ("clause", "case"),
    [
        *(pytest.param(clause, case, id=clause) for clause, case in FAULTS.items()),
        pytest.param("hooks", BESIDE, id="hooks beside others"),
    ],
)
def test_each_fault_is_seen_and_training_stays_bit_equal(
    clause: str, case: Case, one_rank: None, caplog: pytest.LogCaptureFixture
) -> None:
    def act(trainer: Any) -> list[Any]:
        numbers = [trainer.step() for _ in range(BEFORE)]
        if trainer.session is not None:
            expect(trainer.session.counters, mismatched=0, replayed=2 * BEFORE)
        with case.fault(trainer) or nullcontext():
            return numbers + [trainer.step() for _ in range(AFTER)]

    model = CpuModelConfig(
        layers=LAYERS,
        graph_modules=case.scopes,
        experts=case.experts,
        dropout=0.1,
        bf16=False,
        fsdp_options=case.fsdp,
    )
    eager, graphed, counts = compared(act, model, Numeric())
    assert graphed == eager
    assert counts["mismatched"] > 0 and counts["eager"] == counts["mismatched"]
    reports = [r.getMessage() for r in caplog.records if r.name == LOGGER]
    said = [r for r in reports if f"({clause})" in r and "layer 0" in r and case.words in r]
    assert said, reports
    assert len(set(reports)) == len(reports) <= 2
