"""A plan compared with what a run measured, on figures made up for it."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

from benchmarks.graph_memory import (
    Allocator,
    CheckError,
    HeldByForward,
    check,
    measured_capture,
    pool_reserved,
)
from megatron_cg.capture.hook_order import HookOrder
from megatron_cg.events import PassBegan, PassEnded, emit, subscribe
from megatron_cg.fsdp.transform import CAPTURE_TIME_KEYS, CaptureTimeHooks

MIB = 2**20
PLAN: dict[str, Any] = {
    "layers": [
        {"index": 0, "memory": {"saved_activations": 90 * MIB, "outputs": 10 * MIB}},
        {"index": 1},
        {"index": 2, "memory": {"saved_activations": 180 * MIB, "outputs": 20 * MIB}},
    ],
    "graph_memory": {
        "static_inputs": 50 * MIB,
        "output_gradients": 10 * MIB,
        "pool_reserved": 400 * MIB,
        "total": 460 * MIB,
    },
}
RECORD: dict[str, Any] = {
    "graph_memory": {
        "pool_reserved": 440 * MIB,
        "held_by_forward": {"layer 0": 100 * MIB, "layer 2": 160 * MIB},
    }
}


def test_a_deviation_can_be_traced_to_its_term() -> None:
    result = check(PLAN, RECORD)
    assert result.total.error == pytest.approx(460 / 500 - 1)
    errors = {term.term: term.error for term in result.terms}
    assert errors == {
        "pool reserved": pytest.approx(400 / 440 - 1),
        "held by layer 0": 0.0,
        "held by layer 2": pytest.approx(0.25),
    }
    assert result.holds and "-8.0%" in str(result) and "+25.0%" in str(result)


def test_measured_inputs_take_the_place_of_planned_ones() -> None:
    record = copy.deepcopy(RECORD)
    record["graph_memory"]["static_inputs"] = 150 * MIB
    result = check(PLAN, record)
    assert result.total.measured == 600 * MIB and not result.holds
    assert "static inputs" in {term.term for term in result.terms}


def test_more_than_the_tolerance_does_not_hold() -> None:
    record = copy.deepcopy(RECORD)
    for measured, holds in ((347, True), (330, False), (475, True), (490, False)):
        record["graph_memory"]["pool_reserved"] = measured * MIB
        assert check(PLAN, record).holds is holds


@pytest.mark.parametrize(
    ("plan", "record", "message"),
    [
        (PLAN, {}, "pool_reserved"),
        ({"layers": []}, RECORD, "no estimates"),
        ({**PLAN, "layers": PLAN["layers"][:2]}, RECORD, "different flags"),
    ],
)
def test_what_cannot_be_compared_is_refused(
    plan: dict[str, Any], record: dict[str, Any], message: str
) -> None:
    with pytest.raises(CheckError, match=message):
        check(plan, record)


def test_only_the_graphs_pool_is_counted() -> None:
    snapshot = [
        {"segment_pool_id": (0, 0), "total_size": 100},
        {"segment_pool_id": (0, 7), "total_size": 20},
        {"segment_pool_id": (0, 7), "total_size": 40},
    ]
    assert pool_reserved(snapshot, (0, 7)) == 60


def test_memory_is_read_right_before_and_after_a_forward_pass() -> None:
    allocated, order = [0], []

    def hook(name: str, growth: int) -> Any:
        def run(_module: nn.Module) -> None:
            order.append(name)
            allocated[0] += growth

        return run

    hooks: CaptureTimeHooks = {
        "forward_pre_hooks": {3: hook("unshard", 1000)},
        "forward_hooks": {4: hook("reshard", -1000)},
    }
    module = nn.Identity()
    passes = HookOrder(
        [module],
        [hooks],
        {"num_warmup_iters": 1},
        begun=lambda _unit, forward, _: emit(PassBegan("layer 0", forward)),
        ended=lambda _unit, forward, _: emit(PassEnded("layer 0", forward)),
    )
    meter = HeldByForward(lambda: allocated[0])
    unsubscribe = subscribe(meter.hear)
    for held in (5, 64):  # warmup, then capture
        for key in CAPTURE_TIME_KEYS:
            for run in passes.wrapped[0][key].values():
                run(module)
            if key == "forward_pre_hooks":
                allocated[0] += held
            if key == "backward_pre_hooks":
                allocated[0] += 7
    unsubscribe()
    emit(PassEnded("layer 0", forward=True))
    assert meter.bytes == {"layer 0": 64}
    assert order == ["unshard", "reshard"] * 2


def test_a_measured_capture_is_the_capture_and_its_figures() -> None:
    allocated = [0]
    given: dict[str, Any] = {}
    table = torch.zeros(1000)

    def capture(layers: Any, args: Any, **options: Any) -> str:
        given.update(options, layers=layers, args=args)
        for name in ("layer 0", "layer 3"):
            emit(PassBegan(name, forward=True))
            allocated[0] += 4096
            emit(PassEnded(name, forward=True))
        return "graphs"

    layers = [nn.Identity(), nn.Identity()]
    args = [(torch.zeros(256),), (torch.zeros(256),)]
    snapshot = [{"segment_pool_id": (0, 9), "total_size": MIB}]
    graphs, figures = measured_capture(
        capture,
        layers,
        args,
        sample_kwargs=[{"table": table}, {"table": table, "mask": torch.zeros(1)}],
        borrowed=[table],
        allocator=Allocator(lambda: allocated[0], lambda: snapshot, lambda: (0, 9)),
        num_warmup_iters=2,
    )
    assert graphs == "graphs" and given["layers"] is layers and given["args"] is args
    assert given["pool"] == (0, 9) and given["num_warmup_iters"] == 2
    assert figures == {
        "pool_reserved": MIB,
        "held_by_forward": {"layer 0": 4096, "layer 3": 4096},
        "static_inputs": 2 * 1024 + 512,
    }
