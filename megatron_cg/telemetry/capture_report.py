"""One capture as it is seen from outside: progress, seconds and memory by phase, one line.

The passes of warmup and capture are counted by functions of our own among the capture-time hooks,
which the backend runs outside of what is captured (transformer-engine 2.20.2, ``graph.py``,
``_run_capture_time_hooks``). Nothing here waits for the GPU or asks anything of it: times are the
host's, and memory is what torch's allocator knows.

Note [The highest memory during capture]
    torch knows the highest memory since the process began, and asking it to begin anew would
    change what Megatron's own log says of it. Where it rises during capture it is the highest of
    the capture; where it does not, the highest that was seen after a pass stands for it.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import nn

from megatron_cg.backends.base import Backend
from megatron_cg.consensus.exchange import AgreementTime
from megatron_cg.errors import UpstreamChangedError
from megatron_cg.replay.counters import Counters
from megatron_cg.replay.unit import Unit
from megatron_cg.telemetry.coverage_lines import coverage
from megatron_cg.telemetry.memory_lines import memory
from megatron_cg.telemetry.progress import CaptureBar, capture_bar, is_first_rank
from megatron_cg.telemetry.record import add_capture, follow
from megatron_cg.upstream.patch import put_over

logger = logging.getLogger(__name__)

_WARMUP_ITERS = 3
"""TE 2.20.2's default of ``num_warmup_iters``."""
PHASES = ("prepare", "warm up", "capture", "publish", "vote")
"""What a capture's seconds are told by; voting is not in the others."""
MIB = 2**20


class CaptureReport:
    """Begins with a capture, and ends with :meth:`finished` or :meth:`failed`.

    Args:
        model: the model that is captured.
        units: its layers to be captured.
        backend: what captures them; its ``capture`` is watched until the end.
        votes: what the votes of this rank have cost so far.
    """

    def __init__(
        self, model: nn.Module, units: Sequence[Unit], backend: Backend, votes: AgreementTime | None
    ) -> None:
        self._model, self._units, self._votes = model, tuple(units), votes
        self._bar: CaptureBar | None = None
        self._memory = {"before": memory()}
        self._highest = 0
        self._seconds = dict.fromkeys(PHASES, 0.0)
        self._since = time.perf_counter(), self._voted()
        self._undo = put_over(backend, "capture", self._watched(backend.capture))

    def finished(self, counters: Counters) -> None:
        """All graphs are whole and replay from now on; ``counters`` are those of their session."""
        self._end("publish")
        entry = self._entry() | {
            "layers": len(self._units),
            "graphs": sum(len(getattr(unit.layer, "cuda_graphs", ())) for unit in self._units),
            "coverage": self._coverage(),
        }
        follow(counters, self._votes)
        add_capture(entry)
        if self._units and is_first_rank():
            print(f"megatron_cg: {summary(entry)}", flush=True)

    def failed(self, error: BaseException) -> None:
        """No graph came of it."""
        self._end("publish")
        add_capture(self._entry() | {"error": f"{type(error).__name__}: {error}"})

    def _entry(self) -> dict[str, Any]:
        return {
            "seconds": dict(self._seconds),
            "memory": self._memory,
            "layers": 0,
            "graphs": 0,
            "coverage": [],
            "error": None,
        }

    def _coverage(self) -> list[dict[str, Any]]:
        """The map; none where Megatron is not as relied on, since the graphs are whole anyhow."""
        try:
            return coverage(self._model, self._units)
        except UpstreamChangedError as error:
            logger.warning("megatron_cg: what was graphed is not recorded: %s", error)
            return []

    def _end(self, phase: str) -> None:
        self._undo()
        if self._bar is not None:
            self._bar.close()
        self._pass_to(phase)
        self._memory["after"] = memory()
        self._memory["highest"] = self._highest_memory()

    def _pass_to(self, phase: str) -> None:
        """Count the time since the last call for ``phase``, less what votes took of it."""
        since, voted = self._since
        self._since = now, voted_now = time.perf_counter(), self._voted()
        self._seconds["vote"] += voted_now - voted
        self._seconds[phase] += now - since - (voted_now - voted)

    def _voted(self) -> float:
        spent = self._votes
        if spent is None:
            return 0.0
        return (spent.waiting_ms + spent.exchanging_ms + spent.issuing_ms) / 1e3

    def _watched(self, old: Callable[..., Any]) -> Callable[..., Any]:
        def capture(
            callables: tuple[nn.Module, ...],
            sample_args: Sequence[tuple[Any, ...]],
            *,
            capture_time_hooks: Sequence[Mapping[str, Mapping[int, Any]]],
            **options: Any,
        ) -> Any:
            self._pass_to("prepare")
            passes = 2 * len(sample_args)
            warmup = passes * int(options.get("num_warmup_iters", _WARMUP_ITERS))
            self._bar = capture_bar(warmup + passes, warmup)
            done = 0

            def passed(_module: nn.Module) -> None:
                nonlocal done
                done += 1
                self._look_at_memory()
                if self._bar is not None:
                    self._bar.advance()
                if done == warmup:
                    self._pass_to("warm up")
                    self._memory["warmed up"] = memory()

            hooks = [_with(hooks, passed) for hooks in capture_time_hooks]
            graphs = old(callables, sample_args, capture_time_hooks=hooks, **options)
            self._pass_to("capture")
            self._memory["captured"] = memory()
            return graphs

        return capture

    def _look_at_memory(self) -> None:
        now = memory()
        if now is not None:
            self._highest = max(self._highest, now["allocated_bytes"])

    def _highest_memory(self) -> dict[str, int] | None:
        """See Note [The highest memory during capture]."""
        before, after = self._memory["before"], self._memory["after"]
        if before is None or after is None:
            return None
        rose = after["peak_allocated_bytes"] > before["peak_allocated_bytes"]
        highest = after["peak_allocated_bytes"] if rose else self._highest
        return {"allocated_bytes": highest, "exact": int(rose)}


def summary(capture: Mapping[str, Any]) -> str:
    """One line to read, of an entry of a record's ``captures``."""
    seconds = capture["seconds"]
    parts = ", ".join(f"{name} {seconds[name]:.1f}" for name in PHASES if seconds[name] >= 0.05)
    text = (
        f"{_count(capture['graphs'], 'graph')} of {_count(capture['layers'], 'layer')} captured "
        f"in {sum(seconds.values()):.1f} s{f' ({parts})' if parts else ''}"
    )
    before, after = capture["memory"]["before"], capture["memory"]["after"]
    if before is None or after is None:
        return f"{text}; no GPU memory, since no GPU is used"
    allocated, reserved = (
        (after[name] - before[name]) / MIB for name in ("allocated_bytes", "reserved_bytes")
    )
    return f"{text}; {allocated:+.0f} MiB of GPU memory allocated, {reserved:+.0f} MiB reserved"


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'s' * (number != 1)}"


def _with(hooks: Mapping[str, Mapping[int, Any]], passed: Callable[[nn.Module], None]) -> Any:
    """``hooks``, with ``passed`` as the last to run after each forward and backward pass."""
    ends = ("forward_hooks", "backward_hooks")
    return dict(hooks) | {
        key: {**hooks.get(key, {}), max(hooks.get(key, {}), default=-1) + 1: passed} for key in ends
    }
