"""The native backend on the double of ``torch.cuda``: what it holds, copies, trains and refuses."""

import gc
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from megatron_cg.backends.base import CaptureRequest, generators_of
from megatron_cg.backends.driver import GraphResetError, _lies_in
from megatron_cg.errors import CaptureError
from megatron_cg.fsdp.roles import CAPTURE_TIME_KEYS
from megatron_cg.native.native_backend import refuse
from tests.unit.backends.blocks import small
from tests.unit.backends.cuda_double import (
    DEFAULT,
    REFUSED,
    WARMUPS,
    Calling,
    CudaDouble,
    Graph,
    OnCpu,
    capture,
    cuda_double,
)
from tests.unit.backends.test_te_backend import QuantizationState, fake_te
from tests.unit.units.plain import REPLAYED, assert_as_eager, units
from tests.unit.units.test_refusals import Dropped


def test_graphs_share_a_pool_and_a_stream_and_are_captured_on_it(cuda: CudaDouble) -> None:
    streams, keys = list[Any](), ("forward_pre_hooks", "backward_hooks")
    hooks = {key: {0: lambda _: streams.append(cuda.stream)} for key in keys}
    capture(nn.Linear(4, 4), hooks=[hooks], warmups=1)
    keeper, forward, backward = cuda.graphs
    assert {graph.pool for graph in cuda.graphs} == {(0, 1)} and cuda.users == {(0, 1): 3}
    assert keeper.stream is forward.stream is backward.stream is not DEFAULT
    assert {graph.mode for graph in cuda.graphs} == {"global"}
    # Hooks of the warmup run on a stream of its own, and those of the capture on the caller's.
    assert streams[0] is streams[1] not in (DEFAULT, keeper.stream)
    assert streams[2:] == [DEFAULT] * 2 and cuda.stream == DEFAULT


def test_garbage_is_collected_between_the_graphs_of_a_capture_and_not_in_one(
    cuda: CudaDouble,
) -> None:
    inside, between = list[bool](), list[bool]()

    class Layer(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if cuda.underway is not None:
                inside.append(gc.isenabled())
            return super().forward(x)

    hooks = {key: {0: lambda _: between.append(gc.isenabled())} for key in CAPTURE_TIME_KEYS}
    capture(Layer(4, 4), hooks=[hooks])
    assert inside == [False] and between and all(between)


def test_the_pool_is_held_until_the_last_graph_is_reset(cuda: CudaDouble) -> None:
    one, two = capture(nn.Linear(4, 4), nn.Linear(4, 4))
    output = one(torch.ones(2, 4))
    two.reset()
    two.reset()
    assert cuda.users == {(0, 1): 3} and output.isfinite().all()
    assert one(torch.ones(2, 4)).isfinite().all()
    one.reset()
    assert cuda.users == {(0, 1): 0} and [graph.resets for graph in cuda.graphs] == [1] * 5
    with pytest.raises(GraphResetError):
        one(torch.ones(2, 4))


def test_the_warmup_is_over_before_the_hooks_of_the_capture(cuda: CudaDouble) -> None:
    """FSDP's hooks free and write weights that kernels of the warmup may still read."""
    running = list[bool]()
    note = {0: lambda _: running.append(bool(cuda.running))}
    capture(nn.Linear(4, 4), hooks=[{"forward_pre_hooks": note}])
    assert running == [True] * WARMUPS + [False]


@pytest.mark.parametrize("number", [2, WARMUPS + 1])
@pytest.mark.parametrize("fails_too", [None, (torch.cuda, "synchronize"), (Graph, "reset")])
def test_a_warmup_that_fails_is_over_before_it_is_undone(
    cuda: CudaDouble, fails_too: Any, number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A device that has failed too does not hide the first error."""

    def fail() -> None:
        if fails_too is not None:
            monkeypatch.setattr(fails_too[0], fails_too[1], device_failed)
        raise LookupError("the first error")

    def device_failed(*_graph: Any) -> None:
        raise torch.AcceleratorError("CUDA error: an illegal memory access was encountered")

    backend, layers = OnCpu(), (nn.Linear(4, 4), Calling(fail, number))
    with backend.preserved(layers):
        with pytest.raises(LookupError, match="the first error"):
            small(backend, *layers)
        never_waits = fails_too == (torch.cuda, "synchronize") and number == 2
        assert bool(cuda.running) is never_waits


@pytest.mark.parametrize("stage", ["warmup", "forward", "backward", "in the second module"])
@pytest.mark.parametrize("how", ["refused by CUDA", "an error of the model"])
def test_a_capture_that_fails_leaves_no_stream_pool_or_graph(
    cuda: CudaDouble, stage: str, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail() -> None:
        if how == "refused by CUDA":
            cuda.refuse()
        raise LookupError("of the model")

    number = 1 if stage == "warmup" else WARMUPS + 1
    first: nn.Module = nn.Linear(4, 4)
    failing: nn.Module = Calling(fail, number)
    if stage == "backward":
        failing = nn.Linear(4, 4)
        real, calls = torch.autograd.backward, iter(range(1, 99))

        def backward(*args: Any, **kwargs: Any) -> None:
            if next(calls) == 2 * WARMUPS + 1:
                fail()
            real(*args, **kwargs)

        monkeypatch.setattr(torch.autograd, "backward", backward)
    modules = (first, failing) if stage == "in the second module" else (failing, first)
    kept, state, garbage = torch.ones(1), torch.get_rng_state(), gc.isenabled()
    with pytest.raises((torch.AcceleratorError, LookupError)) as caught:
        capture(*modules)
    first_error = caught.value.__context__ or caught.value
    expected = REFUSED if how == "refused by CUDA" and stage != "warmup" else "of the model"
    assert expected in str(first_error)
    assert cuda.stream == DEFAULT and cuda.underway is None and gc.isenabled() is garbage
    assert set(cuda.users.values()) == {0} and kept.eq(1).all()
    assert torch.equal(torch.get_rng_state(), state)
    # The next capture works.
    (graph,) = capture(nn.Linear(4, 4))
    assert graph(torch.ones(2, 4)).isfinite().all()


@pytest.mark.parametrize("share", [False, True])
def test_only_what_a_caller_may_still_read_owns_its_memory(cuda: CudaDouble, share: bool) -> None:
    modules = [nn.Linear(4, 4) for _ in range(4)]
    graphs = capture(*modules, share_buffers=share)
    memory = cuda.memory[0, 1]

    def owners(tensors: Any) -> list[bool]:
        return [memory.owns(tensor.untyped_storage()) for tensor in tensors]

    for index, graph in enumerate(graphs):
        recorded = graph._recorded
        assert owners(recorded.outputs) == [not share]
        of_input, *of_parameters = owners(recorded.grad_inputs)
        assert of_parameters == [False, False]
        # The last two backward passes are those of the first two modules.
        assert of_input is (not share or index < 2)
        addresses = [t.data_ptr() for t in (*recorded.outputs, *recorded.grad_inputs)]
        own = {storage.data_ptr() for storage in memory._own.values()}
        assert set(addresses) <= own


def test_an_output_outside_of_the_pool_keeps_its_memory(cuda: CudaDouble) -> None:
    class Passing(nn.Linear):
        def forward(self, x: torch.Tensor) -> Any:
            return super().forward(x), self.weight.detach()

    (graph,) = capture(Passing(4, 4), share_buffers=True)
    _, weight = graph._recorded.outputs
    assert weight.untyped_storage()._cdata == graph._recorded.module.weight.untyped_storage()._cdata


def test_copies_are_made_together_by_dtype_and_only_where_they_are_needed(
    cuda: CudaDouble, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Sum(nn.Linear):
        def forward(self, x: torch.Tensor, *others: torch.Tensor) -> torch.Tensor:
            return super().forward(x) + sum(other.sum() for other in others)

    module = Sum(4, 4)
    samples = (torch.ones(2, 4), torch.ones(3), torch.ones(2, dtype=torch.long), torch.ones(5))
    made: Any = OnCpu().capture(CaptureRequest((module,), [samples]))
    (graph,) = made
    calls: list[list[torch.dtype]] = []
    real = torch._foreach_copy_

    def copy(into: list[torch.Tensor], values: list[torch.Tensor]) -> Any:
        calls.append([tensor.dtype for tensor in into])
        return real(into, values)

    monkeypatch.setattr(torch, "_foreach_copy_", copy)
    inputs = (torch.ones(2, 4), torch.ones(3), torch.full((2,), 2), samples[3])
    static: torch.Tensor = graph._recorded.grad_outputs[0]
    assert torch.equal(graph(*inputs), module(*inputs))
    assert calls == [[torch.float32] * 2, [torch.int64]]
    calls.clear()
    graph(*samples).backward(static.fill_(1.0))
    assert calls == []
    # At the same address, but laid out in another way.
    static.copy_(torch.arange(8.0).view(2, 4))
    same = static.as_strided((2, 4), (1, 2))
    expected = same.sum(0)
    module.zero_grad()
    graph(*samples).backward(same)
    lazy = torch.ones(2, dtype=torch.complex64)
    assert _lies_in(lazy, lazy) and not _lies_in(lazy.conj(), lazy)
    assert calls == [[torch.float32]] and module.bias.grad is not None
    assert torch.equal(module.bias.grad, expected)


@pytest.mark.parametrize("verify", [0, 1])
def test_units_of_a_plain_module_train_the_same_numbers(one_rank: None, verify: int) -> None:
    counts = {"captured": 2, "replayed": REPLAYED, "eager": 0, "verified": REPLAYED * verify}
    with cuda_double(fakes=False) as cuda:
        options: dict[str, Any] = {"backend": OnCpu(), "verify_interval": verify}
        assert_as_eager(counts, partial(units, Dropped), on_mismatch="error", **options)
        # No graph may be destroyed while one replays.
        assert cuda.graphs
        assert all(graph.resets and not graph.reset_among for graph in cuda.graphs)


def test_generators_of_modules_and_trackers_are_registered_before_the_capture(
    cuda: CudaDouble,
) -> None:
    class Drawing(nn.Linear):
        def __init__(self) -> None:
            super().__init__(4, 4)
            self.generator = torch.Generator().manual_seed(3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) + torch.rand(4, generator=self.generator, device=x.device)

    drawing = Drawing()
    module, own = nn.Sequential(drawing), drawing.generator
    before = own.get_state()
    capture(module)
    _, forward, backward = cuda.graphs
    assert own in forward.registered and own in backward.registered
    assert torch.equal(own.get_state(), before)
    assert generators_of([module], "cuda") == []


def having(**attributes: Any) -> nn.Linear:
    module = nn.Linear(4, 4)
    vars(module).update(attributes)
    return module


def quantized() -> nn.Linear:
    """Its buffer keeps its values as TE's quantized tensors do."""
    module = nn.Linear(4, 4)
    module.register_buffer("scaled", torch.ones(2))
    module.scaled._rowwise_data = torch.ones(2)  # type: ignore[union-attr]
    return module


DELAYED = {"need_backward_dw": lambda: True}
FUSED = {"fuse_wgrad_accumulation": True}
CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("module", "found"),
    [
        (having(primary_weights_in_fp8=True), r"0 \(Linear\) has FP8 weights"),
        (quantized(), r"0 \(Linear\) has FP8 weights"),
        (having(**FUSED), r"0 \(Linear\) has fuse_wgrad_accumulation=True.*main_grad"),
        (
            having(gradient_accumulation_fusion=True),
            "gradient_accumulation_fusion=True.*no-gradient-accumulation",
        ),
        (having(**DELAYED), "delay_wgrad_compute=False"),
        (nn.Linear(4, 4, device="meta"), "buffers on meta: move the model to cpu"),
    ],
)
def test_what_a_replay_would_get_wrong_is_refused_by_name(module: nn.Module, found: str) -> None:
    with pytest.raises(CaptureError, match=found):
        refuse(CaptureRequest((nn.Sequential(module),), [(torch.ones(1),)]), CPU)
    refuse(CaptureRequest((nn.Linear(4, 4),), [(torch.ones(1),)], [{"mask": torch.ones(1)}]), CPU)


def test_all_reasons_come_at_once_and_before_anything_runs(cuda: CudaDouble) -> None:
    samples = [(torch.ones(1, device="meta"),), (torch.ones(1),)]
    more = [{"mask": torch.ones(1, device="meta")}, {}]
    with pytest.raises(CaptureError, match="4 reasons") as caught:
        modules = having(**FUSED), having(**DELAYED)
        OnCpu().capture(CaptureRequest(modules, samples, more))
    said = str(caught.value)
    assert "callable 0 (Linear)" in said and "callable 1 (Linear)" in said
    assert said.count("a sample is on meta: move it to cpu") == 2
    assert cuda.graphs == [] and cuda.memory == {}


@pytest.mark.parametrize("fails", [False, True])
def test_modules_of_te_are_told_of_the_capture(
    cuda: CudaDouble, monkeypatch: pytest.MonkeyPatch, fails: bool
) -> None:
    te = fake_te(monkeypatch)
    seen: list[bool] = []

    def look() -> None:
        seen.append(te.capturing)
        if fails:
            raise LookupError

    with pytest.raises(LookupError) if fails else nullcontext():
        capture(Calling(look, 1))
    assert seen == [True] and te.capturing is False
    if not fails:
        assert te.states["te"] in cuda.graphs[1].registered


@pytest.mark.refuses("native-backend-fp8")
def test_fp8_is_refused_at_capture_and_seen_by_the_guard(
    cuda: CudaDouble, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend: Any = OnCpu()
    assert backend.numerics() is None and backend.captured_numerics(0, {}) is None
    fake_te(monkeypatch)
    monkeypatch.setattr(QuantizationState, "recipe", "delayed")
    assert backend.numerics() == "delayed"
    with pytest.raises(CaptureError, match="FP8 is on"):
        capture(nn.Linear(4, 4))


def test_autocast_with_its_cache_is_refused(cuda: CudaDouble) -> None:
    with (
        torch.autocast("cpu", dtype=torch.bfloat16),
        pytest.raises(CaptureError, match="cache_enabled=False"),
    ):
        capture(nn.Linear(4, 4))
    with torch.autocast("cpu", dtype=torch.bfloat16, cache_enabled=False):
        capture(nn.Linear(4, 4))
