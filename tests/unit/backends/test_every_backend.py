"""What every backend that records passes does: TE's contract, and the same bits as eager.

The native backend runs on the double of ``torch.cuda``.
"""

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import nn

from megatron_cg.backends import base
from megatron_cg.backends.base import Backend, random_states_kept
from megatron_cg.backends.driver import GraphResetError
from megatron_cg.errors import CaptureError, HookError
from megatron_cg.tape.tape_backend import TapeBackend
from tests.unit.backends.blocks import MASK, Scale, capture, make_blocks, small, train
from tests.unit.backends.cuda_double import OnCpu, cuda_double


@pytest.fixture(params=["tape", "native"])
def backend(request: pytest.FixtureRequest) -> Iterator[Backend]:
    if request.param == "tape":
        yield TapeBackend()
        return
    with cuda_double() as cuda:
        yield OnCpu()
        assert cuda.underway is None and not cuda.invalid


def test_a_buffer_that_requires_a_gradient_is_refused(backend: Backend) -> None:
    module = nn.Linear(4, 4)
    module.register_buffer("extra", torch.ones(4, requires_grad=True))
    with pytest.raises(HookError, match="buffer that requires a gradient"):
        small(backend, module)


@pytest.mark.parametrize("retain", [True, False])
def test_what_two_backward_passes_share_outlives_the_first_only_if_that_was_asked_for(
    backend: Backend, retain: bool
) -> None:
    shared = torch.ones(4, requires_grad=True).exp()  # saved for both of them

    class Sharing(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) * shared

    with nullcontext() if retain else pytest.raises(RuntimeError, match="a second time"):
        small(backend, *(Sharing(4, 4), Sharing(4, 4)), warmups=0, retain_graph=retain)


def test_an_unused_weight_gets_no_gradient(backend: Backend) -> None:
    class Ignores(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.used, self.unused = nn.Parameter(torch.ones(4)), nn.Parameter(torch.ones(4))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.used * x.detach()

    module = Ignores()
    (graph,) = small(backend, module)
    fired: list[nn.Parameter] = []
    module.unused.register_post_accumulate_grad_hook(fired.append)
    graph(torch.full((2, 4), 3.0)).sum().backward()
    assert module.used.grad is not None and module.used.grad.tolist() == [6.0] * 4
    assert module.unused.grad is None and not fired


def test_a_parameter_that_gets_a_gradient_only_at_times_is_refused(backend: Backend) -> None:
    class Changing(nn.Linear):
        passes = 0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.passes += 1
            bias = self.bias if self.passes == 1 else self.bias.detach()
            return nn.functional.linear(x, self.weight, bias)

    with pytest.raises(CaptureError, match="which parameters get gradients has changed"):
        small(backend, Changing(4, 4))


def test_options_of_another_world_are_refused(backend: Backend) -> None:
    with pytest.raises(CaptureError, match="fp8_enabled is set"):
        small(backend, nn.Linear(4, 4), options={"fp8_enabled": (True,)})
    with pytest.raises(CaptureError, match="no option speed"):
        small(backend, nn.Linear(4, 4), options={"speed": "high"})
    with pytest.raises(CaptureError, match=r"call \.train"):
        small(backend, nn.Linear(4, 4).eval())


@pytest.mark.parametrize("share", [False, True])
def test_replay_equals_eager_bit_for_bit_and_runs_no_python(backend: Backend, share: bool) -> None:
    modules = make_blocks()
    eager = train(modules, modules)
    graphs = capture(backend, modules, {"mask": MASK}, share_buffers=share)
    calls = [module.calls for module in modules]
    replayed = train(modules, graphs)
    assert [module.calls for module in modules] == calls
    assert len(eager) == len(replayed) == 3 * (2 + 3 * 6 + 3) + 1
    assert all(torch.equal(one, two) for one, two in zip(eager, replayed, strict=True))


def test_capture_leaves_generator_buffers_and_gradients_alone(backend: Backend) -> None:
    modules = make_blocks()
    for parameter in modules[0].parameters():
        parameter.grad = torch.full_like(parameter, 3.0)
    state = torch.get_rng_state()
    capture(backend, modules, {"mask": MASK}, warmups=0)
    assert torch.equal(torch.get_rng_state(), state)
    assert all(module.seen.eq(0).all() for module in modules)
    assert all(parameter.grad.eq(3.0).all() for parameter in modules[0].parameters())  # type: ignore[union-attr]


def test_incoming_gradients_share_memory_when_buffers_are_shared(backend: Backend) -> None:
    for share, places in ((True, 1), (False, 2)):
        graphs = capture(backend, (Scale(), Scale()), share_buffers=share)
        grads = [graph._recorded.grad_outputs[0] for graph in graphs]
        assert len({grad.data_ptr() for grad in grads if grad is not None}) == places


def test_after_reset_call_and_pending_backward_raise(backend: Backend) -> None:
    module = Scale()
    (graph,) = capture(backend, (module,))
    output = graph(torch.ones(4, 8))
    graph.reset()
    for late in (lambda: graph(torch.ones(4, 8)), output.sum().backward, graph.backward_dw):
        with pytest.raises(GraphResetError, match="has been reset"):
            late()
    graph.reset()


FACTORS = torch.polar(torch.ones(2), torch.arange(2.0))
LAZY: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    # The backward pass of a rotary embedding multiplies by the conjugate of its factors.
    "rotary": lambda z: torch.view_as_real(z * FACTORS).flatten(1),
    # The imaginary part of a conjugate is a negative view.
    "imaginary": lambda z: z.conj().imag * 3.0,
    # Torch computes the output later, and the incoming gradient too.
    "conjugated": lambda z: (z * 2.0).conj(),
}


@pytest.mark.parametrize("name", LAZY)
def test_a_lazy_view_keeps_what_it_means(backend: Backend, name: str) -> None:
    module: Any = nn.Module()
    module.forward = lambda x: LAZY[name](torch.view_as_complex(x.unflatten(1, (2, 2))))
    (graph,) = small(backend, module, share_buffers=True)
    found = []
    for call in (module, graph):
        x = torch.arange(8.0).reshape(2, 4).requires_grad_()
        out = call(x)
        scale = torch.arange(1.0, 1.0 + out.numel()).view(out.shape)
        found.append(out.detach().clone())
        out.backward((out.detach() * scale).conj())
        found.append(x.grad)
    assert torch.equal(found[0], found[2]) and torch.equal(found[1], found[3])


def test_made_up_gradients_are_numbers(backend: Backend, deterministic: None) -> None:
    """Of memory that nobody has written, deterministic algorithms make NaN."""

    class Two(nn.Linear):
        def forward(self, x: torch.Tensor) -> Any:
            x = x * 1.0
            x.register_hook(lambda gradient: seen.append(gradient.clone()))
            return super().forward(x), x * 2

    seen: list[torch.Tensor] = []
    small(backend, Two(4, 4), warmups=1)
    # One pass for each output, one of the warmup, and that of the capture, whose memory is the
    # tape's: it is overwritten.
    assert len(seen) == 4 and all(one.eq(0).all() for one in seen[:3])


class InCapture:
    """A generator that a capture has left behind: it draws nothing until it has another state."""

    device = "cpu"

    def __init__(self) -> None:
        self.state, self.in_capture = "before", True

    def get_state(self) -> str:
        return self.state

    def set_state(self, state: str) -> None:
        self.state = state

    def clone_state(self) -> str:
        return f"clone of {self.state}"

    def graphsafe_set_state(self, state: str) -> None:
        self.state, self.in_capture = state, False


@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize("stuck", [False, True])
def test_only_a_generator_that_cannot_draw_leaves_its_capture(
    fails: bool, stuck: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def uniform(_tensor: torch.Tensor, *, generator: InCapture) -> None:
        if stuck:
            raise RuntimeError("Offset increment outside graph capture encountered unexpectedly.")

    monkeypatch.setattr(torch.Tensor, "uniform_", uniform)
    generator: Any = InCapture()
    monkeypatch.setattr(base, "generators_of", lambda *_: [generator])
    host = torch.get_rng_state()
    with pytest.raises(LookupError) if fails else nullcontext(), random_states_kept([], "cpu"):
        generator.state = "drawn from"
        torch.rand(1)
        if fails:
            raise LookupError
    assert generator.state == "before" and generator.in_capture is not (fails and stuck)
    assert torch.equal(torch.get_rng_state(), host)
