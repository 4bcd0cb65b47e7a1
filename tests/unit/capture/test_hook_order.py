"""Capture-time hooks run in the order that is expected, in TE's own loops and on the tape."""

from __future__ import annotations

import ast
import contextlib
import math
import sys
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn
from torch.utils._pytree import tree_flatten

from megatron_cg.backends.tape.tape_backend import TapeBackend
from megatron_cg.capture.hook_order import HookOrder, OutOfStepError
from megatron_cg.errors import CaptureError, UpstreamChangedError
from megatron_cg.fsdp.transform import CAPTURE_TIME_KEYS, CaptureTimeHooks
from megatron_cg.replay.region import capturing_flag
from megatron_cg.tools.cpu.fakes import cpu_fakes
from tests.unit.backends.cuda_double import OnCpu, cuda_double
from tests.unit.te_sources import source_of_te

Call = tuple[int, str, str]
Capture = Callable[..., Any]

ALL_SCHEDULES: dict[str, tuple[int, int, dict[str, Any]]] = {
    "no order": (3, 3, {}),
    "no warmup given": (2, 2, {"_order": [1, -1], "_num_layers_per_chunk": [2]}),
    "one warmup": (2, 2, {"_order": [1, -1], "num_warmup_iters": 1}),
    "unequal chunks": (3, 3, {"_order": [1, 2, -2, -1], "_num_layers_per_chunk": [1, 2]}),
}
"""Callables, samples and options of make_graphed_callables."""

schedules = pytest.mark.parametrize(
    ("layers", "samples", "options"), ALL_SCHEDULES.values(), ids=ALL_SCHEDULES
)


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


def linear(layers: int, samples: int) -> tuple[tuple[nn.Module, ...], list[tuple[torch.Tensor]]]:
    return (
        tuple(nn.Linear(4, 4) for _ in range(layers)),
        [(torch.ones(2, 4, requires_grad=True),) for _ in range(samples)],
    )


@pytest.fixture(params=["tape", "native", "transformer_engine"])
def capture(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Capture]:
    if request.param == "native":
        with cuda_double():
            yield OnCpu().capture
    elif request.param == "tape":
        yield TapeBackend().capture
    else:
        yield loops_of_te(monkeypatch)


def loops_of_te(monkeypatch: pytest.MonkeyPatch) -> Capture:
    """TE's own warmup and capture loops, from the installed sources; only CUDA's parts are not."""
    path = source_of_te("graph.py")
    wanted = {
        "_make_graphed_callables",
        "_canonicalize_capture_time_hooks",
        "_run_capture_time_hooks",
        "_none_grad_context_wrapper",
        "_GraphedCallableHelpers",
    }
    body = [n for n in ast.parse(path.read_text()).body if getattr(n, "name", None) in wanted]
    attention = ModuleType("te.attention.linear_attention.base")
    attention.LinearAttentionBase = type("LinearAttentionBase", (), {})  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, attention.__name__, attention)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", object)
    scope: dict[str, Any] = {
        "__package__": "te",
        "__name__": "te.graph",
        "torch": torch,
        "contextlib": contextlib,
        "ceil": math.ceil,
        "NamedTuple": NamedTuple,
        "_CAPTURE_TIME_HOOK_NAMES": CAPTURE_TIME_KEYS,
        "_tree_flatten": tree_flatten,
        "_graph_context_wrapper": lambda *_args, **_kwargs: contextlib.nullcontext(),
        "graph_pool_handle": lambda: None,
        "graph_safe_rng_available": lambda: False,
        "make_weak_ref": lambda tensors: tensors,
        **{
            name: type(name, (), {})
            for name in ("TransformerEngineBaseModule", "BasicOperation", "Sequential")
        },
    }
    exec(compile(ast.Module(body, []), str(path), "exec", annotations.compiler_flag), scope)

    def run(modules: Any, samples: Any, *, capture_time_hooks: Any, **options: Any) -> Any:
        hooks = scope["_canonicalize_capture_time_hooks"](len(modules), capture_time_hooks)
        with cpu_fakes():
            return scope["_make_graphed_callables"](
                modules, samples, capture_time_hooks=hooks, **options
            )

    return run


@schedules
def test_each_call_comes_when_it_is_expected(
    capture: Capture, layers: int, samples: int, options: dict[str, Any]
) -> None:
    bare: list[Call] = []
    capture(*linear(layers, samples), capture_time_hooks=recording_hooks(layers, bare), **options)
    calls: list[Call] = []
    modules, arguments = linear(layers, samples)
    order = HookOrder(modules, samples, recording_hooks(layers, calls), options)
    assert not order.finished
    capture(modules, arguments, capture_time_hooks=order.wrapped, **options)
    order.check_finished()
    assert order.finished and calls == bare and bare


@schedules
def test_the_rest_is_what_was_missing_wherever_it_stopped(
    layers: int, samples: int, options: dict[str, Any]
) -> None:
    bare: list[Call] = []
    hooks = recording_hooks(layers, bare)
    TapeBackend().capture(*linear(layers, samples), capture_time_hooks=hooks, **options)
    for before in range(2 * 2 * samples * (options.get("num_warmup_iters", 3) + 1)):
        calls: list[Call] = []
        modules, arguments = linear(layers, samples)
        order = HookOrder(modules, samples, recording_hooks(layers, calls), options)
        stopping = stop_after(before, order.wrapped)
        with pytest.raises(Stopped):
            TapeBackend().capture(modules, arguments, capture_time_hooks=stopping, **options)
        assert calls == bare[: len(calls)] and not order.finished
        order.run_rest()
        assert calls == bare
        order.check_finished()
        order.run_rest()
        assert calls == bare


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


def made(calls: list[Call], **options: Any) -> HookOrder:
    return HookOrder(linear(2, 2)[0], 2, recording_hooks(2, calls), options)


def test_another_order_names_te_and_both_calls() -> None:
    calls: list[Call] = []
    order = made(calls, num_warmup_iters=0)
    call(order, 0, "forward_pre_hooks")
    message = (
        r"transformer-engine .*: transformer_engine\.pytorch\.graph:_make_graphed_callables .*"
        r"at call 2 of capture-time hooks, of 8: forward_hooks of callable 0, "
    )
    for layer, key in ((1, "forward_hooks"), (0, "forward_pre_hooks")):
        with pytest.raises(
            UpstreamChangedError, match=message + f"where {key} of callable {layer} came"
        ):
            call(order, layer, key)
    with pytest.raises(UpstreamChangedError, match=message + "where nothing came"):
        order.check_finished()
    assert [name for _, _, name in calls] == ["a", "b"]
    order.run_rest()
    with pytest.raises(UpstreamChangedError, match="no more hooks, where forward_hooks of call"):
        call(order, 0, "forward_hooks")


def observed(seen: list[Any]) -> HookOrder:
    """The order of one callable, which notes its hooks and its passes."""

    def noting(key: str) -> Callable[[nn.Module], None]:
        return lambda _module: seen.append(key)

    hooks: CaptureTimeHooks = {key: {0: noting(key)} for key in CAPTURE_TIME_KEYS}
    order = HookOrder(
        linear(1, 1)[0],
        1,
        [hooks],
        {"num_warmup_iters": 0},
        begun=lambda layer, forward, _warmup: seen.append(
            ("begins", layer, forward, order.under_way)
        ),
        ended=lambda layer, forward, _warmup: seen.append(("ended", layer, forward)),
    )
    return order


def test_a_pass_begins_after_the_hooks_before_it_and_ends_before_those_after_it() -> None:
    seen: list[Any] = []
    order = observed(seen)
    for key in CAPTURE_TIME_KEYS:
        call(order, 0, key)
    before, after, before_backward, after_backward = CAPTURE_TIME_KEYS
    forward = [before, ("begins", 0, True, (0, False)), ("ended", 0, True), after]
    begins = ("begins", 0, False, (0, True))
    backward = [before_backward, begins, ("ended", 0, False), after_backward]
    assert seen == [*forward, *backward] and order.finished and order.under_way is None


def test_hooks_that_a_failed_rank_runs_for_the_others_are_no_passes() -> None:
    seen: list[Any] = []
    order = observed(seen)
    call(order, 0, "forward_pre_hooks")
    order.run_rest()
    assert seen == [CAPTURE_TIME_KEYS[0], ("begins", 0, True, (0, False)), *CAPTURE_TIME_KEYS[1:]]


def test_samples_that_do_not_fit_are_refused_before_any_hook_runs() -> None:
    with pytest.raises(CaptureError, match="3 sample_args for 2 callables"):
        HookOrder(linear(2, 2)[0], 3, recording_hooks(2, []), {})


def test_a_rank_whose_hook_raised_is_out_of_step() -> None:
    calls: list[Call] = []
    broken = recording_hooks(2, calls)
    broken[1]["backward_hooks"][7] = lambda _module: (_ for _ in ()).throw(Stopped())
    for in_capture in (True, False):
        calls.clear()
        modules, arguments = linear(2, 2)
        order = HookOrder(modules, 2, broken, {"num_warmup_iters": 0})
        if in_capture:
            with pytest.raises(Stopped):
                TapeBackend().capture(
                    modules, arguments, capture_time_hooks=order.wrapped, num_warmup_iters=0
                )
            assert calls
        with pytest.raises(
            OutOfStepError,
            match=r"backward_hooks of callable 1 \(Linear\) raised Stopped: \..*training cannot",
        ):
            order.run_rest()
        so_far = list(calls)
        with pytest.raises(OutOfStepError):
            order.run_rest()
        assert calls == so_far and not order.finished


@pytest.mark.parametrize(
    "options",
    [
        {"_order": [1, -1], "_num_layers_per_chunk": [3]},
        {"_order": [1, 2, -2, -1], "_num_layers_per_chunk": [1, 2]},
    ],
    ids=lambda options: str(options["_order"]),
)
def test_a_rank_that_failed_issues_the_same_all_gathers(
    one_rank: None, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    from megatron_cg.tools.cpu.train import Trainer
    from megatron_cg.tools.cpu.training_plan import CpuModelConfig, TrainingPlan

    gathered: list[int] = []
    gather = torch.distributed.all_gather_into_tensor

    def counted(output_tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        gathered.append(output_tensor.numel())
        return gather(output_tensor, *args, **kwargs)

    trainer = Trainer(TrainingPlan(model=CpuModelConfig(layers=3, graph_modules=("attn",))))
    trainer.step()
    monkeypatch.setattr(torch.distributed, "all_gather_into_tensor", counted)
    captured_all_gathers(trainer, options, None)
    whole = list(gathered)
    assert whole
    calls = len(options["_order"]) * 3 // max(options["_order"]) * 2 * 2
    for before in (0, 1, calls // 4, calls // 2, calls // 2 + 3, calls - 1):
        gathered.clear()
        captured_all_gathers(trainer, options, before)
        assert gathered == whole, before


def captured_all_gathers(trainer: Any, options: dict[str, Any], before: int | None) -> None:
    """Capture on the tape with one warmup, or fail after ``before`` calls and run the rest."""
    from megatron_cg.capture.transaction import capturing
    from megatron_cg.fsdp.megatron_fsdp import MegatronFsdp
    from megatron_cg.integrations.megatron.helper import units_of
    from megatron_cg.tools.cpu.cpu_model import transformer_layers

    layers = transformer_layers(trainer.model)
    backend = TapeBackend()
    one = [trainer._samples(layer) for layer in layers]
    per_chunk = options["_num_layers_per_chunk"]
    microbatches = len(options["_order"]) // len(per_chunk) // 2
    cut = [one[: per_chunk[0]], one[per_chunk[0] :]]
    args, kwargs = zip(*(sample for chunk in cut for sample in chunk * microbatches), strict=True)
    options = {**options, "num_warmup_iters": 1, "sample_kwargs": kwargs}
    options["allow_unused_input"] = True
    with (
        capturing(units_of(layers), MegatronFsdp(trainer.model.module), backend) as (hooks, _),
        capturing_flag(),
    ):
        order = HookOrder(layers, len(args), [unit.capture_time for unit in hooks], options)
        given = order.wrapped if before is None else stop_after(before, order.wrapped)
        try:
            backend.capture(tuple(layers), args, capture_time_hooks=given, **options)
        except Stopped:
            order.run_rest()
        order.check_finished()
    trainer._optimizer.zero_grad()
