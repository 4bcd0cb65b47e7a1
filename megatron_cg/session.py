"""One model's graphs, from before capture until they are released."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from enum import Enum
from typing import Any

from torch import nn

from megatron_cg.backends.base import Backend
from megatron_cg.capture import Unit, capture_time_hooks, capturing
from megatron_cg.counters import Counters
from megatron_cg.errors import CaptureError, HookError, PhaseError
from megatron_cg.fsdp.model import find_megatron_fsdp
from megatron_cg.fsdp.transform import CaptureTimeHooks
from megatron_cg.replay import attach_replay
from megatron_cg.undo import set_attribute

_SESSIONS: list[Session] = []
"""Sessions with graphs; a strong reference, since the layers replay whether or not anybody else
holds their session, and :func:`close_all_sessions` must find it."""


class Phase(Enum):
    """Where a session is. EAGER goes to CAPTURING, and back (failure) or on to REPLAYING."""

    EAGER = "eager"
    CAPTURING = "capturing"
    REPLAYING = "replaying"
    CLOSED = "closed"


class Session:
    """The graphs of one Megatron-FSDP model.

    Args:
        model: the ``MegatronFSDP``, or any module that contains exactly one.
        units: the layers to be captured, in the order of their forward passes.
        backend: what captures them.
        confirm: called when all graphs are made and attached; what it raises fails the capture.

    Raises:
        HookError: ``model`` holds no ``MegatronFSDP``.
        UpstreamChangedError: it holds one that lacks a member we rely on.
    """

    def __init__(
        self,
        model: nn.Module,
        units: Sequence[Unit],
        backend: Backend,
        confirm: Callable[[], None] | None = None,
    ) -> None:
        fsdp = find_megatron_fsdp(model)
        if fsdp is None:
            raise HookError(
                f"{type(model).__name__} holds no MegatronFSDP: wrap the model before capture "
                "(--use-megatron-fsdp), or use Megatron's own CUDA graphs without this package."
            )
        self._fsdp = fsdp
        self._units = tuple(units)
        self._backend = backend
        self._confirm = confirm
        self._undo = ExitStack()
        self.phase = Phase.EAGER
        self.counters = Counters()

    @contextmanager
    def capturing(self) -> Iterator[list[CaptureTimeHooks]]:
        """The transaction in which the caller captures the units and gives them their graphs.

        Yields TE's ``capture_time_hooks``, one entry a unit. In the body the caller captures and
        sets ``layer.cuda_graphs`` of every unit. Left normally, the units replay from then on;
        left by an exception, everything is as it was before and the session can try again.

        Raises:
            PhaseError: graphs exist already, or the session is closed.
            HookError, UnknownFsdpHookError: a hook cannot be carried over; nothing was changed.
            CaptureError: the body ended without a graph for some unit.
        """
        self._require(Phase.EAGER)
        self.phase = Phase.CAPTURING
        try:
            with capturing(self._units, self._fsdp, self._backend) as (hooks, lasting):
                for unit in self._units:
                    lasting.callback(set_attribute(unit.layer, "cuda_graphs", []))
                yield capture_time_hooks(hooks)
                self._check_whole()
                for unit, unit_hooks in zip(self._units, hooks, strict=True):
                    undo = attach_replay(unit.layer, unit_hooks.before_replay, self.counters)
                    lasting.callback(undo)
                if self._confirm is not None:
                    self._confirm()
                self._undo = lasting.pop_all()
        except BaseException:
            self._undo.close()
            self.phase = Phase.EAGER
            raise
        _SESSIONS.append(self)
        self.counters.captured += sum(len(_graphs(unit.layer)) for unit in self._units)
        self.phase = Phase.REPLAYING

    def on_close(self, undo: Callable[[], None]) -> None:
        """Let :meth:`close` run ``undo`` too, before what was changed earlier is undone."""
        self._require(Phase.REPLAYING)
        self._undo.callback(undo)

    def close(self) -> None:
        """Release the graphs and undo, in reverse, all that capture changed. Safe to run twice.

        The host waits for the GPU first: a graph must not be destroyed while it replays.
        """
        if self.phase is Phase.CAPTURING:
            raise PhaseError("a session cannot be closed from inside its own capture")
        replaying, self.phase = self.phase is Phase.REPLAYING, Phase.CLOSED
        if not replaying:
            return
        _SESSIONS.remove(self)
        with self._undo:
            self._backend.synchronize()
            for unit in self._units:
                for graph in _graphs(unit.layer):
                    graph.reset()

    def _require(self, phase: Phase) -> None:
        if self.phase is not phase:
            raise PhaseError(
                f"this session is {self.phase.value}, and has to be {phase.value} for that. To "
                "capture again, delete its graphs and open a new session"
            )

    def _check_whole(self) -> None:
        missing = [unit.name for unit in self._units if not _graphs(unit.layer)]
        if missing:
            raise CaptureError(
                f"capture ended without a graph for {', '.join(missing)}; no layer was changed, "
                "training can go on eagerly"
            )


def close_all_sessions() -> None:
    """Close every session that has graphs, also when closing one of them raises."""
    with ExitStack() as stack:
        for session in _SESSIONS:
            stack.callback(session.close)


def _graphs(layer: nn.Module) -> Sequence[Any]:
    graphs: Sequence[Any] = getattr(layer, "cuda_graphs", ())
    return graphs
