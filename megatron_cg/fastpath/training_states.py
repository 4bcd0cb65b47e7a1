"""Training states are set without a walk over modules.

Megatron-FSDP walks over modules before and after backward passes, and assigns a state to each.

Note [As the walk left them]
    A function that walks gets one object for all modules, which passes the state on, while each
    module of the last walk has the class, the modules and a state, as then. Else, and always if a
    class walks or assigns otherwise than torch's, or has an attribute of the name, it gets the
    modules. It fails if a parameter, module or buffer has the name, and its walk is then not used.
"""

import sys
from collections.abc import Iterable, Iterator
from operator import attrgetter
from typing import Any

from torch import nn

from megatron_cg.fastpath.part import NotApplicableError, are_same, is_torchs
from megatron_cg.fsdp.roles import fsdp_class, fsdp_function
from megatron_cg.upstream import patch

_STATE, _SETS = "_training_state", "MegatronFSDP._register_fsdp_hooks.<locals>"
_BODIES = {
    "_pre_backward_param_unshard": "f9cab4dfe76d1d76",
    "_post_backward_release_module": "363a7950631c1124",
    "_root_pre_backward": "d22a2f9ba18eb095",
}
REPLACES = tuple(
    symbol
    for name, body in _BODIES.items()
    for symbol in fsdp_function(f"{_SETS}.{name}", "what sets states", fingerprints=(body,))
)
RELIES_ON = (*REPLACES, *fsdp_class("MegatronFSDP", _STATE, "fsdp_unit_modules"))
_METHODS = attrgetter("__setattr__", "modules", "named_modules")
_TORCHS = _METHODS(nn.Module)


@patch.combined_undo
def set_states_at_once(fsdp: Any) -> Iterator[patch.Undo]:
    """Let ``fsdp`` set states without walks; NotApplicableError if it cannot."""
    home = type(fsdp)._register_fsdp_hooks.__module__
    codes = [symbol.find() for symbol in REPLACES if symbol.path.startswith(f"{home}:")]
    if not fsdp.fsdp_unit_modules or not codes or not all(map(is_torchs, _TORCHS)):
        raise NotApplicableError("there are no units, or other functions walk over modules")
    for one in fsdp.module.modules():
        is_unit = one is fsdp.module or isinstance(one, tuple(fsdp.fsdp_unit_modules))
        if is_unit and "modules" not in vars(one):
            yield patch.replace_function(one, "modules", _Modules(one, codes))


class _Modules:
    """A unit's ``modules``, and what stands for all of them; see Note [As the walk left them]."""

    def __init__(self, unit: nn.Module, codes: list[Any]) -> None:
        self._unit, self._codes = unit, codes
        self._left: tuple[list[nn.Module], set[Any], list[Any]] = [], set(), []

    def __call__(self, *args: Any, **named: Any) -> Iterable[Any]:
        if sys._getframe(1).f_code not in self._codes:
            return type(self._unit).modules(self._unit, *args, **named)
        modules, kinds, found = self._left
        is_as_left = modules and are_same(_in(modules), found) and all(map(_is_plain, kinds))
        return [self] if is_as_left else self._walk()

    def _walk(self) -> Iterator[nn.Module]:
        self._left, modules = ([], set(), []), []
        for module in type(self._unit).modules(self._unit):
            yield module
            modules.append(module)
        if all({_STATE, "named_modules"} & vars(module).keys() == {_STATE} for module in modules):
            self._left = modules, {*map(type, modules)}, _in(modules)

    def _set(self, state: Any) -> None:
        for module in self._left[0]:
            module.__dict__[_STATE] = state

    _training_state = property(fset=_set)


def _in(modules: list[nn.Module]) -> list[Any]:
    """The class of each module, whether it has a state, and its modules."""
    found: list[Any] = []
    for module in modules:
        found += (type(module), _STATE in module.__dict__, *module._modules.values())
    return found


def _is_plain(kind: type[nn.Module]) -> bool:
    return _METHODS(kind) == _TORCHS and not hasattr(kind, _STATE)
