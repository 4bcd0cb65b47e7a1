"""Copies and pickles of a graphed module: a copy is plain, as without graphs.

Everything that we attach to a module refers to that one module. A replay that replaces ``forward``
would run the original's graph for the copy, and graphs and their memory cannot be copied at all. So
this file records our changes and leaves them out of the state that copies are made from.

Note [Where a copy comes from]
    ``copy.copy``, ``copy.deepcopy`` and ``pickle`` create an object from its state. They get the
    state by looking up ``__reduce_ex__`` on the object itself, so an entry in the object's own
    dictionary comes first (CPython 3.12, ``copy.py`` and ``_pickle.c``). If a class has its own
    ``__deepcopy__``, as ``torch.fx.GraphModule`` has, that is looked up instead, on the object too.
    Such a method, and a ``__reduce__`` that returns no state, read the object's dictionary
    themselves, so they are refused. A ``__copy__`` is looked up on the class alone; a shallow copy
    shares its weights with the original.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn
from torch.utils.hooks import RemovableHandle

ABSENT: Any = object()
"""Stands for an attribute that an object's own dictionary does not have."""
_REDUCE = "__reduce_ex__"
_DEEPCOPY = "__deepcopy__"
_HOOKS = ("_forward_pre_hooks", "_forward_pre_hooks_with_kwargs", "_forward_hooks")


class _Reduce:
    """Returns the state for copies of one module; in its dictionary while anything is left out."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self.own: dict[str, Any] = {_REDUCE: self}
        """What the module's dictionary has for methods of its class."""
        if hasattr(type(module), _DEEPCOPY):
            self.own[_DEEPCOPY] = self._refuse
        self.before: dict[str, list[Any]] = {}
        """By attribute: the values before each of our changes; the first is the module's."""
        self.hooks: set[int] = set()
        """Ids of our hooks."""

    def __call__(self, protocol: Any) -> Any:
        reduced: Any = type(self._module).__reduce_ex__(self._module, protocol)
        if not isinstance(reduced, tuple) or len(reduced) < 3 or not isinstance(reduced[2], dict):
            self._refuse()
        return (*reduced[:2], self._as_before(reduced[2]), *reduced[3:])

    def _refuse(self, _memo: Any = None) -> Any:
        raise TypeError(
            f"{type(self._module).__name__} copies itself by a method of its own, so its copy "
            "would run the graphs of the original. Copy it before the capture, or after close()"
        )

    def _as_before(self, state: dict[str, Any]) -> dict[str, Any]:
        state = {name: value for name, value in state.items() if name not in self.own}
        for name, values in self.before.items():
            if values[0] is ABSENT:
                state.pop(name, None)
            else:
                state[name] = values[0]
        for name in (name for name in _HOOKS if name in state):  # A module may leave them out.
            kept = [(key, hook) for key, hook in state[name].items() if key not in self.hooks]
            state[name] = type(state[name])(kept)
        return state


def leave_out(owner: Any, name: str, before: Any) -> Callable[[], None]:
    """Let copies of ``owner`` have ``before`` as attribute ``name``, until the undo is called.

    Args:
        owner: a module; for anything else this does nothing.
        name: an attribute that was changed.
        before: its previous value in the module's own dictionary, or :data:`ABSENT`.
    """
    if not isinstance(owner, nn.Module):
        return lambda: None
    values = _reduce_of(owner).before.setdefault(name, [])
    values.append(before)

    def undo() -> None:
        reduce = _reduce_of(owner)
        values.pop()
        if not values:
            reduce.before.pop(name, None)
        _drop(owner, reduce)

    return undo


def look_before(module: nn.Module, hook: Callable[..., None]) -> Callable[[], None]:
    """Register a forward pre-hook that gets keyword arguments and is left out of copies.

    Returns the undo.
    """
    return _left_out(module, module.register_forward_pre_hook(hook, with_kwargs=True))


def look_after(module: nn.Module, hook: Callable[..., None]) -> Callable[[], None]:
    """Register a forward hook that is left out of copies; returns the undo."""
    return _left_out(module, module.register_forward_hook(hook))


def _left_out(module: nn.Module, handle: RemovableHandle) -> Callable[[], None]:
    _reduce_of(module).hooks.add(handle.id)

    def undo() -> None:
        handle.remove()
        reduce = _reduce_of(module)
        reduce.hooks.discard(handle.id)
        _drop(module, reduce)

    return undo


def _reduce_of(module: nn.Module) -> _Reduce:
    reduce = vars(module).get(_REDUCE)
    if not isinstance(reduce, _Reduce):
        reduce = _Reduce(module)
        vars(module).update(reduce.own)
    return reduce


def _drop(module: nn.Module, reduce: _Reduce) -> None:
    if not reduce.before and not reduce.hooks:
        for name in reduce.own:
            vars(module).pop(name, None)
