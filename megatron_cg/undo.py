"""Changes with an undo that leaves alone what others have changed since then.

Note [Only what is still ours]
    An undo restores the old value only if the current value is still ours. If other code has put
    its own value there since, that stays, and a warning names both. If their function calls ours,
    ours then only passes calls on to the function that it replaced.

Note [In any order]
    Several changes of ours may be made to one place and undone in any order. If one that is not the
    last is undone, the next change then restores the value from before both.
"""

from __future__ import annotations

import gc
import inspect
import logging
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from types import MethodType, ModuleType
from typing import Any, Protocol

from megatron_cg.copies import ABSENT, leave_out

logger = logging.getLogger(__name__)

Undo = Callable[[], None]


class Place(Protocol):
    """A place that holds a value."""

    @property
    def name(self) -> str:
        """What it is, for messages."""

    @property
    def key(self) -> tuple[int, str]:
        """Identifies the place, as long as it exists."""

    def get(self) -> Any:
        """The value there; ``ABSENT`` if there is none."""

    def put(self, value: Any) -> None:
        """Put ``value`` there; ``ABSENT`` removes what is there."""


class _Attribute:
    """An entry in an object's own dictionary."""

    def __init__(self, owner: Any, name: str) -> None:
        self._owner, self._name = owner, name
        self.key = (id(owner), name)

    @property
    def name(self) -> str:
        owner = self._owner
        named = isinstance(owner, type | ModuleType)
        return f"{owner.__name__ if named else type(owner).__name__}.{self._name}"

    def get(self) -> Any:
        return vars(self._owner).get(self._name, ABSENT)

    def put(self, value: Any) -> None:
        if value is not ABSENT:
            setattr(self._owner, self._name, value)
        elif self._name in vars(self._owner):
            delattr(self._owner, self._name)


class _Change:
    def __init__(self, place: Place, value: Any) -> None:
        self.place, self.value, self.old = place, value, place.get()


_changes: dict[tuple[int, str], list[_Change]] = {}
"""Changes that are not undone yet, by place, in the order in which they were made."""


def change(place: Place, value: Any, *, shared: bool = False, label: str = "") -> Undo:
    """Put ``value`` at ``place``; returns the undo, which is safe to run twice.

    Args:
        place: where.
        value: what.
        shared: whether other code also sets it in normal operation. The undo then restores the
            old value, whatever is there.
        label: a name for ``value`` in messages.
    """
    made = _Change(place, value)
    place.put(value)
    _changes.setdefault(place.key, []).append(made)

    def undo() -> None:
        mine = _changes.get(place.key, [])
        if made not in mine:
            return
        at = mine.index(made)
        later = mine[at + 1] if at + 1 < len(mine) else None
        mine.remove(made)
        if not mine:
            del _changes[place.key]
        if later is not None and (shared or later.old is value):
            later.old = made.old
        elif shared or place.get() is value:
            place.put(made.old)
        else:
            theirs = place.get() if later is None else later.old
            logger.warning(
                "megatron_cg: %s is left as it is: %s was put there after %s of this package, "
                "which does nothing any more.",
                place.name,
                described(theirs),
                label or described(value),
            )

    return undo


def set_attribute(owner: Any, name: str, value: Any, *, shared: bool = False) -> Undo:
    """Set an attribute in ``owner``'s own dictionary; returns the undo.

    An attribute that was only inherited is deleted again, so that nothing of ours stays behind.
    A copy of a module that is made in between has the old one; see ``copies.py``.
    ``shared`` is as in :func:`change`. For functions see :func:`put_over`.
    """
    return _change_attribute(owner, name, value, shared=shared)


def _change_attribute(owner: Any, name: str, value: Any, **options: Any) -> Undo:
    """As :func:`change`, and copies of a module have what was there before."""
    place = _Attribute(owner, name)
    before = place.get()
    with ExitStack() as undo:
        undo.callback(change(place, value, **options))
        undo.callback(leave_out(owner, name, before))
        return undo.pop_all().close


def put_over(owner: Any, name: str, function: Callable[..., Any], *, label: str = "") -> Undo:
    """Let ``function`` be called instead of the function or method ``name`` of ``owner``.

    It is called in the same way: bound, for a method of an object. The new value has it as
    ``__wrapped__``. ``label`` is its name in messages.

    Returns:
        The undo; see Note [Only what is still ours].
    """
    beneath = getattr(owner, name, None)
    over, pass_on = passing(function, beneath)
    value: Any = over
    if not isinstance(owner, type | ModuleType):

        def method(_owner: Any, *args: Any, **kwargs: Any) -> Any:
            return over(*args, **kwargs)

        # torch's schedulers take a method's function and bind it to the object themselves.
        value = MethodType(_named_as(method, function, beneath, bound=True), owner)
    restore = _change_attribute(owner, name, value, label=label or described(function))

    def undo() -> None:
        pass_on()
        restore()

    return undo


def passing(function: Any, beneath: Any) -> tuple[Callable[..., Any], Undo]:
    """A function that calls ``function``, and what makes it call ``beneath`` from then on."""
    called = [function]

    def over(*args: Any, **kwargs: Any) -> Any:
        return called[0](*args, **kwargs)

    def pass_on() -> None:
        called[0] = beneath

    return _named_as(over, function, beneath), pass_on


def run_before(owner: Any, name: str, action: Callable[[], None]) -> Undo:
    """Let ``action`` run before each call of a method of ``owner``; returns the undo."""
    method = getattr(owner, name)

    def before(*args: Any, **kwargs: Any) -> Any:
        action()
        return method(*args, **kwargs)

    return put_over(owner, name, before, label=described(action))


def run_after(owner: Any, name: str, action: Callable[[], None]) -> Undo:
    """Let ``action`` run as a call of a method of ``owner`` returns; returns the undo."""
    method = getattr(owner, name)

    def after(*args: Any, **kwargs: Any) -> Any:
        result = method(*args, **kwargs)
        action()
        return result

    return put_over(owner, name, after, label=described(action))


def described(value: Any) -> str:
    """A name for a value, for messages."""
    if value is ABSENT:
        return "nothing"
    named = getattr(value, "func", value)  # of a partial
    code = getattr(named, "__code__", None)
    if code is not None:  # whose own name is not that of what it wraps
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
    """Put automatic garbage collection back on or off, as it was.

    TE switches it off around each graph and, after an exception in one, not on again
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
