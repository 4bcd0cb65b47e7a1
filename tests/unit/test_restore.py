"""What is changed comes back: hooks, and values, all that can be."""

from __future__ import annotations

import functools
from contextlib import suppress

import pytest
import torch
from torch import nn

from megatron_cg.errors import NotRestoredError
from megatron_cg.hooks import HookSnapshot, describe
from megatron_cg.restore import Restores, values_kept


@pytest.mark.parametrize(
    "tensor",
    [
        torch.arange(4.0).expand(3, 4),
        torch.arange(4.0).expand(0, 4),
        torch.arange(6.0).as_strided((2, 3, 4), (0, 1, 1)),
        torch.arange(5.0).unfold(0, 3, 1),
        torch.arange(6.0).view(2, 3).t(),
    ],
    ids=["expanded", "empty", "expanded and overlapping", "overlapping", "transposed"],
)
def test_memory_of_every_layout_is_restored(tensor: torch.Tensor) -> None:
    before, version = tensor.clone(), tensor._version
    with values_kept([("it", tensor)]):
        torch.empty(0).set_(tensor.untyped_storage()).add_(1)
    assert torch.equal(tensor, before) and tensor._version == version


def test_a_tensor_that_was_given_other_memory_gets_its_own_back() -> None:
    tensor = torch.arange(3.0)
    address = tensor.data_ptr()
    with values_kept([("it", tensor)]):
        tensor.data = torch.zeros(2, 3, dtype=torch.float64)
    assert tensor.tolist() == [0.0, 1.0, 2.0] and tensor.data_ptr() == address


@pytest.mark.parametrize("work_fails", [False, True])
def test_all_others_are_restored_and_all_that_failed_is_named(work_fails: bool) -> None:
    tensors = [torch.zeros(2) for _ in range(3)]
    with pytest.raises(NotRestoredError) as raised, Restores() as stack:
        with suppress(NotRestoredError), Restores() as earlier:
            earlier.restore("of other work", lambda: 1 // 0)
        for number, tensor in enumerate(tensors):
            stack.enter_context(values_kept([(f"tensor {number}", tensor)]))
            stack.restore(f"divisor {number}", lambda: 1 // 0)
            tensor.add_(1)
        if work_fails:
            raise KeyError("work")
    named = [text.partition(":")[0] for text in raised.value.failed]
    assert named == ["divisor 2", "divisor 1", "divisor 0"]
    assert not any(map(torch.any, tensors))


def test_freed_memory_is_named() -> None:
    tensor, words = torch.zeros(2), "it: RuntimeError: its memory was freed"
    with pytest.raises(NotRestoredError, match=words), values_kept([("it", tensor)]):
        tensor.untyped_storage().resize_(0)


def test_an_error_of_the_work_alone_stays() -> None:
    with pytest.raises(KeyError, match="work"), Restores() as stack, values_kept([]):
        stack.restore("nothing", lambda: None)
        raise KeyError("work")


def plain(*_args: object) -> None:
    """A hook that does nothing."""


def test_handles_made_before_still_remove_their_hook() -> None:
    module = nn.Linear(3, 3)
    handle = module.register_forward_hook(plain)
    snapshot = HookSnapshot(module)
    snapshot.clear()
    snapshot.restore()
    handle.remove()
    assert handle.id not in module._forward_hooks


def test_parameter_hooks_are_quiet_and_come_back() -> None:
    parameter = nn.Parameter(torch.ones(2))
    calls: list[str] = []
    parameter.register_post_accumulate_grad_hook(lambda _: calls.append("accumulated"))
    parameter.register_hook(lambda gradient: calls.append("gradient"))
    snapshot = HookSnapshot(parameter)
    snapshot.clear()
    parameter.register_post_accumulate_grad_hook(lambda _: calls.append("meanwhile"))
    parameter.sum().backward()
    assert calls == ["meanwhile"]
    calls.clear()
    snapshot.restore()
    snapshot.restore()
    parameter.sum().backward()
    assert calls == ["gradient", "accumulated"]


def test_describe_looks_below_partials_and_decorators() -> None:
    wrapped = functools.partial(torch.compiler.disable(plain), 1)
    assert describe(wrapped).startswith(f"{__name__}.plain:")
