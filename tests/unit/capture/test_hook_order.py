"""Capture-time hooks run in the order that is expected, in TE's own loops and on the tape."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from megatron_cg.backends.base import CaptureRequest
from megatron_cg.errors import UpstreamChangedError
from megatron_cg.fsdp.roles import CAPTURE_TIME_KEYS, CaptureTimeHooks, HookOrder
from megatron_cg.tape.tape_backend import TapeBackend
from tests.unit.backends.cuda_double import cuda_double
from tests.unit.te_sources import loops_of_te

Call = tuple[int, str, str]

warmups = pytest.mark.parametrize("warmups", [1, 3])


class Stopped(Exception):
    """Raised on purpose."""


def recording_hooks(layers: int, calls: list[Call]) -> list[CaptureTimeHooks]:
    """Two hooks a key; the last callable has none under one key and lacks another key."""

    def hook(layer: int, key: str, name: str) -> Callable[[nn.Module], None]:
        return lambda _module: calls.append((layer, key, name))

    hooks: list[CaptureTimeHooks] = [
        {key: {7: hook(layer, key, "a"), 3: hook(layer, key, "b")} for key in CAPTURE_TIME_KEYS}
        for layer in range(layers)
    ]
    hooks[-1]["forward_hooks"] = {}
    del hooks[-1]["backward_pre_hooks"]
    return hooks


def linear(
    layers: int, hooks: list[CaptureTimeHooks] | None = None, warmups: int = 0
) -> CaptureRequest:
    modules = tuple(nn.Linear(4, 4) for _ in range(layers))
    samples: Any = [(torch.ones(2, 4, requires_grad=True),) for _ in modules]
    return CaptureRequest(modules, samples, hooks=hooks or [], warmups=warmups)


def bare_calls(capture: Callable[[CaptureRequest], Any], warmups: int) -> list[Call]:
    calls: list[Call] = []
    capture(linear(3, recording_hooks(3, calls), warmups))
    assert calls
    return calls


@warmups
@pytest.mark.parametrize("of_te", [False, True])
def test_each_call_comes_when_it_is_expected(
    of_te: bool, warmups: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[Call] = []
    with cuda_double():
        capture = loops_of_te(monkeypatch) if of_te else TapeBackend().capture
        bare = bare_calls(capture, warmups)
        request = linear(3, recording_hooks(3, calls), warmups)
        order = HookOrder(request)
        assert not order.finished
        capture(replace(request, hooks=order.wrapped))
    order.check_finished()
    assert order.finished and calls == bare


@warmups
def test_the_rest_is_what_was_missing_wherever_it_stopped(warmups: int) -> None:
    bare = bare_calls(TapeBackend().capture, warmups)
    for before in range(2 * 2 * 3 * (warmups + 1)):
        calls: list[Call] = []
        request = linear(3, recording_hooks(3, calls), warmups)
        order = HookOrder(request)
        with pytest.raises(Stopped):
            TapeBackend().capture(replace(request, hooks=stop_after(before, order.wrapped)))
        assert calls == bare[: len(calls)] and not order.finished
        for _ in range(2):
            order.run_rest()
            assert calls == bare
            order.check_finished()


def stop_after(number: int, hooks: list[CaptureTimeHooks]) -> list[CaptureTimeHooks]:
    left = iter(range(number))

    def stopping(fn: Callable[[nn.Module], None], module: nn.Module) -> None:
        if next(left, None) is None:
            raise Stopped
        fn(module)

    return [
        {key: {n: partial(stopping, fn) for n, fn in fns.items()} for key, fns in entry.items()}
        for entry in hooks
    ]


def call(order: HookOrder, layer: int, key: str) -> None:
    (fn,) = order.wrapped[layer][key].values()
    fn(nn.Identity())


def test_another_order_names_te_and_both_calls() -> None:
    calls: list[Call] = []
    order = HookOrder(linear(2, recording_hooks(2, calls)))
    call(order, 0, "forward_pre_hooks")
    message = (
        r"transformer-engine .*: transformer_engine\.pytorch\.graph:_make_graphed_callables .*"
        r"at call 2 of capture-time hooks, of 8: forward_hooks of callable 0 \(Linear\), where "
    )
    for layer, key in ((1, "forward_hooks"), (0, "forward_pre_hooks")):
        came = rf"{key} of callable {layer} \(Linear\) came"
        with pytest.raises(UpstreamChangedError, match=message + came):
            call(order, layer, key)
    with pytest.raises(UpstreamChangedError, match=f"{message}nothing came"):
        order.check_finished()
    assert [name for _, _, name in calls] == ["a", "b"]
    order.run_rest()
    with pytest.raises(UpstreamChangedError, match="no more hooks, where forward_hooks of call"):
        call(order, 0, "forward_hooks")


@pytest.mark.parametrize("fails", [False, True])
def test_a_pass_begins_after_the_hooks_before_it_and_ends_before_those_after_it(
    fails: bool,
) -> None:
    """Hooks that a failed rank runs for the others are no passes."""
    seen: list[Any] = []

    def noting(key: str) -> Callable[[nn.Module], None]:
        return lambda _module: seen.append(key)

    order = HookOrder(
        linear(1, [{key: {0: noting(key)} for key in CAPTURE_TIME_KEYS}]),
        begun=lambda *which: seen.append(("begun", which, order.under_way)),
        ended=lambda *which: seen.append(("ended", which)),
    )
    for key in CAPTURE_TIME_KEYS[: 1 if fails else 4]:
        call(order, 0, key)
    order.run_rest()
    before, after, *of_backward = CAPTURE_TIME_KEYS
    expected = [before, ("begun", (0, True, False), (0, False)), after, *of_backward]
    if not fails:
        expected.insert(2, ("ended", (0, True, False)))
        expected[5:5] = [("begun", (0, False, False), (0, True)), ("ended", (0, False, False))]
    assert seen == expected and order.finished and order.under_way is None
