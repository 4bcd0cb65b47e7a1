"""The native backend on the double of ``torch.cuda``: what it refuses, holds and leaves behind."""

from __future__ import annotations

import gc
import sys
import types
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import nn

from megatron_cg.backends.driver.graphed import GraphResetError
from megatron_cg.backends.native import native_backend
from megatron_cg.backends.native.native_backend import NativeBackend, generators_of
from megatron_cg.backends.native.native_refusals import refuse
from megatron_cg.errors import ArgumentError, CaptureError
from megatron_cg.replay.in_flight import InFlight
from megatron_cg.replay.unit import Unit
from tests.unit.backends.cuda_double import DEFAULT, REFUSED, CudaDouble, Graph, OnCpu, cuda_double
from tests.unit.counted import expect


@pytest.fixture
def cuda() -> Iterator[CudaDouble]:
    with cuda_double() as double:
        yield double


def capture(*modules: nn.Module, **options: Any) -> Any:
    """Graphs of these modules, with everything restored as a session does."""
    backend = OnCpu()
    samples = [(torch.ones(2, 4, requires_grad=True),) for _ in modules]
    hooks = options.pop("hooks", [{} for _ in modules])
    with backend.preserved(modules):
        return backend.capture(modules, samples, capture_time_hooks=hooks, **options)


class Calling(nn.Linear):
    """Calls a function in its ``number``-th forward pass."""

    def __init__(self, call: Callable[[], None], number: int) -> None:
        super().__init__(4, 4)
        self.call, self.passes, self.number = call, 0, number

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.passes += 1
        if self.passes == self.number:
            self.call()
        return super().forward(x)


def test_graphs_share_a_pool_and_a_stream_and_are_captured_on_it(cuda: CudaDouble) -> None:
    streams = []

    def hook(_module: nn.Module) -> None:
        streams.append(cuda.stream)

    keys = ("forward_pre_hooks", "backward_hooks")
    capture(nn.Linear(4, 4), hooks=[{key: {0: hook} for key in keys}], num_warmup_iters=1)
    keeper, forward, backward = cuda.graphs
    assert {graph.pool for graph in cuda.graphs} == {(0, 1)} and cuda.users == {(0, 1): 3}
    assert keeper.stream is forward.stream is backward.stream is not DEFAULT
    assert {graph.mode for graph in cuda.graphs} == {"global"}
    # Hooks of the warmup run on a stream of its own, and those of the capture on the caller's.
    assert streams[0] is streams[1] not in (DEFAULT, keeper.stream)
    assert streams[2:] == [DEFAULT] * 2 and cuda.stream == DEFAULT


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


WARMUPS = 3


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


def test_the_keeper_that_cannot_be_captured_leaves_nothing_either(
    cuda: CudaDouble, monkeypatch: pytest.MonkeyPatch
) -> None:
    def zeros(*_args: Any, **_kwargs: Any) -> None:
        cuda.refuse()

    monkeypatch.setattr(torch, "zeros", zeros)
    with pytest.raises(torch.AcceleratorError):
        capture(nn.Linear(4, 4))
    assert cuda.stream == DEFAULT and cuda.underway is None and cuda.users == {(0, 1): 0}


def test_a_device_that_failed_does_not_hide_its_first_error(
    cuda: CudaDouble, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail() -> None:
        def reset(_graph: Graph) -> None:
            raise torch.AcceleratorError("CUDA error: an illegal memory access was encountered")

        monkeypatch.setattr(Graph, "reset", reset)
        raise LookupError("the first error")

    with pytest.raises(LookupError, match="the first error"):
        capture(Calling(fail, WARMUPS + 1))


@pytest.mark.parametrize("share", [False, True])
def test_only_what_a_caller_may_still_read_owns_its_memory(cuda: CudaDouble, share: bool) -> None:
    modules = [nn.Linear(4, 4) for _ in range(4)]
    graphs = capture(*modules, _order=[1, -1], _reuse_graph_input_output_buffers=share)
    memory = cuda.memory[0, 1]

    def owners(tensors: Any) -> list[bool]:
        return [memory.owns(tensor.untyped_storage()._cdata) for tensor in tensors]

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

    (graph,) = capture(Passing(4, 4), _order=[1, -1], _reuse_graph_input_output_buffers=True)
    _, weight = graph._recorded.outputs
    assert weight.untyped_storage()._cdata == graph._recorded.module.weight.untyped_storage()._cdata


def test_a_lazy_conjugate_keeps_what_it_means(cuda: CudaDouble) -> None:
    class Conjugated(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return (x * 2).conj()

    x = torch.tensor([1 + 2j], requires_grad=True)
    made: Any = OnCpu().capture(
        (Conjugated(),),
        [(torch.zeros(1, dtype=torch.complex64, requires_grad=True),)],
        capture_time_hooks=[{}],
        _order=[1, -1],
        _reuse_graph_input_output_buffers=True,
    )
    (graph,) = made
    output = graph(x)
    assert output.tolist() == [2 - 4j]
    output.backward(torch.tensor([1 + 1j]))
    assert x.grad is not None and x.grad.tolist() == [2 - 2j]
    (memory,) = graph.replay_function().incoming
    static = graph._recorded.grad_outputs[0]
    assert memory.holds(static) and not memory.holds(static.conj())


def test_copies_are_made_together_by_dtype_and_only_where_they_are_needed(
    cuda: CudaDouble, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Sum(nn.Linear):
        def forward(self, x: torch.Tensor, *others: torch.Tensor) -> torch.Tensor:
            return super().forward(x) + sum(other.sum() for other in others)

    module = Sum(4, 4)
    samples = (torch.ones(2, 4), torch.ones(3), torch.ones(2, dtype=torch.long), torch.ones(5))
    made: Any = OnCpu().capture((module,), [samples], capture_time_hooks=[{}])
    (graph,) = made
    calls: list[list[torch.dtype]] = []
    real = torch._foreach_copy_

    def copy(into: list[torch.Tensor], values: list[torch.Tensor]) -> Any:
        calls.append([tensor.dtype for tensor in into])
        return real(into, values)

    monkeypatch.setattr(torch, "_foreach_copy_", copy)
    inputs = (torch.ones(2, 4), torch.ones(3), torch.full((2,), 2), samples[3])
    static: torch.Tensor = graph._recorded.grad_outputs[0]
    output = graph(*inputs)
    assert torch.equal(output, module(*inputs))
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
    assert calls == [[torch.float32]] and module.bias.grad is not None
    assert torch.equal(module.bias.grad, expected)


def test_the_gradients_that_a_backward_replay_copies_are_counted(cuda: CudaDouble) -> None:
    from megatron_cg.replay.counters import Counters, counts_text
    from megatron_cg.replay.static_memory import copies

    class Two(nn.Linear):
        def forward(self, x: torch.Tensor) -> Any:
            return super().forward(x), x.detach() * 2, super().forward(x) * 3

    (graph,) = capture(Two(4, 4))
    incoming = graph.replay_function().incoming
    assert [memory and memory.nbytes for memory in incoming] == [32, None, 32]
    counters = Counters()
    in_flight = InFlight()

    def count(gradients: Any) -> None:
        counters.count_backward(*copies(incoming, gradients))

    for used in (0, 2):
        outputs = graph(torch.ones(2, 4, requires_grad=True))
        in_flight.begin(0, Unit("unit", nn.Identity(), ()), outputs, count)
        static = graph._recorded.grad_outputs[used].fill_(1.0)
        torch.autograd.backward(outputs[used], static)
    # Each pass: one gradient was in place, and one was not there, which autograd makes zeros.
    assert counters.as_dict() | {
        "backwards": 2,
        "gradients_copied": 2,
        "gradient_bytes_copied": 64,
    } == (counters.as_dict())
    counters.replayed = 2
    assert "backward 1.0 copied (0.00 MiB)" in counts_text(counters.as_dict())


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


def test_a_draw_from_another_generator_is_named_with_its_place(cuda: CudaDouble) -> None:
    def draw() -> None:
        raise RuntimeError("Attempt to increase offset for a CUDA generator not in capture mode.")

    with pytest.raises(
        CaptureError,
        match=r"0 \(Calling\), .*test_native.py.*captured as forward of callable 0.*"
        r"a torch.Generator that the graph does not know",
    ):
        capture(nn.Sequential(Calling(draw, WARMUPS + 1)))
    assert cuda.underway is None and set(cuda.users.values()) == {0}


@pytest.mark.parametrize("safe", [False, True])
def test_a_fork_of_a_tracker_that_is_not_graph_safe_is_refused_by_name(
    cuda: CudaDouble, safe: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    from megatron.core.tensor_parallel import random

    states = {
        "drawn": torch.Generator() if safe else torch.get_rng_state(),
        "not drawn": torch.get_rng_state(),
    }
    forked: list[str] = []

    class Tracker:
        states_ = states

        def fork(self, name: str = "model-parallel-rng") -> Any:
            forked.append(name)
            return nullcontext()

    tracker = Tracker()
    monkeypatch.setattr(random, "_CUDA_RNG_STATE_TRACKER", tracker)

    class Forking(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with tracker.fork("drawn"):
                return super().forward(x)

    if safe:
        capture(Forking(4, 4))
        assert set(forked) == {"drawn"} and states["drawn"] in cuda.graphs[1].registered
    else:
        with pytest.raises(CaptureError, match=r"the state 'drawn' .*use_cudagraphable_rng=True"):
            capture(Forking(4, 4))
        assert not forked
    assert "fork" not in vars(tracker)


class Fp8(nn.Linear):
    """TE's name for weights that are quantized themselves."""

    primary_weights_in_fp8 = True


class Fused(nn.Linear):
    fuse_wgrad_accumulation = True


class MegatronsFused(nn.Linear):
    gradient_accumulation_fusion = True


class Delayed(nn.Linear):
    def need_backward_dw(self) -> bool:
        return True


class Quantized(nn.Linear):
    """Its buffer keeps its values as TE's quantized tensors do."""

    def __init__(self) -> None:
        super().__init__(4, 4)
        self.register_buffer("scaled", torch.ones(2))
        self.scaled._rowwise_data = torch.ones(2)  # type: ignore[union-attr]


CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("module", "found"),
    [
        (Fp8(4, 4), r"0 \(Fp8\) has FP8 weights"),
        (Quantized(), r"0 \(Quantized\) has FP8 weights"),
        (Fused(4, 4), r"0 \(Fused\) has fuse_wgrad_accumulation=True.*main_grad"),
        (MegatronsFused(4, 4), "gradient_accumulation_fusion=True.*no-gradient-accumulation"),
        (Delayed(4, 4), "delay_wgrad_compute=False"),
        (nn.Linear(4, 4, device="meta"), "buffers on meta: move the model to cpu"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_what_a_replay_would_get_wrong_is_refused_by_name(module: nn.Module, found: str) -> None:
    with pytest.raises(CaptureError, match=found):
        refuse([nn.Sequential(module)], [(torch.ones(1),)], (), CPU)
    refuse([nn.Linear(4, 4)], [(torch.ones(1),)], [{"mask": torch.ones(1)}], CPU)


def test_all_reasons_come_at_once_and_before_anything_runs(cuda: CudaDouble) -> None:
    sample, more = (torch.ones(1, device="meta"),), [{"mask": torch.ones(1, device="meta")}]
    with pytest.raises(CaptureError, match="4 reasons") as caught:
        OnCpu().capture(
            (Fused(4, 4), Delayed(4, 4)), [sample], capture_time_hooks=[{}], sample_kwargs=more
        )
    said = str(caught.value)
    assert "callable 0 (Fused)" in said and "callable 1 (Delayed)" in said
    assert said.count("a sample is on meta: move it to cpu") == 2
    assert cuda.graphs == [] and cuda.memory == {}


def loaded_te(monkeypatch: pytest.MonkeyPatch, recipe: Any = None) -> Any:
    """TE's modules as they are where a model has imported them."""
    graph = types.ModuleType("transformer_engine.pytorch.graph")
    flag = {"capturing": False}
    vars(graph).update(
        is_graph_capturing=lambda: flag["capturing"],
        set_capture_start=lambda: flag.update(capturing=True),
        set_capture_end=lambda: flag.update(capturing=False),
    )
    quantization = types.ModuleType("transformer_engine.pytorch.quantization")
    manager = types.SimpleNamespace(
        is_fp8_enabled=lambda: recipe is not None, get_fp8_recipe=lambda: recipe
    )
    vars(quantization).update(FP8GlobalStateManager=manager)
    distributed = types.ModuleType("transformer_engine.pytorch.distributed")
    states = {"te": torch.Generator()}
    vars(distributed).update(get_all_rng_states=lambda: states)
    for name in ("transformer_engine", "transformer_engine.pytorch"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    for module in (graph, quantization, distributed):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    return types.SimpleNamespace(flag=flag, states=states)


@pytest.mark.parametrize("fails", [False, True])
def test_modules_of_te_are_told_of_the_capture(
    cuda: CudaDouble, monkeypatch: pytest.MonkeyPatch, fails: bool
) -> None:
    te = loaded_te(monkeypatch)
    seen: list[bool] = []

    def look() -> None:
        seen.append(te.flag["capturing"])
        if fails:
            raise LookupError

    with pytest.raises(LookupError) if fails else nullcontext():
        capture(Calling(look, 1))
    assert seen == [True] and te.flag["capturing"] is False
    if not fails:
        assert te.states["te"] in cuda.graphs[1].registered


def test_te_is_not_imported_for_it(cuda: CudaDouble) -> None:
    before = set(sys.modules)
    capture(nn.Linear(4, 4))
    assert not [name for name in set(sys.modules) - before if "transformer_engine" in name]


def test_fp8_is_refused_at_capture_and_seen_by_the_guard(
    cuda: CudaDouble, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend: Any = OnCpu()
    assert backend.numerics() is None and backend.captured_numerics(0, {}) is None
    loaded_te(monkeypatch, recipe="delayed")
    assert backend.numerics() == "delayed"
    with pytest.raises(CaptureError, match="FP8 is on"):
        capture(nn.Linear(4, 4))


def test_without_a_gpu_it_names_the_tape() -> None:
    with pytest.raises(CaptureError, match=r"torch sees no GPU.*--backend tape"):
        NativeBackend()
    with pytest.raises(ArgumentError, match="capture_error_mode='local'"):
        NativeBackend("local")  # type: ignore[arg-type]


def test_autocast_with_its_cache_is_refused(cuda: CudaDouble) -> None:
    with (
        torch.autocast("cpu", dtype=torch.bfloat16),
        pytest.raises(CaptureError, match="cache_enabled=False"),
    ):
        capture(nn.Linear(4, 4))
    with torch.autocast("cpu", dtype=torch.bfloat16, cache_enabled=False):
        capture(nn.Linear(4, 4))


@pytest.mark.parametrize("fast_path", [False, True])
def test_a_model_under_megatron_fsdp_trains_the_same_numbers(
    one_rank: None, monkeypatch: pytest.MonkeyPatch, fast_path: bool
) -> None:
    from megatron.core import parallel_state

    from megatron_cg.tools.cpu.train import Trainer
    from megatron_cg.tools.cpu.training_plan import CpuModelConfig, TrainingPlan

    # Under the fakes of the CPU, states of Megatron's tracker are tensors.
    monkeypatch.setattr(native_backend, "forks_checked", nullcontext)
    losses: dict[bool, list[Any]] = {}
    for graphs in (False, True):
        with cuda_double(fakes=False) as cuda:
            trainer: Any = Trainer(TrainingPlan(CpuModelConfig(layers=2), graphs=graphs))
            losses[graphs] = [trainer.step()]
            if graphs:
                session = trainer.capture(OnCpu(), fast_path=fast_path)
            losses[graphs] += [trainer.step() for _ in range(3)]
            if graphs:
                counts = session.counters.as_dict()
                assert counts["replayed"] == counts["backwards"] > 0 == counts["eager"]
                assert counts["gradients_copied"] == counts["backwards"]
                session.close()
                assert set(cuda.users.values()) == {0}
            parallel_state.destroy_model_parallel()
    assert losses[True] == losses[False] and len(set(map(str, losses[True]))) == 4


class Stack(nn.Module):
    """Three blocks with dropout."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        blocks = (nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.3), nn.ReLU()) for _ in range(3))
        self.layers = nn.ModuleList(blocks)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


@pytest.mark.parametrize("verify", [0, 1])
def test_units_of_a_plain_module_train_the_same_numbers(one_rank: None, verify: int) -> None:
    from megatron_cg import graph_units

    numbers: dict[bool, list[Any]] = {}
    for graphed in (False, True):
        with cuda_double(fakes=False):
            model = Stack()
            made: Any = nullcontext()
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            graphs: Any = None
            if graphed:
                policy: Any = {"verify_interval": verify, "on_mismatch": "error"}
                made = graphs = graph_units(model, ["layers.*"], backend=OnCpu(), **policy)
            torch.manual_seed(7)
            numbers[graphed] = []
            with made:
                for step in range(6):
                    with graphs.step() if graphed else nullcontext():
                        optimizer.zero_grad()
                        inputs = torch.full((2, 4), 1.0 + step)
                        loss = model(inputs).square().sum()
                        loss.backward()
                        optimizer.step()
                    numbers[graphed].append(loss.detach().clone())
            if graphed:
                expect(graphs.counters, captured=3, replayed=9, eager=0, verified=9 * verify)
            numbers[graphed] += [p.detach().clone() for p in model.parameters()]
    assert all(map(torch.equal, numbers[True], numbers[False]))
