"""One decision for all ranks, before anything that all of them must do together.

If only one rank captures or falls back to eager, it enters collectives that the other ranks never
join. So every rank, including one that failed, votes in one small exchange, and a pure function of
all votes decides (``consensus/decision.py``). The exchange has its own gloo group: CPU tensors,
never NCCL, never inside a graph.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import timedelta
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
from megatron_cg.errors import CaptureError, NotRestoredError, PhaseError
from megatron_cg.ranges import in_range
from megatron_cg.upstream.patch import put_over, undone_after
from megatron_cg.upstream.symbols import Symbol

_STORE = Symbol(
    "torch.distributed.distributed_c10d:_get_default_store",
    "where all ranks of the default group can write",
)
_NAME = Symbol(
    "torch.distributed.distributed_c10d:_process_group_name",
    "the name of a new group, equal on its ranks",
    parameters=("ranks", "use_hashed_name"),
)
RELIES_ON = (_STORE, _NAME)

TIMEOUT = timedelta(minutes=10)
"""How long a rank waits for the others' votes. Capture of a large model takes minutes."""
FALLING_BACK = timedelta(seconds=60)
"""How long a rank waits for the others to fall back to eager after a mismatch. They find the same
mismatch at the same call."""


class Agreement:
    """The votes of all ranks of a process group. All of them create it together.

    In a process that has not called ``init_process_group``, this process is the only rank.

    Every rank must hold the same votes in the same order: gloo pairs exchanges by the order in
    which each rank issued them. A capture has two votes, :meth:`ready` before it and
    :meth:`confirm` at its end; a rank that fails in between calls :meth:`report_failure`.
    :meth:`begin_capture` opens the next capture.

    ``timeout`` is how long this call and a vote wait for a rank that does not arrive. The ranks of
    ``group`` vote; None is the default group. ``remedy`` says what a user does if only some ranks
    make this call. Then it raises AgreementError.
    """

    def __init__(
        self,
        timeout: timedelta = TIMEOUT,
        *,
        group: dist.ProcessGroup | None = None,
        remedy: str = "",
    ) -> None:
        self._group: dist.ProcessGroup | None = None
        self._ranks = [0]
        if dist.is_initialized():
            self._group = _gloo_group(group, timeout, remedy)
            self._ranks = dist.get_process_group_ranks(self._group)
        self._timeout = timeout
        self._closed, self._broken = False, ""
        self._captures = 1
        self._next: Kind | None = Kind.CAPTURE_START

    def agree(
        self, kind: Kind, vote: Vote, *, serial: int = 0, timeout: timedelta | None = None
    ) -> Decision:
        """Vote and wait for all ranks.

        ``kind`` is what the vote is about, ``serial`` a count of the caller, such as the training
        step: ranks with different counts are at different votes. ``timeout`` replaces the own one.

        Raises:
            AgreementError: a rank is gone, late or at another vote. No vote can follow, since
                ranks are out of step.
            PhaseError: a CUDA graph is being captured.
        """
        _require_no_capture()
        rows = self._exchange(encode(kind, serial, vote), timeout)
        try:
            return decide(rows, self._ranks)
        except AgreementError as error:
            self._break(str(error))
            raise

    def gather(self, mine: Any) -> list[Any]:
        """The objects of all ranks, in rank order. Not a vote; all ranks call it after the same.

        Objects can be pickled. Raises AgreementError and PhaseError as :meth:`agree`.
        """
        _require_no_capture()
        group = self._require_sound()
        if group is None:
            return [mine]
        objects = [None] * group.size()
        _gloo_backend(group).set_timeout(self._timeout)
        with self._naming_lost_ranks():
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

        Raises:
            CaptureError: a rank failed or would capture something else; raised on all ranks.
            AgreementError: as :meth:`agree`.
            PhaseError: this vote of this capture is over; :meth:`begin_capture` opens another.
        """
        self._require_next(Kind.CAPTURE_START)
        self._vote_on_capture(Kind.CAPTURE_START, vote or Vote())

    def confirm(self, names: Iterable[str] = ()) -> frozenset[str]:
        """Vote that this rank's capture is complete; returns when all ranks' captures are.

        :meth:`ready` runs here if it was not called before. Exceptions are those of :meth:`ready`.
        Returns the names that any rank has given. Only if ranks differ in them is there an exchange
        after the vote.
        """
        if self._next is Kind.CAPTURE_START:
            self.ready()
        self._require_next(Kind.CAPTURE_END)
        own = sorted(set(names))
        decision = self._vote_on_capture(Kind.CAPTURE_END, Vote(size=digest(own)))
        return frozenset().union(*([own] if decision.sizes_agree else self.gather(own)))

    def report_failure(self, *, ends: bool = False) -> None:
        """Report in the capture's next vote that it failed on this rank, so that all give up.

        Does nothing if all have given up already. ``ends`` says that this rank could not restore
        what it had changed: then the run ends on all ranks.

        Raises:
            CaptureError: the others do not answer. They are inside collectives that this rank will
                not join. If this rank went on, its collectives would pair with the wrong ones. Or
                all have agreed that their captures are complete.
        """
        kind = self._next
        try:
            if self._broken:
                raise AgreementError(self._broken)
            if kind is Kind.DELETION and len(self._ranks) > 1:
                self._break("all ranks had agreed on their graphs before")
                raise AgreementError(self._broken)
            if kind in (Kind.CAPTURE_START, Kind.CAPTURE_END):
                with suppress(CaptureError, *[NotRestoredError] * ends):
                    self._vote_on_capture(kind, Vote(against=True, ends=ends))
        except AgreementError as error:
            raise CaptureError(
                "this rank's capture failed, and the other ranks did not complete the vote on it "
                f"({error}). Training cannot continue, because ranks no longer do the same. To "
                "train without graphs: --cuda-graph-impl none"
            ) from error

    def on_any_rank(self, name: str, here: bool = True, timeout: timedelta | None = None) -> bool:
        """Whether ``here`` is true on any rank. All ranks call this at the same ``name``.

        Raises AgreementError when a rank is at another name, or does not arrive within ``timeout``
        (:data:`FALLING_BACK` if None): it is waiting for a collective in its replay.
        """
        if len(self._ranks) == 1:  # No rank could wait for this one.
            return here
        vote = Vote(size=int(here), graphs=digest([name]))
        decision = self.agree(Kind.MISMATCH, vote, timeout=timeout or FALLING_BACK)
        if decision.minority:
            self._break(f"{ranks_text(decision.minority)} voted on another graph than {name}")
            raise AgreementError(self._broken)
        return bool(decision.largest)

    def noted(self, name: str, here: bool) -> bool:
        """Whether ``here`` was true on any rank in this capture so far, at the same ``name``.

        Not a vote: it waits for no rank, and needs no other rank to call it.
        """
        if self._group is None or len(self._ranks) == 1:
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

    def _vote_on_capture(self, kind: Kind, vote: Vote) -> Decision:
        decision = self.agree(kind, vote, serial=self._captures)
        self._next = None
        decision.require_restored()
        other_sizes = kind is Kind.CAPTURE_START and not decision.sizes_agree
        if decision.against:
            raise CaptureError(
                f"capture failed on {ranks_text(decision.against)}, whose own log has the reason. "
                "All ranks discard their graphs"
            )
        if decision.minority or other_sizes:
            raise CaptureError(
                f"ranks would capture different graphs ({decision.difference()}), and their "
                "collectives would not match. All ranks discard their graphs. Give all ranks the "
                "same layers and inputs of the same shape"
            )
        self._next = Kind.CAPTURE_END if kind is Kind.CAPTURE_START else Kind.DELETION
        return decision

    def _require_next(self, kind: Kind) -> None:
        self._require_sound()
        if self._next is not kind:
            raise PhaseError(
                f"the vote on {name_of(kind)} {self._captures} is over: begin_capture() opens the "
                "votes of another capture"
            )

    def _require_sound(self) -> dist.ProcessGroup | None:
        """The group of the votes; None if this process is the only rank."""
        if self._broken:
            raise AgreementError(self._broken)
        if self._closed:
            raise PhaseError("this agreement is closed: make another, on all ranks together")
        return self._group

    @in_range("vote")
    def _exchange(self, row: torch.Tensor, timeout: timedelta | None) -> torch.Tensor:
        group = self._require_sound()
        if group is None:
            return row.view(1, -1)
        rows = row.new_empty(group.size() * len(row))
        # An exchange keeps the timeout that is set when it is issued (torch 2.11, gloo). A shorter
        # timeout of ``work.wait`` is not enough: the exchange goes on and delays the process's end.
        _gloo_backend(group).set_timeout(timeout or self._timeout)
        with self._naming_lost_ranks():
            dist.all_gather_into_tensor(rows, row, group)
        return rows.view(group.size(), -1)

    @contextmanager
    def _naming_lost_ranks(self) -> Iterator[None]:
        """Turn what gloo raises in the block into an AgreementError; no vote can follow."""
        try:
            yield
        except RuntimeError as error:
            self._break(
                f"a rank is gone, or did not join a vote in time (gloo: {error}). This rank ends: "
                "it cannot know what the others do, and its next collective would wait forever. "
                "The reason is in the log of the rank that ended first."
            )
            raise AgreementError(self._broken) from error

    def _break(self, reason: str) -> None:
        """Vote no more; the process ends soon."""
        self._broken = reason
        if len(self._ranks) > 1:
            exit_without_waiting()


_made: Counter[str] = Counter()
"""How many groups of these ranks were made; equal on all of them."""


def _gloo_group(
    group: dist.ProcessGroup | None, timeout: timedelta, remedy: str
) -> dist.ProcessGroup:
    """A new gloo group of the ranks of ``group``; all of them, and no others, call this together.

    Raises AgreementError, with the ranks that did not come in time.
    """
    ranks = sorted(dist.get_process_group_ranks(group or dist.group.WORLD))
    those = f"megatron_cg/{digest(map(str, ranks))}"
    name = f"{those}/{_made[those]}"
    _made[those] += 1
    store: Any = _STORE.find()()
    here = {rank: f"{name}/{rank}" for rank in ranks}
    store.set(here[dist.get_rank()], "here")
    made: dist.ProcessGroup
    try:
        # torch takes the number of the groups that this process knows into the name. Ranks of one
        # group may be in other groups too, which differ.
        with undone_after(put_over(*_NAME.place(), lambda *_args, **_kwargs: name)):
            made = dist.new_group(ranks, timeout, "gloo", use_local_synchronization=True)
    except RuntimeError as error:
        absent: list[int] = []
        with suppress(RuntimeError):  # The rank that has the store may be gone.
            absent = [rank for rank, key in here.items() if not store.check([key])]
        late = f"did not come here within {timeout.total_seconds():g} seconds of"
        gone = f"another rank has ended (gloo: {error}), and did not wait for"
        raise AgreementError(
            f"{f'{ranks_text(absent)} {late}' if absent else gone} rank {dist.get_rank()}: each "
            f"rank of the group votes, so all of them make this call, together. {remedy}"
        ) from error
    return made


def _gloo_backend(group: dist.ProcessGroup) -> Any:
    """The group's gloo backend, without the wrapper of ``TORCH_DISTRIBUTED_DEBUG=DETAIL``.

    The wrapper (``_ProcessGroupWrapper``, torch 2.11) has no ``set_timeout`` of its own. Its check
    before each exchange keeps the timeout that the group was created with.
    """
    backend = group._get_backend(torch.device("cpu"))
    return getattr(backend, "wrapped_pg", backend)


def under_capture() -> bool:
    """Whether a CUDA graph is being captured on the current stream."""
    try:
        return torch.cuda.is_current_stream_capturing()
    except RuntimeError:
        # No CUDA, or a CUDA error: a rank with such an error must still be able to vote.
        return False


def _require_no_capture() -> None:
    if under_capture():
        raise PhaseError("ranks cannot vote while a CUDA graph is captured: vote before or after")
