"""Changes with an undo that respects what other code has changed since.

Note [Only what is still ours]
    An undo restores the old value only if the current value is still ours. If other code has set
    its own value since, that value stays, and a warning names both. If their function calls ours,
    ours then only passes calls on to the function that it replaced.

Note [In any order]
    We may make several changes at one place and undo them in any order. If a change is undone that
    is not the last one, the change after it then restores the value from before both.

Note [No frame of ours in between]
    Our functions run many times per microbatch, and a Python frame around each of them costs as
    much as some of them save. So we install a ``functools.partial`` without arguments, which
    CPython calls without a frame. Its ``__setstate__`` replaces the function that it calls, so a
    call needs no check (CPython 3.12, ``Modules/_functoolsmodule.c``, ``partial_setstate``).
"""

from __future__ import annotations

import gc
import inspect
import logging
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from itertools import count
from types import MethodType, ModuleType
from typing import Any, NamedTuple
from weakref import WeakValueDictionary

from megatron_cg.upstream.copies import ABSENT, leave_out

logger = logging.getLogger(__name__)

Undo = Callable[[], None]


@dataclass(frozen=True)
class Place:
    """A place that holds a value."""

    name: str
    """What it is, for messages."""
    package: str
    """The top-level package that it belongs to; empty if that is not known."""
    key: tuple[int, str]
    """Identifies the place, as long as it exists."""
    get: Callable[[], Any]
    """Returns the value there; ``ABSENT`` if there is none."""
    put: Callable[[Any], None]
    """Sets a value there; ``ABSENT`` removes the current value."""


def _attribute(owner: Any, name: str) -> Place:
    """An entry in an object's own dictionary."""
    kind = owner if isinstance(owner, type | ModuleType) else type(owner)
    home = kind.__name__ if isinstance(kind, ModuleType) else kind.__module__

    def put(value: Any) -> None:
        if value is not ABSENT:
            setattr(owner, name, value)
        elif name in vars(owner):
            delattr(owner, name)

    return Place(
        f"{kind.__name__}.{name}",
        str(home).partition(".")[0],
        (id(owner), name),
        lambda: vars(owner).get(name, ABSENT),
        put,
    )


_numbers = count()


class _Change:
    def __init__(self, place: Place, value: Any, label: str) -> None:
        self.place, self.value, self.old = place, value, place.get()
        self.label = label
        self.number = next(_numbers)


class _Changes(list[_Change]):
    """Changes at one place that are not undone yet, in the order in which they were made."""


_changes: WeakValueDictionary[tuple[int, str], _Changes] = WeakValueDictionary()
"""By place. Each undo holds the changes at its place; once all are gone, so is the entry."""


def change(place: Place, value: Any, *, shared: bool = False, label: str = "") -> Undo:
    """Set ``value`` at ``place``; returns the undo, which is safe to call twice.

    Args:
        place: where.
        value: what.
        shared: whether other code also sets it in normal operation. The undo then restores the
            old value, whatever the current value is.
        label: a name for ``value`` in messages.
    """
    made = _Change(place, value, label)
    place.put(value)
    mine = _changes.setdefault(place.key, _Changes())
    mine.append(made)

    def undo() -> None:
        if made not in mine:
            return
        at = mine.index(made)
        later = mine[at + 1] if at + 1 < len(mine) else None
        mine.remove(made)
        if later is not None and (shared or later.old is value):
            later.old = made.old
        elif shared or place.get() is value:
            place.put(made.old)
        else:
            theirs = place.get() if later is None else later.old
            logger.warning(
                "megatron_cg: %s is left as it is: %s was put there after %s of this package, "
                "which now has no effect.",
                place.name,
                described(theirs),
                label or described(value),
            )

    return undo


def _kind(value: Any) -> str:
    """A name for a value without its contents: showing a tensor would wait for the GPU."""
    return described(value) if callable(value) else f"a {type(value).__name__}"


class Applied(NamedTuple):
    """One change that is in force, at one or more objects of a kind."""

    place: str
    """Which attribute of what, such as ``MegatronFSDP.finish_grad_sync``."""
    value: str
    """What is there now: the module and name of a function, or the type of a value."""
    objects: int
    """How many objects have it."""
    package: str
    """The top-level package of the place, such as ``megatron``; empty if it is not known."""


def applied() -> list[Applied]:
    """All changes of this process that are not undone, in the order in which they were made."""
    made = sorted((one for mine in _changes.values() for one in mine), key=lambda one: one.number)
    found = Counter(
        (one.place.name, one.label or _kind(one.value), one.place.package) for one in made
    )
    return [
        Applied(place, value, objects, package)
        for (place, value, package), objects in found.items()
    ]


def set_attribute(
    owner: Any, name: str, value: Any, *, shared: bool = False, label: str = ""
) -> Undo:
    """Set an attribute in ``owner``'s own dictionary; returns the undo.

    The undo deletes an attribute that was only inherited before, so that nothing of ours remains.
    A copy of a module that is made before the undo has the old value; see ``copies.py``.
    ``shared`` and ``label`` are as in :func:`change`. For functions see :func:`put_over`.
    """
    place = _attribute(owner, name)
    before = place.get()
    with ExitStack() as undo:
        undo.callback(change(place, value, shared=shared, label=label))
        undo.callback(leave_out(owner, name, before))
        return undo.pop_all().close


def put_over(owner: Any, name: str, function: Callable[..., Any], *, label: str = "") -> Undo:
    """Replace the function or method ``name`` of ``owner`` with ``function``.

    It is called in the same way: bound, for a method of an object. The new value has it as
    ``__wrapped__``. ``label`` is its name in messages.

    Returns:
        The undo; see Note [Only what is still ours].
    """
    over, pass_on = passing(function, getattr(owner, name, None))
    if not isinstance(owner, type | ModuleType):
        over.__self__ = owner
    restore = set_attribute(owner, name, over, label=label or described(function))

    def undo() -> None:
        pass_on()
        restore()

    return undo


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


def passing(function: Any, beneath: Any) -> tuple[Any, Undo]:
    """A callable that calls ``function``, and a switch that makes it call ``beneath`` instead."""
    over = _named_as(_Over(function), function, beneath)

    def pass_on() -> None:
        if callable(beneath):
            over.__setstate__((beneath, (), {}, vars(over)))

    return over, pass_on


def run_before(owner: Any, name: str, action: Callable[[], None]) -> Undo:
    """Run ``action`` before each call of a method of ``owner``; returns the undo."""
    method = getattr(owner, name)

    def before(*args: Any, **kwargs: Any) -> Any:
        action()
        return method(*args, **kwargs)

    return put_over(owner, name, before, label=described(action))


def run_after(owner: Any, name: str, action: Callable[[], None]) -> Undo:
    """Run ``action`` when a call of a method of ``owner`` returns; returns the undo."""
    method = getattr(owner, name)

    def after(*args: Any, **kwargs: Any) -> Any:
        result = method(*args, **kwargs)
        action()
        return result

    return put_over(owner, name, after, label=described(action))


def all_of(undos: Iterable[Undo]) -> Undo:
    """One undo of several changes, in reverse order.

    Args:
        undos: makes the changes one by one. If making one raises, those before it are undone.
    """
    with ExitStack() as stack:
        for undo in undos:
            stack.callback(undo)
        return stack.pop_all().close


@contextmanager
def undone_after(undo: Undo) -> Iterator[None]:
    """Call ``undo`` when the block ends, also by an exception."""
    try:
        yield
    finally:
        undo()


def described(value: Any) -> str:
    """A name for a value, for messages."""
    if value is ABSENT:
        return "nothing"
    named = getattr(value, "func", value)  # of a partial
    code = getattr(named, "__code__", None)
    if code is not None:  # not ``__qualname__``, which may be that of a wrapped function
        return f"{named.__globals__['__name__']}.{code.co_qualname}"
    kind = named if isinstance(named, type) else type(named)
    return f"{kind.__module__}.{kind.__qualname__}" if callable(value) else repr(value)


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


@contextmanager
def garbage_collection_kept() -> Iterator[None]:
    """Restore automatic garbage collection, on or off, as it was before.

    TE turns it off around each graph and does not turn it on again after an exception in one
    (TE 2.20.2, ``graph.py``, ``_graph_context_wrapper``).
    """
    enabled = gc.isenabled()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
        else:
            gc.disable()


@contextmanager
def nothing_frozen() -> Iterator[None]:
    """In the block, the garbage collector lists what a script has frozen too (``gc.freeze``)."""
    if not gc.get_freeze_count():
        yield
        return
    gc.unfreeze()
    try:
        yield
    finally:
        gc.collect()
        gc.freeze()
