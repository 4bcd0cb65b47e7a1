"""Changes that come with their own undo."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from megatron_cg.copies import ABSENT, leave_out


def set_attribute(owner: Any, name: str, value: Any) -> Callable[[], None]:
    """Set an attribute in ``owner``'s own dictionary; the returned function puts back the old one.

    An attribute that was only inherited is deleted again, so that nothing of ours stays behind.
    A copy of a module that is made in between has the old one; see ``copies.py``.
    """
    old = vars(owner).get(name, ABSENT)
    setattr(owner, name, value)
    copied_again = leave_out(owner, name, old)

    def undo() -> None:
        if old is not ABSENT:
            setattr(owner, name, old)
        elif name in vars(owner):
            delattr(owner, name)
        copied_again()

    return undo


def run_before(owner: Any, name: str, action: Callable[[], None]) -> Callable[[], None]:
    """Let ``action`` run before each call of a method of ``owner``; returns the undo."""
    method = getattr(owner, name)

    def after_action(*args: Any, **kwargs: Any) -> Any:
        action()
        return method(*args, **kwargs)

    return set_attribute(owner, name, after_action)


def run_after(owner: Any, name: str, action: Callable[[], None]) -> Callable[[], None]:
    """Let ``action`` run as a call of a method of ``owner`` returns; returns the undo."""
    method = getattr(owner, name)

    def before_action(*args: Any, **kwargs: Any) -> Any:
        result = method(*args, **kwargs)
        action()
        return result

    return set_attribute(owner, name, before_action)


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
