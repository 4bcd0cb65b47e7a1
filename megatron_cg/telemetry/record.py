"""Records what a run trained, bit for bit: losses, gradient norms and parameter shards.

For ``megatron-cg report`` it also records counters and memory by step, the machine, the command
line, the environment, and the notes that the rest of this package makes of its captures.

Megatron looks up ``train``, ``train_step`` and ``evaluate`` as globals of their module for each
call. ``train_step`` returns eight values: the first is the loss dictionary, the second
``skipped_iter`` and the sixth the gradient norm. The first value of ``evaluate`` is a dictionary of
losses.

The recorder reads values after the step returns and adds no earlier work to the device, so it
cannot change what it records. ``train_step`` itself ends by waiting for the gradient norm, so its
wall time is the step's time and no extra synchronization is needed.
"""

from __future__ import annotations

import inspect
import json
import logging
import math
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from datetime import UTC, datetime
from functools import wraps
from pathlib import Path
from typing import Any

import torch

from megatron_cg.consensus.agreement_time import AgreementTime
from megatron_cg.files import write_text
from megatron_cg.replay.counters import Counters
from megatron_cg.telemetry.machine_load import machine, variables
from megatron_cg.telemetry.memory_lines import memory
from megatron_cg.telemetry.record_schema import CAPTURED_AFTER, FORMAT
from megatron_cg.telemetry.record_setup import Setup, of_megatron
from megatron_cg.telemetry.record_shards import parameter_digests
from megatron_cg.telemetry.rows import Rows
from megatron_cg.telemetry.warnings_heard import listening
from megatron_cg.upstream.patch import put_over
from megatron_cg.upstream.symbols import Symbol, changed, installed_version
from megatron_cg.version import __version__

logger = logging.getLogger(__name__)

_PACKAGE = "megatron-core"
_MODULE = "megatron.training.training"
_PACKAGES = ("torch", "megatron-core", "megatron-fsdp", "transformer-engine")
_TRAIN, _EVALUATE, _STEP = (
    Symbol(_PACKAGE, f"{_MODULE}:{name}", "a function of Megatron's loop", parameters=parameters)
    for name, parameters in (
        ("train", ("forward_step_func", "model")),
        ("evaluate", ("forward_step_func", "data_iterator", "model")),
        ("train_step", ("forward_step_func", "data_iterator", "model", "optimizer")),
    )
)
RELIES_ON = (_TRAIN, _EVALUATE, _STEP)
WRITE_SECONDS = 60.0
"""The least time between two writes for a report. A killed run leaves the last written file."""
_active: list[Recorder] = []


def note(key: str, value: Any) -> None:
    """Store ``value``, anything JSON can hold, under ``key`` in this rank's record.

    Does nothing when nothing is recorded. A note made after training is written too.
    """
    for recorder in _active:
        recorder.note(key, value)


def note_capture() -> None:
    """Record the number of steps before the first capture; see :func:`note`."""
    for recorder in _active:
        if CAPTURED_AFTER not in recorder.data:
            recorder.note(CAPTURED_AFTER, len(recorder.steps))


def note_step(key: str, value: Any) -> None:
    """Store ``value`` under ``key`` in the entry of the last trained step; see :func:`note`."""
    for recorder in _active:
        if recorder.steps.last is not None:
            recorder.steps.last[key] = value


def add_capture(capture: dict[str, Any]) -> None:
    """Add the report of one capture, and the number of steps trained before it."""
    for recorder in _active:
        recorder.add("captures", capture)


def follow(counters: Counters, votes: AgreementTime | None) -> None:
    """Show in records, from now on, how these counts of one session and its votes grow."""
    for recorder in _active:
        recorder.follow(counters, votes)


@contextmanager
def recording(recorder: Recorder) -> Iterator[None]:
    """Send notes and warnings of this package to ``recorder`` inside the block."""
    with listening(recorder.add_event):
        _active.append(recorder)
        try:
            yield
        finally:
            _active.remove(recorder)


def install_recorder(directory: str | Path, **options: Any) -> Callable[[], None]:
    """Record the run of this process into ``directory/rank<N>.json``; returns the undo.

    The file is written when Megatron's ``train`` ends, by return, exception or ``sys.exit``.
    ``options`` are those of :class:`Recorder`. Raises UpstreamChangedError when ``train`` or
    ``train_step`` is not as relied on.
    """
    recorder = Recorder(Path(directory), **options)
    wraps_of = {
        _STEP: recorder.wrap_step,
        _TRAIN: recorder.wrap_train,
        _EVALUATE: recorder.wrap_evaluate,
    }
    with ExitStack() as stack:
        for symbol, wrap in wraps_of.items():
            stack.callback(put_over(*symbol.place(), wrap(symbol.find())))
        stack.enter_context(recording(recorder))
        return stack.pop_all().close


def install_report(directory: str, interval: int) -> Callable[[], None]:
    """Record what ``megatron-cg report`` needs, at no cost in run time; returns the undo.

    Counters and memory have a row every ``interval`` steps. See :func:`install_recorder`.
    """
    return install_recorder(
        directory, digests=False, interval=interval, write_seconds=WRITE_SECONDS
    )


class Recorder:
    """The record of one rank: it grows step by step and is written to its own file.

    Args:
        directory: where ``rank<N>.json`` is written.
        digests: whether to read every parameter shard at the end; comparisons need this.
        interval: steps between two rows of counters and memory.
        write_seconds: the least number of seconds between two writes during a run; None writes only
            at its end.
    """

    def __init__(
        self,
        directory: Path,
        *,
        digests: bool = True,
        interval: int = 1,
        write_seconds: float | None = None,
    ) -> None:
        self.directory = directory
        self._digests, self._interval = digests, max(1, interval)
        self._pause, self._next_write = write_seconds, _next(write_seconds or 0.0)
        self._counters: list[Counters] = []
        self._votes: list[AgreementTime] = []
        self._ended = self._told = False
        self.steps, self.intervals = Rows(), Rows()
        self.data: dict[str, Any] = {
            "format": FORMAT,
            "began": datetime.now(UTC).isoformat(timespec="seconds"),
            "world_size": int(os.environ.get("WORLD_SIZE", "1")),
            "setup": {},
            "versions": {name: installed_version(name) for name in _PACKAGES}
            | {"megatron-cg": __version__},
            "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
            "machine": machine(),
            "command": list(sys.argv),
            "environment": variables(),
            "finished": False,
            "error": None,
            "parameters": {},
            "graphs": None,
            "captures": [],
            "events": [],
        }

    def note(self, key: str, value: Any) -> None:
        """Set ``key``; after training the file is written again."""
        self.data[key] = value
        if self._ended:
            self.write()

    def add(self, key: str, entry: dict[str, Any]) -> None:
        """Add an entry to the list ``key``, with the number of steps trained before it."""
        self.data[key].append({"after_step": len(self.steps), **entry})
        self.note(key, self.data[key])

    def describe(self, setup: Setup) -> None:
        """Record the setup of the run: only this distinguishes it from a run of another model."""
        self.data["setup"] = setup

    def follow(self, counters: Counters, votes: AgreementTime | None) -> None:
        """Include these counts in every row of counters from now on; sessions may share votes."""
        self._counters.append(counters)
        if votes is not None and not any(known is votes for known in self._votes):
            self._votes.append(votes)

    def add_event(self, level: str, text: str) -> None:
        """Add an event for the reader, and the number of steps trained before it."""
        self.add("events", {"level": level, "text": text})

    def wrap_step(self, step: Callable[..., Any]) -> Callable[..., Any]:
        """``train_step`` that also appends its loss, gradient norm and time to the record."""

        @wraps(step)
        def train_step(*args: Any, **kwargs: Any) -> Any:
            start = time.perf_counter()
            result = step(*args, **kwargs)
            if not isinstance(result, tuple) or len(result) != 8:
                expected = "a function that returns eight values"
                raise changed(_PACKAGE, f"{_MODULE}:train_step", expected)
            losses, skipped, grad_norm = result[0], result[1], result[5]
            self.add_step(losses, grad_norm, bool(skipped), start)
            return result

        return train_step

    def wrap_evaluate(self, evaluate: Callable[..., Any]) -> Callable[..., Any]:
        """``evaluate`` that also stores its losses with those of the last trained step."""

        @wraps(evaluate)
        def recorded_evaluate(*args: Any, **kwargs: Any) -> Any:
            result = evaluate(*args, **kwargs)
            if self.steps.last is not None and result[0]:
                losses = {f"evaluation {name}": exact(value) for name, value in result[0].items()}
                self.steps.last["losses"].update(losses)
            return result

        return recorded_evaluate

    def wrap_train(self, train: Callable[..., Any]) -> Callable[..., Any]:
        """``train`` that records the parameters and writes the file when it ends."""

        @wraps(train)
        def recorded_train(*args: Any, **kwargs: Any) -> Any:
            model = inspect.signature(train).bind(*args, **kwargs).arguments["model"]
            self.describe(of_megatron())
            try:
                result = train(*args, **kwargs)
            except SystemExit:
                self.finish(model)
                raise
            except BaseException as error:
                self.data["error"] = f"{type(error).__name__}: {error}"
                self.write()
                raise
            self.finish(model)
            return result

        return recorded_train

    def add_step(self, losses: dict[str, Any], grad_norm: Any, skipped: bool, start: float) -> None:
        """Append one step; ``start`` is the ``time.perf_counter()`` of its begin."""
        values = {name: exact(value) for name, value in losses.items()}
        self.steps.append(
            {
                "losses": values,
                "grad_norm": None if grad_norm is None else exact(grad_norm),
                "skipped": skipped,
                "milliseconds": (time.perf_counter() - start) * 1e3,
            }
        )
        if len(self.steps) % self._interval == 0:
            self._add_interval()
            self._write_when_due()

    def _add_interval(self) -> None:
        """Append all counts and the memory after the last trained step."""
        counters = Counters()
        for counted in self._counters:
            counters.add(counted)
        spent = [votes.as_dict() for votes in self._votes]
        self.intervals.append(
            {
                "step": len(self.steps),
                "counters": counters.as_dict(),
                "agreement": {
                    name: sum(votes[name] for votes in spent) for name in AgreementTime().as_dict()
                },
                "memory": memory(),
            }
        )

    def _write_when_due(self) -> None:
        """Write during a run, for at most a hundredth of its time.

        All ranks wait for a rank that writes. So ranks write at the same times of the wall clock,
        which come between the same steps; one with longer pauses leaves some of them out.
        """
        if self._pause is None or time.time() < self._next_write:
            return
        start, pause = time.perf_counter(), self._pause or 1e-3
        self._save()
        while pause < 100 * (time.perf_counter() - start):
            pause *= 2
        self._next_write = _next(pause)

    def finish(self, model: list[Any]) -> None:
        """Record the parameter shards of every model chunk and the peak memory, and write."""
        steps, row = len(self.steps), self.intervals.last
        if steps and (row is None or row["step"] != steps):
            self._add_interval()
        for index, chunk in enumerate(model if self._digests else ()):
            for name, digest in parameter_digests(chunk).items():
                self.data["parameters"][name if len(model) == 1 else f"{index}:{name}"] = digest
        if torch.cuda.is_available():
            self.data["peak_allocated_bytes"] = torch.cuda.max_memory_allocated()
            self.data["peak_reserved_bytes"] = torch.cuda.max_memory_reserved()
        self.data["finished"] = True
        self.write()

    def write(self) -> None:
        """Write ``rank<N>.json`` after training; a later note writes it again."""
        self._ended = True
        self._save()

    def _save(self) -> None:
        """Write the file as it is now; a reader never sees a partial file.

        A full disk is logged once and ends no run: other ranks would wait for this one forever,
        and the checkpoint after training would be lost.
        """
        rank = int(os.environ.get("RANK", "0"))
        # Without indent, which is ten times as slow. A path may have bytes that are no UTF-8.
        text = json.dumps({"rank": rank, **self.data}, ensure_ascii=False).removesuffix("}")
        text += f', "steps": {self.steps.text()}, "intervals": {self.intervals.text()}}}'
        text = text.encode("utf-8", "replace").decode()
        try:
            write_text(self.directory / f"rank{rank}.json", text)
        except OSError as error:
            if not self._told:
                # Before the warning, which becomes an event of this record.
                self._told = True
                reason = f"{error.filename} cannot be written: {error.strerror}"
                logger.warning("megatron_cg: %s. Training goes on; later writes try again.", reason)


def _next(pause: float) -> float:
    """The next time of the wall clock that is a multiple of ``pause``."""
    now = time.time()
    return (now // pause + 1) * pause if pause else now


def exact(value: Any) -> dict[str, Any]:
    """A number as ``{"hex", "value"}``: ``float.hex`` keeps every bit; the decimal is for readers.

    ``value`` is a Python number or a tensor of one element, of any float type (a Python float holds
    all of them exactly). JSON has no NaN and no infinity, so their decimal is a string.
    """
    number = float(value)
    shown: float | str = number if math.isfinite(number) else str(number)
    return {"hex": number.hex(), "value": shown}
