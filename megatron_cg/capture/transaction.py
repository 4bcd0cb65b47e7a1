"""Capture as a transaction: plan and validate everything, apply the changes, undo them on failure.

Note [Two stacks]
    Some changes must always be undone, whether capture succeeds or fails: cleared hooks, raw
    parameters on the modules, RNG and FP8 state advanced by synthetic inputs, TE's flags. They are
    on a stack that is always unwound before :func:`capturing` ends. Lasting changes (the graphs,
    the replay instead of the forward) are on a second stack. It is unwound if anything raises.
    Otherwise the session keeps it, and closing the session undoes these changes in reverse order.

Note [Order of entering]
    Raw parameters are entered before the parameters' hooks, because the hooks are on the raw
    parameters. The backend's state is entered last, so it is restored first, while hooks are still
    off: restoring RNG and FP8 state runs no module code, but a hook that fires on it would.

Note [Compiled for a size]
    Dynamo compiles a function for the sizes of its first call, and at the first other size once
    more for any. The two kernels may sum in another order. megatron-core 0.19.2 compiles the
    backward pass of the experts' activation, which sums the gradients of probabilities. If a rank
    has had one number of rows in all steps and the capture has another (FP8 pads), eager passes
    after the capture would run by the second kernel, and verification would find no difference to
    a run without graphs. So a capture compiles for its own size.
"""

import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any

import torch
from torch import nn

from megatron_cg.backends.base import Backend
from megatron_cg.fsdp.roles import UnitHooks
from megatron_cg.fsdp.sharding import Sharding
from megatron_cg.hooks import HookSnapshot, module_hooks
from megatron_cg.replay.unit import Unit
from megatron_cg.restore import Restores, values_kept


@contextmanager
def capturing(
    units: Sequence[Unit], sharding: Sharding, backend: Backend
) -> Iterator[tuple[tuple[UnitHooks, ...], ExitStack]]:
    """A context in which ``units`` can be captured.

    Yields each unit's hooks for the backend, and the stack of lasting changes. The caller pushes
    its own lasting changes on that stack. They are undone if the body raises; otherwise the caller
    keeps them with ``pop_all``.

    Raises HookError or UnknownFsdpHookError before anything has been changed.
    """
    modules = _unique(module for unit in units for module in unit.layer.modules())
    layers = [unit.layer for unit in units]
    hooks = tuple(sharding.unit_hooks(unit) for unit in units)
    with Restores() as lasting, Restores() as always:
        lasting.callback(sharding.stable_memory(layers))
        always.enter_context(sharding.capturing(layers))
        parameters = _unique(p for layer in layers for p in layer.parameters())
        always.enter_context(gradients_kept(parameters))
        always.enter_context(buffers_kept(modules))
        always.callback(_quiet_parameters(parameters))
        always.callback(quiet_modules(layers, modules, sharding.owns_hook))
        always.enter_context(backend.preserved(layers))
        always.enter_context(compiled_kept())
        yield hooks, lasting


def compiled_kept() -> AbstractContextManager[None]:
    """Functions run by the same compiled code before and after; see Note [Compiled for a size]."""
    dynamo: Any = sys.modules.get("torch._dynamo")
    return dynamo.config.patch(automatic_dynamic_shapes=False) if dynamo else nullcontext()


def quiet_modules(
    layers: Sequence[nn.Module],
    modules: Sequence[nn.Module],
    made_by_sharding: Callable[[Callable[..., Any]], bool],
) -> Callable[[], None]:
    """Remove the units' hooks and the sharding's hooks on modules below them; returns the undo.

    The undo restores the hooks of all modules, since TE installs its own hooks on every module
    below a callable during warmup and leaves them there if it fails.
    """
    snapshot = HookSnapshot(*modules)
    for module in modules:
        if module in layers or any(made_by_sharding(hook.fn) for hook in module_hooks(module)):
            HookSnapshot(module).clear()
    return snapshot.restore


def _quiet_parameters(parameters: Sequence[nn.Parameter]) -> Callable[[], None]:
    snapshot = HookSnapshot(*parameters)
    snapshot.clear()
    return snapshot.restore


@contextmanager
def without_gradients(parameters: Sequence[nn.Parameter]) -> Iterator[None]:
    """No parameter has a gradient or a hook; what a backward pass leaves on them is removed."""
    with gradients_kept(parameters), ExitStack() as stack:
        stack.callback(_quiet_parameters(parameters))
        for parameter in parameters:
            parameter.grad = None
        yield


@contextmanager
def gradients_kept(parameters: Sequence[nn.Parameter]) -> Iterator[None]:
    """Restore the parameters' gradients on exit; those of synthetic inputs are dropped."""
    with Restores() as stack:
        for parameter in parameters:
            stack.restore("a gradient", setattr, parameter, "grad", parameter.grad)
        yield


@contextmanager
def buffers_kept(modules: Iterable[nn.Module]) -> Iterator[None]:
    """Restore buffers on exit, since synthetic inputs change some (a router's token counts)."""
    with Restores() as stack:
        for module in modules:
            held = {name: buffer for name, buffer in module._buffers.items() if buffer is not None}
            label = f"of a {type(module).__name__}"
            named = [(f"buffer {name} {label}", buffer) for name, buffer in held.items()]
            stack.enter_context(values_kept(named))
            stack.restore(f"buffers {label}", module._buffers.update, held)
        yield


def frozen_kept(modules: Iterable[nn.Module]) -> AbstractContextManager[None]:
    """Restore frozen parameters on exit: the modules' own code may have changed them.

    They must be unsharded. Quantized ones and other subclasses of tensors are skipped.
    """
    parameters = _unique(p for module in modules for p in module.parameters(recurse=False))
    plain = (p for p in parameters if type(p.data) is torch.Tensor)
    return values_kept(("a frozen parameter", p) for p in plain if not p.requires_grad)


def _unique[T](items: Iterator[T]) -> list[T]:
    return list({id(item): item for item in items}.values())
