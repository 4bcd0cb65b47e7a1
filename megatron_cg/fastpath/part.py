"""What the parts of the fast path share.

Relied on: megatron-core 0.19.2 and megatron-fsdp 0.6.1, ``MegatronFSDP._register_fsdp_hooks``:
the functions inside it share its local variables as closure cells, one set for each model.
"""

import inspect
import sys
from collections.abc import Callable, Iterable, Iterator
from types import CellType
from typing import Any

from torch import nn

from megatron_cg.fsdp.roles import HOOKS_SCOPE, PLACES, fsdp_function, fsdp_package_of
from megatron_cg.hooks import innermost, module_hooks
from megatron_cg.upstream.patch import cells_of
from megatron_cg.upstream.symbols import Symbol, changed

RELIES_ON = fsdp_function("is_float8tensor", "whether a parameter is FP8")


def known(path: str, expected: str, *fingerprints: str) -> Symbol:
    """A function that a part replaces, if its code has one of these fingerprints."""
    return Symbol(path, expected, fingerprints=fingerprints)


class NotApplicableError(Exception):
    """A part is not applicable to this model; the text says why. Users never see it as an error."""


def _hook_functions(fsdp: Any) -> Iterator[Callable[..., Any]]:
    """The functions behind Megatron-FSDP's hooks of modules and of raw parameters."""
    yield fsdp.post_backward_release_module
    for module in fsdp.module.modules():
        yield from (record.fn for record in module_hooks(module))
    for parameter in fsdp.param_and_grad_buffer.params:
        yield from (parameter._post_accumulate_grad_hooks or {}).values()


def find_cell(fsdp: Any, name: str) -> CellType:
    """The cell of the local variable ``name`` of ``_register_fsdp_hooks`` that hooks refer to.

    Raises UpstreamChangedError if no hook has one.
    """
    distribution = "megatron-core"
    for hook in _hook_functions(fsdp):
        package = fsdp_package_of(hook)
        if package is None:
            continue
        distribution, cells = package, cells_of(innermost(hook))
        if name in cells:
            return cells[name]
    raise changed(distribution, HOOKS_SCOPE + name, "a variable that its hooks refer to")


def float8_test(fsdp: Any) -> Callable[[nn.Parameter], bool]:
    module: Any = inspect.getmodule(type(fsdp.param_and_grad_buffer))
    test: Callable[[nn.Parameter], bool] = module.is_float8tensor
    return test


def unknown_bodies(symbols: Iterable[Symbol], fsdp: Any) -> list[str]:
    """Why our replacements of ``symbols`` may not be right for this object of Megatron-FSDP's.

    Does not check functions of modules that are not loaded, or of the other package.
    """
    own = [f"{kind.__module__}." for kind in type(fsdp).__mro__]
    places = [f"{place}." for place in PLACES]
    others = tuple(place for place in places if not any(one.startswith(place) for one in own))
    modules = ((symbol, symbol.path.partition(":")[0]) for symbol in symbols)
    here = [one for one, name in modules if name in sys.modules and not name.startswith(others)]
    unknown = [why for symbol in here if (why := symbol.unknown_body()) is not None]
    return unknown + [why for symbol in here if (why := _method_of_a_user(symbol, fsdp))]


def _method_of_a_user(symbol: Symbol, fsdp: Any) -> str | None:
    """Why a part of ``fsdp`` does not have the method of its class; None if each has."""
    kind, _, name = symbol.path.partition(":")[2].rpartition(".")
    store = getattr(fsdp, "param_and_grad_buffer", None)
    groups = getattr(store, "parameter_groups", ())
    buffers = [getattr(group, "model_weight_buffer", None) for group in groups]
    pipelines = [getattr(fsdp, f"{pipe}_pipeline", None) for pipe in ("all_gather", "grad_reduce")]
    for owner in (fsdp, store, *pipelines, *buffers):
        if kind not in (base.__name__ for base in type(owner).__mro__):
            continue
        method = vars(owner).get(name, getattr(type(owner), name))
        ours = type(method).__module__.startswith(f"{__package__.partition('.')[0]}.")
        if not ours and method is not symbol.find():
            return f"this {type(owner).__name__} has another {name} than its class"
    return None
