"""What guards and votes cost in each step of a run, put into the run's own record.

Relied on, of this package: ``Boundary.after_step`` (what ranks do after each step),
``MismatchPolicy.begin_step`` (each step with graphs), ``Agreement.agree`` (votes that wait),
``Inputs.copied`` and ``GuardedGraph._guard_backward`` (what a replay does beside asking its
guard), and ``Recorder.finish``.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import wraps
from typing import Any

from megatron_cg.consensus.boundary import Boundary
from megatron_cg.consensus.decision import name_of
from megatron_cg.consensus.exchange import Agreement
from megatron_cg.replay.guard.inputs import Inputs
from megatron_cg.replay.guarded_graph import GuardedGraph
from megatron_cg.replay.mismatch_policy import MismatchPolicy
from megatron_cg.telemetry.record import Recorder
from megatron_cg.upstream.patch import put_over

KEY = "overheads"
"""Under which a record holds ``{"steps": [...], "votes": [...]}``.

A step has ``vote_ms`` (all that is done about votes after it; ``issuing_ms`` and ``waiting_ms`` are
parts of it) and ``counters``: how far the session's counters came in it, with ``around_ns``, or
None in a step without graphs. A vote is one that ranks waited for: ``kind``, ``waiting_ms`` and
``exchanging_ms``.
"""


@contextmanager
def probing() -> Iterator[None]:
    """Measure in the block; every record that is finished in it gets what was measured."""
    probe = _Probe()
    with ExitStack() as undo:
        for owner, name, wrap in (
            (Boundary, "after_step", probe.of_votes_after_a_step),
            (MismatchPolicy, "begin_step", probe.of_a_step_with_graphs),
            (Agreement, "agree", probe.of_a_vote_that_waits),
            (Inputs, "copied", probe.of_work_around_a_replay),
            (GuardedGraph, "_guard_backward", probe.of_work_around_a_replay),
            (Recorder, "finish", probe.of_the_end),
        ):
            undo.callback(put_over(owner, name, wrap(getattr(owner, name))))
        yield


class _Probe:
    def __init__(self) -> None:
        self._steps: list[dict[str, Any]] = []
        self._votes: list[dict[str, Any]] = []
        self._policy: MismatchPolicy | None = None
        self._before: dict[str, int] = {}
        self._around_ns = 0

    def of_votes_after_a_step(self, old: Callable[..., None]) -> Callable[..., None]:
        @wraps(old)
        def after_step(boundary: Any, *args: Any, **kwargs: Any) -> None:
            spent = boundary._agreement.time
            issuing, waiting = spent.issuing_ms, spent.waiting_ms
            start = time.perf_counter()
            old(boundary, *args, **kwargs)
            row = {
                "vote_ms": (time.perf_counter() - start) * 1e3,
                "issuing_ms": spent.issuing_ms - issuing,
                "waiting_ms": spent.waiting_ms - waiting,
                "counters": self._counted(),
            }
            self._steps.append(row)

        return after_step

    def of_a_step_with_graphs(self, old: Callable[..., None]) -> Callable[..., None]:
        @wraps(old)
        def begin_step(policy: MismatchPolicy) -> None:
            old(policy)
            self._policy, self._before, self._around_ns = policy, policy.counters.as_dict(), 0

        return begin_step

    def of_a_vote_that_waits(self, old: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(old)
        def agree(agreement: Agreement, kind: Any, *args: Any, **kwargs: Any) -> Any:
            spent = agreement.time
            waiting, exchanging = spent.waiting_ms, spent.exchanging_ms
            try:
                return old(agreement, kind, *args, **kwargs)
            finally:
                row = {
                    "kind": name_of(kind),
                    "waiting_ms": spent.waiting_ms - waiting,
                    "exchanging_ms": spent.exchanging_ms - exchanging,
                }
                self._votes.append(row)

        return agree

    def of_work_around_a_replay(self, old: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(old)
        def timed(*args: Any, **kwargs: Any) -> Any:
            start = time.perf_counter_ns()
            result = old(*args, **kwargs)
            self._around_ns += time.perf_counter_ns() - start
            return result

        return timed

    def of_the_end(self, old: Callable[..., None]) -> Callable[..., None]:
        @wraps(old)
        def finish(recorder: Recorder, model: list[Any]) -> None:
            recorder.note(KEY, {"steps": self._steps, "votes": self._votes})
            old(recorder, model)

        return finish

    def _counted(self) -> dict[str, int] | None:
        policy, self._policy = self._policy, None
        if policy is None:
            return None
        now = policy.counters.as_dict()
        counted = {name: now[name] - before for name, before in self._before.items()}
        return counted | {"around_ns": self._around_ns}
