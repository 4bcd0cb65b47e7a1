"""One decision for all ranks, before anything that all of them must do together.

If only one rank captures or falls back to eager, it enters collectives that the other ranks never
join. So every rank, including one that failed, votes in one small exchange, and a pure function of
all votes decides (``consensus/decision.py``). The exchange has its own gloo group: CPU tensors,
never NCCL, never inside a graph.
"""

import os
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import timedelta
from functools import partial
from pathlib import Path
from threading import Thread
from typing import Any

import torch
import torch.distributed as dist

from megatron_cg.consensus.decision import (
    AgreementError,
    Decision,
    Kind,
    Vote,
    decide,
    differing,
    digest,
    encode,
    name_of,
    ranks_text,
)
from megatron_cg.consensus.process_exit import exit_without_waiting
from megatron_cg.errors import WITHOUT_GRAPHS, CaptureError, NotRestoredError, PhaseError, say
from megatron_cg.upstream.patch import replace_function, undone_after
from megatron_cg.upstream.symbols import Symbol

_C10D = "torch.distributed.distributed_c10d"
_STORE = Symbol(f"{_C10D}:_get_default_store", "where all ranks of the default group can write")
_NAME = Symbol(
    f"{_C10D}:_process_group_name",
    "the name of a new group, equal on its ranks",
    parameters=("ranks", "use_hashed_name"),
)
RELIES_ON = (_STORE, _NAME)

TIMEOUT = timedelta(minutes=10)
"""How long a rank waits for the others' votes. Capture of a large model takes minutes."""
FALLING_BACK = timedelta(seconds=60)
"""How long a rank waits for the others to fall back to eager after a mismatch. They find the same
mismatch at the same call."""
_SOON, _LONGEST = 2.0, 10.0
"""Seconds between ranks whose exchange fails, and for an access to the store, at most."""
_NOT_THE_CALLER = (
    *(str(Path(file).parent) for file in (torch.__file__, os.__file__)),
    str(Path(__file__).parents[1]),
    "<",
)
"""Prefixes of files: torch, Python's library, this package, generated code."""


def _in_time(call: Callable[[], Any]) -> Any:
    """What ``call`` of a store returns; None if it fails, or takes more than :data:`_LONGEST`."""
    found = []

    def answer() -> None:
        with suppress(RuntimeError):
            found.append(call())

    thread = Thread(target=answer, daemon=True)
    thread.start()
    thread.join(_LONGEST)
    return found[0] if found else None


def _caller() -> str:
    for frame, line in traceback.walk_stack(sys._getframe(1)):
        file = frame.f_code.co_filename
        if not file.startswith(_NOT_THE_CALLER):
            return f"at {file}:{line}"
    return "by this package"


class Agreement:
    """The votes of all ranks of a process group. All of them create it together.

    In a process that has not called ``init_process_group``, this process is the only rank. A rank
    alone decides alone, without a group.

    Every rank must hold the same votes in the same order: gloo pairs exchanges by the order in
    which each rank issued them. A capture has two votes, :meth:`ready` before it and
    :meth:`confirm` at its end; a rank that fails in between calls :meth:`report_failure`.
    :meth:`begin_capture` opens the next capture.

    ``timeout`` is how long this call and a vote wait for a rank that does not arrive. The ranks of
    ``group`` vote; None is the default group. If only some ranks make this call, it raises
    AgreementError, which ends with ``alone``; errors of votes end with ``remedy``.
    """

    def __init__(
        self,
        timeout: timedelta = TIMEOUT,
        *,
        group: dist.ProcessGroup | None = None,
        remedy: str = "",
        alone: str = "",
    ) -> None:
        self._group: dist.ProcessGroup | None = None
        self._ranks, self._exchanges = [0], 0
        self._timeout, self._remedy = timeout, remedy or say(WITHOUT_GRAPHS)
        if dist.is_initialized():
            self._ranks = sorted(dist.get_process_group_ranks(group or dist.group.WORLD))
        if len(self._ranks) > 1:
            those = f"megatron_cg/{digest(map(str, self._ranks))}"
            _made[those] += 1
            self._name = f"{those}/{_made[those]}"
            self._group = self._connect(alone)
        self._last, self._heard = "the vote on settings 0", time.monotonic()
        self._closed, self._broken = False, ""
        self._captures = 1
        self._next: Kind | None = Kind.CAPTURE_START

    def agree(
        self,
        kind: Kind,
        vote: Vote,
        *,
        serial: int = 0,
        timeout: timedelta | None = None,
        name: str = "",
    ) -> Decision:
        """Vote and wait for all ranks.

        ``kind`` is what the vote is about, ``serial`` a count of the caller: ranks with different
        counts are at different votes. ``name`` is that of the unit, for an error.

        Raises AgreementError if a rank is gone, late or at another vote, after which no vote can
        follow, and PhaseError while a CUDA graph is being captured.
        """
        words = f"the vote on {name_of(kind)} {serial}" + (f" ({name})" if name else "")
        group, row = self._require_sound(), encode(kind, serial, vote)
        rows = row.repeat(len(self._ranks))
        if group is not None:
            with self._naming_lost_ranks(timeout or self._timeout, words):
                dist.all_gather_into_tensor(rows, row, group)
        try:
            return decide(rows.view(-1, len(row)), self._ranks)
        except AgreementError as error:
            raise self._ended(f"{error} {self._remedy}") from None

    def gather(self, mine: Any) -> list[Any]:
        """The objects of all ranks, in rank order. Not a vote; all ranks call it after the same.

        Objects can be pickled. Raises AgreementError and PhaseError as :meth:`agree`.
        """
        group = self._require_sound()
        if group is None:
            return [mine]
        objects = [None] * group.size()
        with self._naming_lost_ranks(self._timeout, self._last):
            dist.all_gather_object(objects, mine, group=group)
        return objects

    def require_same(self, settings: Mapping[str, object]) -> None:
        """Raise AgreementError where ranks differ in these, each with the ranks of its values.

        All ranks call it together, before they change anything. Raises as :meth:`agree`, too.
        """
        mine = {name: str(value) for name, value in settings.items()}
        held = digest(f"{name}: {value}" for name, value in mine.items())
        if not self.agree(Kind.SETTINGS, Vote(graphs=held)).minority:
            return
        of_ranks = self.gather(mine)
        found = []
        for name in dict.fromkeys(name for settings in of_ranks for name in settings):
            values = [settings.get(name, "not given") for settings in of_ranks]
            if differ := differing(values, self._ranks):
                found.append(f"{name} is {differ}")
        raise AgreementError(
            f"ranks differ: {'; '.join(found)}. They would call other collectives, or the same at "
            "other times. Nothing has been changed. Start all ranks with the same settings, "
            "versions of packages and environment variables"
        )

    def begin_capture(self) -> None:
        """Open the next capture; a new agreement has opened its first. Not a vote."""
        self._captures += 1
        self._next = Kind.CAPTURE_START

    @property
    def awaits_start(self) -> bool:
        """Whether the vote on this capture's start is still to come."""
        return self._next is Kind.CAPTURE_START

    def ready(self, vote: Vote | None = None) -> None:
        """Vote that this rank can begin to capture ``vote.graphs``; returns when all ranks can.

        Raises CaptureError on all ranks if one failed or would capture something else, and as
        :meth:`agree`.
        """
        self._vote_on_capture(Kind.CAPTURE_START, vote or Vote())

    def confirm(self, names: Iterable[str] = ()) -> frozenset[str]:
        """Vote that this rank's capture is complete; returns when all ranks' captures are.

        :meth:`ready` runs here if it was not called before. Exceptions are those of :meth:`ready`.
        Returns the names that any rank has given. If ranks differ, they are exchanged after that.
        """
        if self._next is Kind.CAPTURE_START:
            self.ready()
        own = sorted(set(names))
        decision = self._vote_on_capture(Kind.CAPTURE_END, Vote(size=digest(own)))
        return frozenset().union(*([own] if decision.sizes_agree else self.gather(own)))

    def report_failure(self, *, ends: bool = False) -> None:
        """Report in the capture's next vote that it failed on this rank, so that all give up.

        Does nothing if all have given up already. ``ends`` says that this rank could not restore
        what it had changed: then the run ends on all ranks. Raises CaptureError if the others do
        not answer: they are inside collectives that this rank will not join.
        """
        kind = self._next
        try:
            if self._broken:
                raise AgreementError(self._broken)
            if kind is Kind.DELETION and len(self._ranks) > 1:
                raise self._ended(f"all ranks had agreed on their graphs before. {self._remedy}")
            if kind in (Kind.CAPTURE_START, Kind.CAPTURE_END):
                with suppress(CaptureError, *[NotRestoredError] * ends):
                    self._vote_on_capture(kind, Vote(against=True, ends=ends))
        except AgreementError as error:
            raise CaptureError(
                "this rank's capture failed, and the other ranks did not complete the vote on it, "
                f"so training cannot continue: {error}"
            ) from error

    def on_any_rank(self, name: str, here: bool = True, timeout: timedelta | None = None) -> bool:
        """Whether ``here`` is true on any rank. All ranks call this at the same ``name``.

        Raises AgreementError when a rank is at another name, or does not arrive within ``timeout``
        (:data:`FALLING_BACK` if None): it is waiting for a collective in its replay.
        """
        if len(self._ranks) == 1:  # No rank could wait for this one.
            return here
        vote = Vote(size=int(here), graphs=digest([name]))
        decision = self.agree(Kind.MISMATCH, vote, timeout=timeout or FALLING_BACK, name=name)
        if decision.minority:
            others = ranks_text(decision.minority)
            raise self._ended(f"{others} voted on another graph than {name}. {self._remedy}")
        return bool(decision.largest)

    def noted(self, name: str, here: bool) -> bool:
        """Whether ``here`` was true on any rank in this capture so far, at the same ``name``.

        Not a vote: it waits for no rank, and needs no other rank to call it.
        """
        if self._group is None:
            return here
        store: Any = _STORE.find()()
        key = f"{self._group.group_name}/{self._captures}/{name}"
        if here:
            store.set(key, "noted")
        return here or bool(store.check([key]))

    def close(self) -> None:
        """Release the group. Safe to call twice, and after the process groups were destroyed."""
        group, self._group = self._group, None
        self._closed = True
        if group is not None:
            # torch 2.11 raises ValueError if destroy_process_group() has destroyed this group too.
            with suppress(ValueError):
                dist.destroy_process_group(group)

    def _connect(self, alone: str) -> dist.ProcessGroup:
        """A new gloo group; all of the ranks, and no others, call this together."""
        timeout = self._timeout
        self._wait_here()
        # torch takes the number of the groups that this process knows into the name. Ranks of one
        # group may be in other groups too, which differ.
        named = replace_function(*_NAME.place(), lambda *_args, **_kwargs: self._name)
        made: dist.ProcessGroup
        try:
            with undone_after(named):
                made = dist.new_group(self._ranks, timeout, "gloo", use_local_synchronization=True)
        except RuntimeError as error:
            absent = self._absent()
            found = f"another rank has ended (gloo: {error}), and did not wait for"
            if absent:
                late = f"did not come here within {timeout.total_seconds():g} seconds of"
                found = f"{ranks_text(absent)} {late}"
            raise AgreementError(
                f"{found} rank {dist.get_rank()}: each rank of the group votes, so all of them "
                f"make this call, together. {alone}"
            ) from error
        return made

    def _wait_here(self) -> None:
        """Write that this rank has come to the exchange that is under way."""
        store, key = _STORE.find()(), f"{self._name}/{self._exchanges}/{dist.get_rank()}"
        _in_time(partial(store.set, key, "waits"))

    def _absent(self) -> list[int]:
        """The ranks that did not write this; none if the store does not answer."""
        time.sleep(_SOON)  # Others that came fail with this one, and are about to write.
        store, here = _STORE.find()(), f"{self._name}/{self._exchanges}"
        there = _in_time(lambda: [store.check([f"{here}/{rank}"]) for rank in self._ranks])
        return [rank for rank, came in zip(self._ranks, there or (), strict=False) if not came]

    def _vote_on_capture(self, kind: Kind, vote: Vote) -> Decision:
        self._require_sound()
        if self._next is not kind:
            raise PhaseError(
                f"the vote on {name_of(kind)} {self._captures} is over: begin_capture() opens the "
                "votes of another capture"
            )
        decision = self.agree(kind, vote, serial=self._captures)
        self._next = None
        if decision.ends:
            failed = f"state of {ranks_text(decision.ends)}, whose own log names it"
            raise NotRestoredError([failed])
        if decision.against:
            raise CaptureError(
                f"capture failed on {ranks_text(decision.against)}, whose own log has the reason. "
                "All ranks discard their graphs"
            )
        found = []
        if others := decision.minority:
            found.append(f"{ranks_text(others)} would capture other graphs than most ranks")
        if kind is Kind.CAPTURE_START and not decision.sizes_agree:
            found.append(f"static sizes go from {decision.smallest} to {decision.largest}")
        if found:
            raise CaptureError(
                f"ranks would capture different graphs ({'; '.join(found)}), and their "
                "collectives would not match. All ranks discard their graphs. Give all ranks the "
                "same layers and inputs of the same shape"
            )
        self._next = Kind.CAPTURE_END if kind is Kind.CAPTURE_START else Kind.DELETION
        return decision

    def _require_sound(self) -> dist.ProcessGroup | None:
        """The group of the votes; None if this process is the only rank."""
        if under_capture():
            raise PhaseError(
                "ranks cannot vote while a CUDA graph is captured: vote before or after"
            )
        if self._broken:
            raise AgreementError(self._broken)
        if self._closed:
            raise PhaseError("this agreement is closed: make another, on all ranks together")
        return self._group

    @contextmanager
    def _naming_lost_ranks(self, timeout: timedelta, vote: str) -> Iterator[None]:
        """Turn what gloo raises in the block into an AgreementError; no vote can follow."""
        # An exchange keeps the timeout that is set when it is issued (torch 2.11, gloo). A shorter
        # timeout of ``work.wait`` is not enough: the exchange goes on and delays the process's end.
        group: Any = self._group
        backend = group._get_backend(torch.device("cpu"))
        # TORCH_DISTRIBUTED_DEBUG=DETAIL wraps it (``_ProcessGroupWrapper``, torch 2.11), and keeps
        # the timeout of the group's creation for a check of its own before each exchange.
        getattr(backend, "wrapped_pg", backend).set_timeout(timeout)
        self._exchanges += 1
        begun = time.monotonic()
        try:
            yield
        except RuntimeError as error:
            # One whose time is over ends the others' exchange, just before theirs is.
            late = time.monotonic() - begun > 0.9 * timeout.total_seconds()
            raise self._ended(self._lost(vote, timeout if late else error)) from error
        self._last, self._heard = vote, time.monotonic()

    def _lost(self, vote: str, cause: timedelta | RuntimeError) -> str:
        silent = time.monotonic() - self._heard
        self._wait_here()
        absent = self._absent()
        others = [rank for rank in self._ranks if rank != dist.get_rank()]
        one_of = "one of " if not absent and len(others) > 1 else ""
        who = one_of + ranks_text(absent or others)
        if isinstance(cause, timedelta):
            found = f"{who} did not come to {vote} within {cause.total_seconds():g} seconds of"
        else:
            ended = f"another rank has ended, or waits no longer (gloo: {cause})"
            found = f"{ended}; {who} did not come to {vote} with" if absent else f"{ended}, before"
        return (
            f"{found} this rank, which is {_caller()}. All ranks were last heard from "
            f"{silent:.0f} seconds ago, at {self._last}. This rank ends: it cannot know what the "
            "others do, and its next collective would wait forever. "
            f"{self._remedy}"
        )

    def _ended(self, reason: str) -> AgreementError:
        """An error after which this rank votes no more; its process ends soon."""
        self._broken = reason
        if len(self._ranks) > 1:
            exit_without_waiting()
        return AgreementError(reason)


_made: Counter[str] = Counter()
"""How many groups of these ranks were made; equal on all of them."""


def under_capture() -> bool:
    """Whether a CUDA graph is being captured on the current stream."""
    try:
        return torch.cuda.is_current_stream_capturing()
    except RuntimeError:
        # No CUDA, or a CUDA error: a rank with such an error must still be able to vote.
        return False
