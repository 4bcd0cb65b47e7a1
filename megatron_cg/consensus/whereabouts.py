"""Where ranks wait: what is known of the others when not all of them come to a vote.

A rank writes where it is to the default group's store, but only if it waits for longer than
:data:`SOON`, so most votes cost nothing. The process with the store may be stopped or gone, so no
access to it is waited for longer than :data:`_LONGEST` seconds.
"""

from __future__ import annotations

import os
import sys
import time
import traceback
from collections.abc import Callable, Iterable
from contextlib import suppress
from datetime import timedelta
from functools import partial
from pathlib import Path
from threading import Thread
from typing import Any

import torch
import torch.distributed as dist

from megatron_cg.upstream.symbols import Symbol

STORE = Symbol(
    "torch.distributed.distributed_c10d:_get_default_store",
    "where all ranks of the default group can write",
)
RELIES_ON = (STORE,)
SOON = timedelta(seconds=1)
_LONGEST = 10.0
_NOT_THE_CALLER = (
    *(str(Path(file).parent) for file in (torch.__file__, os.__file__)),
    str(Path(__file__).parents[1]),
    "<",
)
"""Prefixes of files: torch, Python's library, this package, generated code."""


class Whereabouts:
    """Where the ``ranks`` of a group wait; this process is one of them."""

    def __init__(self, ranks: Iterable[int]) -> None:
        self._store: Any = STORE.find()()
        self._keys = {rank: f"megatron_cg/waits/{rank}" for rank in ranks}

    def wait_at(self, vote: str, words: str) -> None:
        """Write that this rank waits at ``vote``, a name that no other vote has."""
        self._write(f"{vote}\n{words}, {caller()}")

    def wait_no_more(self) -> None:
        """Write that it does not."""
        self._write("")

    def absent_from(self, vote: str) -> tuple[list[int], str]:
        """The ranks that do not wait at ``vote``, and in words where they wait, if at all.

        No ranks if the store does not answer.
        """
        time.sleep(2 * SOON.total_seconds())  # Another may be about to write.
        found = _in_time(self._read) or {}
        places = {rank: value.partition("\n")[::2] for rank, value in found.items()}
        absent = {rank: words for rank, (there, words) in places.items() if there != vote}
        elsewhere = (f"Rank {rank} waits at {words}. " for rank, words in absent.items() if words)
        return list(absent), "".join(elsewhere)

    def _write(self, value: str) -> None:
        _in_time(partial(self._store.set, self._keys[dist.get_rank()], value))

    def _read(self) -> dict[int, str]:
        keys = list(self._keys.values())
        there = keys if self._store.check(keys) else [k for k in keys if self._store.check([k])]
        several = self._store.has_extended_api()
        got = self._store.multi_get(there) if several else map(self._store.get, there)
        values = dict(zip(there, (value.decode() for value in got), strict=True))
        return {rank: values.get(key, "") for rank, key in self._keys.items()}


def _in_time(call: Callable[[], Any]) -> Any:
    """What ``call`` returns; None if the store fails or does not answer."""
    found = []

    def answer() -> None:
        with suppress(RuntimeError):
            found.append(call())

    thread = Thread(target=answer, daemon=True)
    thread.start()
    thread.join(_LONGEST)
    return found[0] if found else None


def caller() -> str:
    """The line that led here."""
    for frame, line in traceback.walk_stack(sys._getframe(1)):
        file = frame.f_code.co_filename
        if not file.startswith(_NOT_THE_CALLER):
            return f"at {file}:{line}"
    return "by this package"
