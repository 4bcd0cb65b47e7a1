"""Changes with an undo that respects what other code has changed since.

Note [Only what is still ours]
    An undo restores the old value only if the current value is still ours. If other code has set
    its own value since, that value stays, and a warning names it. If their function calls ours,
    ours then only passes calls on to the function that it replaced.

Note [A stack at each location]
    Old values at one location are restored in reverse order. If a change is undone that is not the
    last one there, it has no effect from then on, and its old value is restored when all changes
    after it are undone.

Note [No copies]
    A copy of a module with a ``forward`` of ours would run the original's graph. ``copy`` and
    ``pickle`` look up ``__deepcopy__`` and ``__reduce_ex__`` on the object itself (CPython 3.12,
    ``copy.py`` and ``_pickle.c``). While a module has changes of ours, both raise an error.

Note [No frame of ours in between]
    A Python frame around each of our functions would cost as much as some of them save. So we
    install a ``functools.partial`` without arguments, which CPython calls without a frame. Its
    ``__setstate__`` replaces the function that it calls (CPython 3.12, ``partial_setstate``).
"""

import inspect
import logging
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import partial, wraps
from types import CellType, MethodType, ModuleType
from typing import Any, NoReturn
from weakref import WeakValueDictionary

from torch import nn

from megatron_cg.upstream.symbols import Symbol

logger = logging.getLogger(__name__)

Undo = Callable[[], None]
_ABSENT: Any = object()
"""Stands for an attribute that an object's own dictionary does not have."""
COPIES = ("__deepcopy__", "__reduce_ex__")
IN_CELL = "cell_contents"


@dataclass(eq=False)
class _Change:
    owner: Any
    name: str
    """Of an attribute in the owner's own dictionary, or of what a cell holds."""
    value: Any
    shared: bool
    undone: bool = False

    def __post_init__(self) -> None:
        self.old = self.current()
        self.put(self.value)

    def __str__(self) -> str:
        if isinstance(self.owner, CellType):
            return "a closure variable of Megatron-FSDP's or Transformer Engine's functions"
        kind = self.owner if isinstance(self.owner, type | ModuleType) else type(self.owner)
        return f"{kind.__name__}.{self.name}"

    def current(self) -> Any:
        if isinstance(self.owner, CellType):
            return self.owner.cell_contents
        return vars(self.owner).get(self.name, _ABSENT)

    def put(self, new: Any) -> None:
        if new is not _ABSENT:
            setattr(self.owner, self.name, new)
        elif self.name in vars(self.owner):
            delattr(self.owner, self.name)

    def restore(self) -> None:
        current = self.current()
        if self.shared or current is self.value:
            self.put(self.old)
        else:
            logger.warning(
                "megatron_cg: %s is left as it is: %s was put there after %s of this package, "
                "which now has no effect.",
                self,
                _described(current),
                "a function" if callable(self.value) else _described(self.value),
            )


class _Changes(list[_Change]):
    """Changes at one location that are not undone yet, in the order in which they were made."""


_changes: WeakValueDictionary[tuple[int, str], _Changes] = WeakValueDictionary()
"""By location. Each undo holds the changes at its location; once all are gone, so is the entry."""


def applied() -> list[str]:
    """The locations of all changes of this process that are not undone, such as ``Adam.step``."""
    return sorted(str(change) for stack in _changes.values() for change in stack)


def set_attribute(owner: Any, name: str, value: Any, *, shared: bool = False) -> Undo:
    """Set an attribute in ``owner``'s own dictionary; returns the undo, safe to call twice.

    The undo deletes an attribute that was only inherited before, so that nothing of ours remains.
    A module cannot be copied until then, see Note [No copies]. For functions see
    :func:`replace_function`.

    ``owner`` is a module, class or object, or the cell of a closure variable, which has the
    attribute ``cell_contents`` alone. If it is ``shared``, other code also sets it in normal
    operation, and the undo restores the old value, whatever the current value is.
    """
    undo = _change(owner, name, value, shared)
    return combine_undos((_forbid_copies(owner), undo)) if isinstance(owner, nn.Module) else undo


def _change(owner: Any, name: str, value: Any, shared: bool = False) -> Undo:
    made = _Change(owner, name, value, shared)
    stack = _changes.setdefault((id(owner), name), _Changes())
    stack.append(made)

    def undo() -> None:
        made.undone = True
        while stack and stack[-1].undone:
            stack.pop().restore()

    return undo


def cells_of(function: Any) -> dict[str, CellType]:
    """The closure variables of ``function`` by name; empty if it is not a function."""
    names = getattr(getattr(function, "__code__", None), "co_freevars", ())
    return dict(zip(names, getattr(function, "__closure__", None) or (), strict=True))


def replace_function(owner: Any, name: str, function: Callable[..., Any]) -> Undo:
    """Replace the function or method ``name`` of ``owner`` with ``function``.

    It is called in the same way: bound, for a method of an object, and by all functions that share
    it, for the ``cell_contents`` of a cell. The new value has it as ``__wrapped__``. Returns the
    undo; see Note [Only what is still ours].
    """
    over, pass_on = _passing(function, getattr(owner, name, None))
    if not isinstance(owner, type | ModuleType | CellType):
        over.__self__ = owner
    return combine_undos((set_attribute(owner, name, over), pass_on))


def run_instead(symbol: Symbol, around: Callable[..., Any]) -> Undo:
    """Call ``around`` instead of a function, which it gets before the arguments; gives the undo.

    Raises UpstreamChangedError as ``symbol.find()``.
    """
    old = symbol.find()

    @wraps(old)
    def call(*args: Any, **kwargs: Any) -> Any:
        return around(old, *args, **kwargs)

    return replace_function(*symbol.place(), call)


def add_observer(module: nn.Module, hook: Callable[..., None], *, after: bool = False) -> Undo:
    """Register a forward pre-hook that gets keywords, or a forward hook; see Note [No copies].

    It sees what ``forward`` gets, after other hooks, or returns, before them.
    """
    if after:
        handle = module.register_forward_hook(hook, prepend=True)
    else:
        handle = module.register_forward_pre_hook(hook, with_kwargs=True)
    return combine_undos((_forbid_copies(module), handle.remove))


def _forbid_copies(module: nn.Module) -> Undo:
    def refuse(_memo_or_protocol: Any) -> NoReturn:
        raise TypeError(
            f"this {type(module).__name__} has graphs, or will be captured, and cannot be copied "
            "or pickled: the copy would run the graphs of the original. Copy it before, or after "
            "close(), or copy its state_dict()"
        )

    return combine_undos(_change(module, name, refuse) for name in COPIES)


class _Over(partial[Any]):
    """Calls a function that can be exchanged; see Note [No frame of ours in between].

    As an attribute of a class it is a method of the class's objects.
    """

    def __get__(self, owner: Any, kind: Any = None) -> Any:
        return self if owner is None else MethodType(self, owner)

    @property
    def __func__(self) -> Callable[..., Any]:
        """For a method of an object: a function that also takes the object.

        torch's schedulers read it and bind it to the object themselves (torch 2.11,
        ``LRScheduler._initial_step``).
        """

        def function(_owner: Any, *args: Any, **kwargs: Any) -> Any:
            return self(*args, **kwargs)

        wrapped: Any = vars(self)["__wrapped__"]
        return _named_as(function, wrapped, self, bound=True)  # type: ignore[no-any-return]


def _passing(function: Any, beneath: Any) -> tuple[Any, Undo]:
    """A callable that calls ``function``, and a switch that makes it call ``beneath`` instead."""
    over = _named_as(_Over(function), function, beneath)

    def pass_on() -> None:
        if callable(beneath):
            over.__setstate__((beneath, (), {}, vars(over)))

    return over, pass_on


def _named_as(over: Any, function: Any, beneath: Any, *, bound: bool = False) -> Any:
    """``over`` with the name of ``function`` and the signature of ``beneath``."""
    named = getattr(function, "func", function)
    named = named if hasattr(named, "__qualname__") else type(named)
    over.__module__, over.__qualname__ = named.__module__, named.__qualname__
    over.__name__, over.__doc__ = named.__name__, named.__doc__
    over.__wrapped__ = function
    with suppress(TypeError, ValueError):
        signature = inspect.signature(beneath)
        own = inspect.Parameter("self", inspect.Parameter.POSITIONAL_ONLY)
        parameters = list(signature.parameters.values())
        over.__signature__ = signature.replace(parameters=[own] * bound + parameters)
    return over


def wrap_method(
    owner: Any,
    name: str,
    *,
    before: Callable[[], None] = lambda: None,
    after: Callable[[], None] = lambda: None,
) -> Undo:
    """Run these before each call of a method of ``owner``, and when it returns; gives the undo."""
    method = getattr(owner, name)

    def around(*args: Any, **kwargs: Any) -> Any:
        before()
        result = method(*args, **kwargs)
        after()
        return result

    return replace_function(owner, name, around)


def combine_undos(undos: Iterable[Undo]) -> Undo:
    """One undo of several changes, in reverse order; if one raises, those before it are undone."""
    with ExitStack() as stack:
        for undo in undos:
            stack.callback(undo)
        return stack.pop_all().close


def combined_undo[**P](changes: Callable[P, Iterable[Undo]]) -> Callable[P, Undo]:
    """Let a function that makes changes and yields their undos return one undo of all of them.

    Such a function changes nothing without this decorator, since nothing runs it.
    """

    @wraps(changes)
    def change(*args: P.args, **kwargs: P.kwargs) -> Undo:
        return combine_undos(changes(*args, **kwargs))

    return change


@contextmanager
def undone_after(undo: Undo) -> Iterator[None]:
    """Call ``undo`` when the block ends, also by an exception."""
    try:
        yield
    finally:
        undo()


def _described(value: Any) -> str:
    """A name for a value. Its contents are not shown: those of a tensor would wait for the GPU."""
    if value is _ABSENT:
        return "nothing"
    if isinstance(value, bool | int | float | str | None):
        return repr(value)
    code = getattr(value, "__code__", None)
    if code is not None:  # not ``__qualname__``, which may be that of a wrapped function
        return f"{value.__globals__['__name__']}.{code.co_qualname}"
    kind = value if isinstance(value, type) else type(value)
    return f"{kind.__module__}.{kind.__qualname__}"
