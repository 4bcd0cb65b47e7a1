"""What the parts of the fast path share.

Relied on: megatron-core 0.19.2 and megatron-fsdp 0.6.1, ``MegatronFSDP._register_fsdp_hooks``:
the functions inside it share its local variables as closure cells, one set for each model.
"""

import inspect
from collections.abc import Callable, Iterable, Iterator
from types import CellType
from typing import Any

from torch import nn

from megatron_cg.fsdp.roles import fsdp_function, fsdp_package_of
from megatron_cg.hooks import innermost
from megatron_cg.upstream.patch import cells_of
from megatron_cg.upstream.symbols import changed

_SCOPE = "MegatronFSDP._register_fsdp_hooks"
RELIES_ON = fsdp_function("is_float8tensor", "whether a parameter is FP8")


class NotApplicableError(Exception):
    """A part is not applicable to this model; the text says why. Users never see it as an error."""


def hook_functions(fsdp: Any) -> Iterator[Callable[..., Any]]:
    """The functions behind Megatron-FSDP's hooks of modules and of raw parameters."""
    yield fsdp.post_backward_release_module
    for module in fsdp.module.modules():
        for hooks in (module._forward_pre_hooks, module._forward_hooks):
            yield from hooks.values()
    for parameter in fsdp.param_and_grad_buffer.params:
        yield from (parameter._post_accumulate_grad_hooks or {}).values()


def find_cell(functions: Iterable[Callable[..., Any]], name: str) -> CellType:
    """The cell of the local variable ``name`` of ``_register_fsdp_hooks``.

    Raises UpstreamChangedError if no hook has one.
    """
    distribution = "megatron-core"
    for hook in functions:
        package = fsdp_package_of(hook)
        if package is None:
            continue
        distribution, cells = package, cells_of(innermost(hook))
        if name in cells:
            return cells[name]
    raise changed(distribution, f"{_SCOPE}.<locals>.{name}", "a variable that its hooks refer to")


def float8_test(fsdp: Any) -> Callable[[nn.Parameter], bool]:
    module: Any = inspect.getmodule(type(fsdp.param_and_grad_buffer))
    test: Callable[[nn.Parameter], bool] = module.is_float8tensor
    return test
