"""Hooks are taken off and put back; ``capture/test_session.py`` compares all of a model."""

import functools

import torch
from torch import nn

from megatron_cg.hooks import HookSnapshot, describe


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
