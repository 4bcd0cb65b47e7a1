"""What is noted for a capture: memory in other tensors, collectives, constant inputs."""

from itertools import accumulate
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import _functional_collectives as functional
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from megatron_cg import graph_units
from megatron_cg.capture.observer import PassObserver, collectives_so_far
from megatron_cg.errors import CaptureError
from megatron_cg.replay.guard import Addresses, Watched
from megatron_cg.replay.unit import Unit
from megatron_cg.units.code_observer import Operations, holder_of
from tests.unit.backends.blocks import in_backward


@pytest.mark.parametrize("moved", ["_data", "_transpose"])
def test_all_memory_of_a_quantized_tensor_is_followed_and_told_in_hex(moved: str) -> None:
    """Its memory is in other tensors, as in TE's."""
    parts: dict[str, Any] = {"_data": torch.zeros(4), "_transpose": torch.zeros(4)}
    device = torch.device("cpu")
    weight: Any = SimpleNamespace(**parts, _scale_inv=None, device=device, data_ptr=lambda: 0)
    where = Addresses([Watched(weight, "a weight", "It moved.")])
    before = [weight._data, weight._transpose]
    where.note(forward=True)
    assert where.broken(forward=True) is None
    setattr(weight, moved, torch.zeros(4))
    found = where.broken(forward=True)
    words = "" if found is None else found.text("layer 0")
    assert f"was {hex(before[0].data_ptr())}, {hex(before[1].data_ptr())} at capture" in words
    assert hex(getattr(weight, moved).data_ptr()) in words


@pytest.mark.parametrize(
    ("in_forward", "in_backward", "known", "held"),
    [(0, 0, False, False), (1, 0, False, True), (0, 1, False, True), (0, 0, True, True)],
)
def test_collectives_of_a_capture_are_counted_in_each_of_its_passes(
    monkeypatch: pytest.MonkeyPatch, in_forward: int, in_backward: int, known: bool, held: bool
) -> None:
    # Of gathers before the capture, and after forward, before and after backward.
    counts = iter(accumulate((6, in_forward, 1, in_backward)))
    monkeypatch.setattr("megatron_cg.capture.observer.collectives_so_far", lambda: next(counts))
    layer = nn.Linear(1, 1)
    unit = Unit("layer 0", layer, (layer,), collectives=known)
    observer = PassObserver(unit, (torch.zeros(1),), {})
    for forward in (True, False):
        observer.begun(forward=forward, warmup=False)
        observer.ended(forward=forward)
    assert observer.collectives is held


class Borrowing(nn.Module):
    def __init__(self, other: nn.Linear) -> None:
        super().__init__()
        self.other = [other]

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return rows * self.other[0].weight.sum()


def test_a_unit_that_uses_the_parameter_of_another_module_is_refused() -> None:
    network = nn.Sequential(nn.Linear(2, 2), nn.Identity())
    network[1] = Borrowing(network[0])  # type: ignore[arg-type]
    graphs = graph_units(network, ["1"], backend="tape", warmup_steps=1, on_failure="error")
    with graphs, pytest.raises(CaptureError, match=r"1 uses 0\.weight, a parameter of a module"):
        for _ in range(2):
            with graphs.step():
                network(torch.ones(1, 2)).sum().backward()
    assert not any(parameter._backward_hooks for parameter in network.parameters())


def test_what_holds_a_tensor_is_found_beside_gradients_without_memory(one_rank: None) -> None:
    """As those of Megatron-FSDP are after ``zero_grad``."""
    gradient: Any = DTensor.from_local(torch.zeros(2), init_device_mesh("cpu", (1,)))
    gradient._local_tensor = None
    kept = [torch.zeros(3)]
    assert holder_of([kept[0].untyped_storage()]) == "a list"


def test_what_another_unit_has_noted_of_memory_is_no_leftover() -> None:
    first, second = Operations(nn.Identity()), Operations(nn.Identity())
    with first:
        stash = Watched(torch.zeros(7), "rows", "")
    second.begin(forward=True)
    with second:
        stash.tensor.zero_()
    assert len(first.left()) == len(second.writes) == len(second._saved) == 1
    assert holder_of(first.left()) is None


def test_on_gpus_a_mask_decides_between_fused_kernels_of_attention() -> None:
    def chosen_by_gradients(*, learned: bool) -> bool:
        heads, operations = torch.empty(1, 2, 16, 64, device="meta"), Operations(nn.Identity())
        mask = torch.empty(1, 2, 16, 16, device="meta", requires_grad=learned)
        with operations:
            torch.ops.aten._scaled_dot_product_efficient_attention(heads, heads, heads, mask, True)
        return operations.chosen_by_gradients

    assert chosen_by_gradients(learned=True) and not chosen_by_gradients(learned=False)


def reduce() -> None:
    dist.all_reduce(torch.ones(1))


def backward() -> None:
    in_backward(torch.ones(1, requires_grad=True), lambda _: reduce()).sum().backward()


def in_another_group() -> None:
    dist.all_reduce(torch.ones(1), group=dist.new_group([0]))


def functionally() -> None:
    functional.all_reduce(torch.ones(1), "sum", [0]).sum()


@pytest.mark.parametrize("call", [reduce, dist.barrier, backward, in_another_group, functionally])
def test_every_collective_counts(one_rank: None, call: Any) -> None:
    before = collectives_so_far()
    torch.ones(1).sum()
    assert collectives_so_far() == before
    call()
    assert collectives_so_far() > before


def test_without_process_groups_there_are_none() -> None:
    assert collectives_so_far() == 0
