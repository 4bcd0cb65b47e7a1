"""Hooks are taken off and put back as the identical objects, in the identical order."""

import functools

import pytest
import torch
from torch import nn

from megatron_cg.hooks import MODULE_REGISTRIES, HookSnapshot, describe


def plain(*_args: object) -> None:
    """A hook that does nothing."""


def with_kwargs(*_args: object) -> None:
    """Another one, for the registries that take keyword arguments."""


@pytest.fixture
def module() -> nn.Linear:
    linear = nn.Linear(3, 3)
    linear.register_forward_pre_hook(plain)
    linear.register_forward_pre_hook(with_kwargs, prepend=True, with_kwargs=True)
    linear.register_forward_hook(plain)
    linear.register_forward_hook(with_kwargs, with_kwargs=True)
    linear.register_forward_hook(plain, always_call=True)
    linear.register_full_backward_pre_hook(plain)
    linear.register_full_backward_hook(plain)
    return linear


def contents(module: nn.Module) -> dict[str, list[tuple[int, object]]]:
    """Every registry of a module, in order; functions by identity."""
    names = MODULE_REGISTRIES
    found = {name: [(key, value) for key, value in getattr(module, name).items()] for name in names}
    found["_is_full_backward_hook"] = [(0, module._is_full_backward_hook)]
    return found


def test_restore_gives_back_the_identical_hooks_in_order_and_may_run_twice(
    module: nn.Linear,
) -> None:
    before = contents(module)
    snapshot = HookSnapshot(module)
    snapshot.clear()
    module.register_forward_hook(plain)  # by somebody else, meanwhile
    for _ in range(2):
        snapshot.restore()
        after = contents(module)
        assert after == before
        for name, items in before.items():
            for (_, old), (_, new) in zip(items, after[name], strict=True):
                assert new is old


def test_handles_made_before_still_remove_their_hook(module: nn.Linear) -> None:
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
