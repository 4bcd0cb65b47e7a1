"""Observers of capture see each pass once, and none of the hooks around it."""

from __future__ import annotations

from typing import Any

import pytest
from torch import nn

from megatron_cg.capture.hook_order import HookOrder
from megatron_cg.events import Event, PassBegan, PassEnded, PassesDone, emit, subscribe
from megatron_cg.fsdp.transform import CAPTURE_TIME_KEYS, CaptureTimeHooks


def order_of(seen: list[str]) -> HookOrder:
    def noting(key: str) -> Any:
        return lambda _module: seen.append(key)

    hooks: CaptureTimeHooks = {key: {0: noting(key)} for key in CAPTURE_TIME_KEYS}
    return HookOrder(
        [nn.Identity()],
        1,
        [hooks],
        {"num_warmup_iters": 0},
        begun=lambda unit, forward: seen.append(f"begun {unit} {forward}"),
        ended=lambda unit, forward: seen.append(f"ended {unit} {forward}"),
    )


def call(order: HookOrder, key: str) -> None:
    (run,) = order.wrapped[0][key].values()
    run(nn.Identity())


def test_hooks_run_outside_of_what_is_observed() -> None:
    seen: list[str] = []
    order = order_of(seen)
    for key in CAPTURE_TIME_KEYS:
        call(order, key)
    assert seen == [
        *("forward_pre_hooks", "begun 0 True", "ended 0 True", "forward_hooks"),
        *("backward_pre_hooks", "begun 0 False", "ended 0 False", "backward_hooks"),
    ]


def test_hooks_that_a_failed_rank_runs_for_the_others_are_no_passes() -> None:
    seen: list[str] = []
    order = order_of(seen)
    call(order, "forward_pre_hooks")
    order.run_rest()
    rest = ["forward_hooks", "backward_pre_hooks", "backward_hooks"]
    assert seen == ["forward_pre_hooks", "begun 0 True", *rest]


def test_subscribers_hear_every_event_in_order_until_they_are_undone() -> None:
    heard: list[tuple[str, Event]] = []
    undo_first = subscribe(lambda event: heard.append(("first", event)))
    undo_second = subscribe(lambda event: heard.append(("second", event)))
    emit(PassBegan("layer 7", forward=True))
    undo_first()
    undo_first()
    emit(PassEnded("layer 7", forward=False))
    undo_second()
    emit(PassesDone())
    assert heard == [
        ("first", PassBegan("layer 7", forward=True)),
        ("second", PassBegan("layer 7", forward=True)),
        ("second", PassEnded("layer 7", forward=False)),
    ]


def test_what_a_subscriber_raises_reaches_the_core() -> None:
    def failing(_event: Event) -> None:
        raise OSError("no space")

    undo = subscribe(failing)
    try:
        with pytest.raises(OSError, match="no space"):
            emit(PassesDone())
    finally:
        undo()
