"""Closes graphs before process groups and the interpreter end, if the user did not."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack

from megatron_cg.integrations.megatron.teardown import close_at_exit, close_before_process_groups

_installed = ExitStack()
_users = 0


def graphs_close_in_time() -> Callable[[], None]:
    """Tie closing to both ends; returns the undo. All models share one installation.

    Models may be closed in any order, so separate patches could not be undone in reverse.
    """
    global _users, _installed
    if not _users:
        with ExitStack() as undo:
            undo.callback(close_before_process_groups())
            undo.callback(close_at_exit())
            _installed = undo.pop_all()
    _users += 1

    def leave() -> None:
        global _users
        _users -= 1
        if not _users:
            _installed.close()

    return leave
