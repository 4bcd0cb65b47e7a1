"""The contract of TE's make_graphed_callables, as the tape keeps it."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import nn

from megatron_cg.backends.tape.tape_backend import TapeBackend
from megatron_cg.backends.tape.tape_recording import is_recording, recorded_action
from megatron_cg.errors import HostSyncError
from megatron_cg.tools.cpu.fakes import cpu_fakes

KEYS = ("forward_pre_hooks", "forward_hooks", "backward_pre_hooks", "backward_hooks")


def capture(*modules: nn.Module, hooks: Any = None, **options: Any) -> Any:
    samples = [(torch.ones(2, 4, requires_grad=True),) for _ in modules]
    hooks = [{} for _ in modules] if hooks is None else hooks
    return TapeBackend().capture(modules, samples, capture_time_hooks=hooks, **options)


def _nothing(*_args: object) -> None:
    return None


class Reading(nn.Module):
    def __init__(self, read: Callable[[torch.Tensor], Any]) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)
        self.read = read

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden: torch.Tensor = self.inner(x)
        self.read(hidden.detach())
        return hidden


@pytest.mark.parametrize(
    ("read", "named"),
    [
        (lambda t: t.sum().item(), r"aten\._local_scalar_dense"),
        (lambda t: bool(t.any()), r"aten\.\w+"),
        (lambda t: t.nonzero(), r"aten\.nonzero"),
        (lambda t: t[t > 0], r"aten\.\w+"),
        (lambda t: t.masked_select(t > 0), r"aten\.\w+"),
        (lambda t: t.unique(), r"aten\._unique2"),
        (lambda t: t.tolist(), r"Tensor\.tolist"),
        (lambda t: t.numpy(), r"Tensor\.numpy"),
        (lambda t: t.cpu(), r"Tensor\.cpu"),
        (lambda t: t.to("cpu"), r"Tensor\.to"),
        (lambda t: t.to(device="cpu", dtype=torch.float64), r"Tensor\.to"),
        (lambda t: t.to(torch.zeros(2)), r"Tensor\.to"),
        (lambda t: torch.tensor(t, device="cpu"), r"torch\.tensor"),
        (lambda t: torch.empty(()).copy_(t.sum()), r"aten\.copy_"),
    ],
)
def test_a_read_on_the_host_is_refused_with_op_and_module(
    read: Callable[[torch.Tensor], Any], named: str
) -> None:
    place = r"the callable itself \(Reading\) \(captured as forward of callable 0 \(Reading\)\)"
    with pytest.raises(HostSyncError, match=rf"{named}\S* in {place}"):
        capture(Reading(read))
    assert torch.ones(2).tolist() == torch.ones(2).cpu().to("cpu").tolist() == [1.0, 1.0]
    assert torch.ones(2).numpy().sum() == 2.0


@pytest.mark.parametrize("in_backward", [False, True])
def test_another_thread_reads_waits_and_copies_meanwhile(in_backward: bool) -> None:
    def work() -> list[Any]:
        torch.cuda.synchronize()
        made = torch.tensor([1.0, 2.0]).to(torch.device("cpu"))
        recorded_action(lambda: actions.append(is_recording()))
        return [made.tolist(), made.numpy().sum(), (made * 2).cpu().sum().item(), is_recording()]

    def in_a_thread(*_tensors: torch.Tensor) -> None:
        found.append(pool.submit(work).result())
        assert is_recording() is (len(found) == 2)

    class Later(Reading):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            hidden: torch.Tensor = self.inner(x)
            hidden.register_hook(in_a_thread)
            return hidden * 1

    found: list[Any] = []
    actions: list[bool] = []
    with cpu_fakes(), ThreadPoolExecutor(1) as pool:
        (graph,) = capture((Later if in_backward else Reading)(in_a_thread), num_warmup_iters=1)
        assert found == [[[1.0, 2.0], 3.0, 6.0, False]] * 2
        graph(torch.ones(2, 4)).sum().backward()
    assert len(found) == 2 and actions == [False] * 2


def wait_for_all() -> None:
    torch.cuda.synchronize()  # looked up as it is called, when it is a fake


def wait_for_a_stream() -> None:
    torch.cuda.current_stream().synchronize()


@pytest.mark.parametrize(
    ("wait", "named"),
    [
        (wait_for_all, r"torch\.cuda\.synchronize"),
        (wait_for_a_stream, "synchronize of a stream or an event"),
    ],
)
def test_a_wait_for_the_device_is_refused_with_its_module(
    wait: Callable[[], None], named: str
) -> None:
    with cpu_fakes():
        with pytest.raises(HostSyncError, match=rf"{named} in the callable itself \(Reading\)"):
            capture(Reading(lambda _: wait()))
        wait()


@pytest.mark.parametrize(
    ("upload", "named"),
    [
        (lambda t: torch.tensor([1.0], device=t.device), r"torch\.tensor"),
        (lambda t: torch.tensor(1.0, device=t.device), r"torch\.tensor"),
        (lambda t: torch.as_tensor([1.0], device=t.device), r"torch\.as_tensor"),
        (lambda t: torch.asarray([1.0], device=t.device), r"torch\.asarray"),
        (lambda t: t.new_tensor([1.0]), r"Tensor\.new_tensor"),
        (lambda t: torch.tensor([1.0]).to(t.device), r"Tensor\.to"),
        (lambda t: torch.ones(2).to(t), r"Tensor\.to"),
        (lambda t: torch.tensor(1.0).cuda(), r"Tensor\.cuda"),
        (lambda t: (torch.arange(4) * 2.0).to(device=t.device), r"Tensor\.to"),
        (lambda t: t.add_(torch.ones(4)), r"aten\.add_"),
        (lambda t: t.copy_(torch.tensor(1.0)), r"aten\.copy_"),
        (lambda t: t.index_select(0, torch.zeros(1, dtype=torch.long)), r"aten\.index_select"),
        (lambda t: t[[0, 1]], r"aten\.index"),
        (lambda t: t.index_put_((t[0].long(),), torch.tensor(1.0)), r"aten\.index_put_"),
        (lambda t: torch.where(t > 0, t, torch.tensor(1.0)), r"aten\.where"),
    ],
)
def test_what_the_host_gives_to_the_device_is_refused_with_op_and_module(
    upload: Callable[[torch.Tensor], Any], named: str
) -> None:
    place = r"the callable itself \(Reading\) \(captured as forward of callable 0 \(Reading\)\)"
    with pytest.raises(HostSyncError, match=rf"{named}\S* on a tensor of the host in {place}"):
        capture(Reading(upload), num_warmup_iters=0)


def test_a_copy_in_the_backward_pass_is_refused_too() -> None:
    class Reads(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
            gradient.cpu()
            return gradient

    class Module(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            read: torch.Tensor = Reads.apply(super().forward(x))  # type: ignore[no-untyped-call]
            return read

    with pytest.raises(HostSyncError, match=r"Tensor\.cpu in the backward pass \(captured"):
        capture(Module(4, 4))


def test_the_hosts_own_work_is_no_part_of_a_graph() -> None:
    """It runs at capture, and kernels keep the value that a number on the host had then."""
    seen: list[Any] = []

    class Counting(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            steps = torch.arange(4).add_(1).to("cpu").cpu()
            factor, offset = torch.tensor(2.0), torch.zeros((), device="cpu")
            seen.append((steps.tolist(), factor.item(), len(steps.nonzero())))
            out: torch.Tensor = super().forward(x) * factor + offset
            offset.fill_(99.0)
            return out.masked_fill(out > 1e9, torch.tensor(0.0))

    module = Counting(4, 4)
    (graph,) = capture(module, num_warmup_iters=0)
    x = torch.arange(8.0).reshape(2, 4)
    out = graph(x)
    assert torch.equal(out, module(x)) and len(seen) == 2
    out.sum().backward()
    assert module.bias.grad is not None and module.bias.grad.tolist() == [4.0] * 4
    assert seen == [([1, 2, 3, 4], 2.0, 4)] * 2


def test_what_the_host_made_at_capture_stays_as_it_was() -> None:
    """Memory of the tape's own is overwritten as a replay begins; the host's is not."""
    kept: list[torch.Tensor] = []

    class Making(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            kept.extend([torch.arange(3), torch.zeros(2, device="cpu"), torch.tensor([5.0])])
            # What is made on the device after that is the device's, as what was made before.
            return super().forward(x) + torch.ones(4, device=x.device)

    module = Making(4, 4)
    (graph,) = capture(module, num_warmup_iters=0)
    out = graph(torch.ones(2, 4))
    assert torch.equal(out, nn.functional.linear(torch.ones(2, 4), *module.parameters()) + 1)
    out.sum().backward()
    assert [tensor.tolist() for tensor in kept] == [[0, 1, 2], [0.0, 0.0], [5.0]]


def test_masks_that_need_no_count_are_recorded() -> None:
    def fine(t: torch.Tensor) -> None:
        t[t > 0] = 1.0
        t.index_select(0, torch.zeros(1, dtype=torch.long, device=t.device))
        counts = torch.ones(2, dtype=torch.long, device=t.device)
        t.repeat_interleave(counts, dim=0, output_size=2)

    capture(Reading(fine))


def test_state_on_the_host_that_belongs_to_the_graph_is_taken_along() -> None:
    seen: list[bool] = []

    class Acting(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            recorded_action(lambda: seen.append(is_recording()))
            return super().forward(x)

    (graph,) = capture(Acting(4, 4), num_warmup_iters=1)
    assert seen == [False, True]
    graph(torch.ones(2, 4))
    assert seen == [False, True, False]
