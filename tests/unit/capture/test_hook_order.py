"""Capture-time hooks run in the order that is expected, in TE's own loops and on the tape."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from megatron_cg.capture.hook_order import HookOrder
from megatron_cg.errors import UpstreamChangedError
from megatron_cg.fsdp.roles import CAPTURE_TIME_KEYS, CaptureTimeHooks
from megatron_cg.tape.tape_backend import TapeBackend
from tests.unit.te_sources import loops_of_te

Call = tuple[int, str, str]

OPTIONS: dict[str, dict[str, Any]] = {
    "no options": {},
    "Megatron's": {"_order": [1, -1], "_num_layers_per_chunk": [3], "num_warmup_iters": 1},
}
options = pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)


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


def linear(layers: int) -> tuple[tuple[nn.Module, ...], list[tuple[torch.Tensor]]]:
    modules = tuple(nn.Linear(4, 4) for _ in range(layers))
    return modules, [(torch.ones(2, 4, requires_grad=True),) for _ in modules]


def bare_calls(capture: Callable[..., Any], options: dict[str, Any]) -> list[Call]:
    calls: list[Call] = []
    capture(*linear(3), capture_time_hooks=recording_hooks(3, calls), **options)
    assert calls
    return calls


@options
@pytest.mark.parametrize("of_te", [False, True])
def test_each_call_comes_when_it_is_expected(
    of_te: bool, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    capture = loops_of_te(monkeypatch) if of_te else TapeBackend().capture
    bare = bare_calls(capture, options)
    calls: list[Call] = []
    modules, arguments = linear(3)
    order = HookOrder(modules, recording_hooks(3, calls), options)
    assert not order.finished
    capture(modules, arguments, capture_time_hooks=order.wrapped, **options)
    order.check_finished()
    assert order.finished and calls == bare


@options
def test_the_rest_is_what_was_missing_wherever_it_stopped(options: dict[str, Any]) -> None:
    bare = bare_calls(TapeBackend().capture, options)
    for before in range(2 * 2 * 3 * (options.get("num_warmup_iters", 3) + 1)):
        calls: list[Call] = []
        modules, arguments = linear(3)
        order = HookOrder(modules, recording_hooks(3, calls), options)
        stopping = stop_after(before, order.wrapped)
        with pytest.raises(Stopped):
            TapeBackend().capture(modules, arguments, capture_time_hooks=stopping, **options)
        assert calls == bare[: len(calls)] and not order.finished
        for _ in range(2):
            order.run_rest()
            assert calls == bare
            order.check_finished()


def stop_after(number: int, hooks: list[CaptureTimeHooks]) -> list[CaptureTimeHooks]:
    """Let ``number`` calls through."""
    left = iter(range(number))

    def stopping(fn: Callable[[nn.Module], None]) -> Callable[[nn.Module], None]:
        def run(module: nn.Module) -> None:
            if next(left, None) is None:
                raise Stopped
            fn(module)

        return run

    return [
        {key: {n: stopping(fn) for n, fn in fns.items()} for key, fns in entry.items()}
        for entry in hooks
    ]


def call(order: HookOrder, layer: int, key: str) -> None:
    (fn,) = order.wrapped[layer][key].values()
    fn(nn.Identity())


def test_another_order_names_te_and_both_calls() -> None:
    calls: list[Call] = []
    order = HookOrder(linear(2)[0], recording_hooks(2, calls), {"num_warmup_iters": 0})
    call(order, 0, "forward_pre_hooks")
    message = (
        r"transformer-engine .*: transformer_engine\.pytorch\.graph:_make_graphed_callables .*"
        r"at call 2 of capture-time hooks, of 8: forward_hooks of callable 0, where "
    )
    for layer, key in ((1, "forward_hooks"), (0, "forward_pre_hooks")):
        with pytest.raises(UpstreamChangedError, match=f"{message}{key} of callable {layer} came"):
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
        linear(1)[0],
        [{key: {0: noting(key)} for key in CAPTURE_TIME_KEYS}],
        {"num_warmup_iters": 0},
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
