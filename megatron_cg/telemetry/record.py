"""What a run trained, written as it was: losses, gradient norms and parameter shards.

And how it came to that, for ``megatron-cg report``: counters and memory by step, machine, command
line and environment, and whatever the rest of this package notes of its captures.

Relied on: megatron-core 0.19.2, ``megatron.training.training``: ``train``, ``train_step`` and
``evaluate``, looked up as globals of that module when they are called; ``train_step`` gives eight
values, of which the loss dictionary is the first, ``skipped_iter`` the second and the gradient norm
the sixth; the first value of ``evaluate`` is a dictionary of losses.

The recorder reads values after the step has returned and adds nothing to the device's work before
that, so it cannot change what it records. ``train_step`` itself ends by waiting for the gradient
norm, so the wall clock around it is the step's time and no more waiting is needed.
"""

from __future__ import annotations

import inspect
import json
import math
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import wraps
from pathlib import Path
from typing import Any

import torch

from megatron_cg.consensus.exchange import AgreementTime
from megatron_cg.files import write_text
from megatron_cg.replay.counters import Counters
from megatron_cg.telemetry.machine_load import machine, variables
from megatron_cg.telemetry.memory_lines import memory
from megatron_cg.telemetry.record_schema import CAPTURED_AFTER, FORMAT
from megatron_cg.telemetry.record_setup import Setup, of_megatron
from megatron_cg.telemetry.record_shards import parameter_digests
from megatron_cg.telemetry.warnings_heard import listening
from megatron_cg.upstream.patch import put_over
from megatron_cg.upstream.symbols import Symbol, changed, installed_version
from megatron_cg.version import __version__

_PACKAGE = "megatron-core"
_MODULE = "megatron.training.training"
_PACKAGES = ("torch", "megatron-core", "megatron-fsdp", "transformer-engine")
_LOOP = Symbol(_PACKAGE, _MODULE, "the module of Megatron's training loop")
_TRAIN, _EVALUATE, _STEP = (
    Symbol(_PACKAGE, f"{_MODULE}:{name}", "a function of Megatron's loop", parameters=parameters)
    for name, parameters in (
        ("train", ("forward_step_func", "model")),
        ("evaluate", ("forward_step_func", "data_iterator", "model")),
        ("train_step", ("forward_step_func", "data_iterator", "model", "optimizer")),
    )
)
RELIES_ON = (_LOOP, _TRAIN, _EVALUATE, _STEP)
_active: list[Recorder] = []


def note(key: str, value: Any) -> None:
    """Put ``value``, anything JSON can hold, under ``key`` into this rank's record.

    Does nothing where nothing is recorded. A note that comes after training is written too.
    """
    for recorder in _active:
        recorder.note(key, value)


def note_capture() -> None:
    """Record after how many steps graphs were captured for the first time; see :func:`note`."""
    for recorder in _active:
        if CAPTURED_AFTER not in recorder.data:
            recorder.note(CAPTURED_AFTER, len(recorder.data["steps"]))


def note_step(key: str, value: Any) -> None:
    """Put ``value`` under ``key`` into the step that was trained last; see :func:`note`."""
    for recorder in _active:
        if recorder.data["steps"]:
            recorder.data["steps"][-1][key] = value


def add_capture(capture: dict[str, Any]) -> None:
    """Add what one capture was like, and the number of steps trained before it."""
    for recorder in _active:
        steps = len(recorder.data["steps"])
        recorder.note("captures", [*recorder.data["captures"], {"after_step": steps, **capture}])


def follow(counters: Counters, votes: AgreementTime | None) -> None:
    """Let records show, from now on, how these counts of one session and its votes grow."""
    for recorder in _active:
        recorder.follow(counters, votes)


@contextmanager
def recording(recorder: Recorder) -> Iterator[None]:
    """Let notes of this process, and the warnings of this package, reach ``recorder``."""
    with listening(recorder.add_event):
        _active.append(recorder)
        try:
            yield
        finally:
            _active.remove(recorder)


def install_recorder(directory: str | Path, **options: Any) -> Callable[[], None]:
    """Record the run of this process into ``directory/rank<N>.json``; returns the undo.

    The file is written when Megatron's ``train`` ends, by return, exception or ``sys.exit``.
    ``options`` are those of :class:`Recorder`.
    Raises UpstreamChangedError when ``train`` or ``train_step`` are not as we know them.
    """
    recorder = Recorder(Path(directory), **options)
    module = _LOOP.find()
    train, evaluate, step = _TRAIN.find(), _EVALUATE.find(), _STEP.find()
    with ExitStack() as stack:
        stack.callback(put_over(module, "train_step", recorder.wrap_step(step)))
        stack.callback(put_over(module, "train", recorder.wrap_train(train)))
        stack.callback(put_over(module, "evaluate", recorder.wrap_evaluate(evaluate)))
        stack.enter_context(recording(recorder))
        return stack.pop_all().close


class Recorder:
    """One rank's record, grown step by step and written to a file of its own.

    Args:
        directory: where ``rank<N>.json`` is written.
        digests: whether every parameter shard is read at the end, which a comparison needs.
        interval: steps between two rows of counters and memory.
        write_seconds: at least so many seconds lie between two writes in the course of a run;
            None writes at its end only.
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
        self._pause, self._next_write = write_seconds, time.monotonic() + (write_seconds or 0.0)
        self._counters: list[Counters] = []
        self._votes: list[AgreementTime] = []
        self._written = False
        self.data: dict[str, Any] = {
            "format": FORMAT,
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
            "steps": [],
            "parameters": {},
            "graphs": None,
            "captures": [],
            "intervals": [],
            "events": [],
        }

    def note(self, key: str, value: Any) -> None:
        """Set ``key``; a file that was already written is written again."""
        self.data[key] = value
        if self._written:
            self.write()

    def describe(self, setup: Setup) -> None:
        """Record what is trained; nothing else distinguishes it from a run of another model."""
        self.data["setup"] = setup

    def follow(self, counters: Counters, votes: AgreementTime | None) -> None:
        """Count these in every row of counters from now on; sessions may share their votes."""
        self._counters.append(counters)
        if votes is not None and not any(known is votes for known in self._votes):
            self._votes.append(votes)

    def add_event(self, level: str, text: str) -> None:
        """Add something that a reader should know, and how many steps were trained before it."""
        event = {"after_step": len(self.data["steps"]), "level": level, "text": text}
        self.note("events", [*self.data["events"], event])

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
        """``evaluate`` whose losses are put beside those of the step that was trained last."""

        @wraps(evaluate)
        def recorded_evaluate(*args: Any, **kwargs: Any) -> Any:
            result = evaluate(*args, **kwargs)
            if self.data["steps"] and result[0]:
                losses = {f"evaluation {name}": exact(value) for name, value in result[0].items()}
                self.data["steps"][-1]["losses"].update(losses)
            return result

        return recorded_evaluate

    def wrap_train(self, train: Callable[..., Any]) -> Callable[..., Any]:
        """``train`` that ends by recording the parameters and writing the file."""

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
        """Append one step; ``start`` is ``time.perf_counter()`` from when it began."""
        values = {name: exact(value) for name, value in losses.items()}
        self.data["steps"].append(
            {
                "losses": values,
                "grad_norm": None if grad_norm is None else exact(grad_norm),
                "skipped": skipped,
                "milliseconds": (time.perf_counter() - start) * 1e3,
            }
        )
        if len(self.data["steps"]) % self._interval == 0:
            self._add_interval()
            self._write_when_due()

    def _add_interval(self) -> None:
        """Append all counts and the memory after the step that was trained last."""
        counters = Counters()
        for counted in self._counters:
            counters.add(counted)
        spent = [votes.as_dict() for votes in self._votes]
        self.data["intervals"].append(
            {
                "step": len(self.data["steps"]),
                "counters": counters.as_dict(),
                "agreement": {
                    name: sum(votes[name] for votes in spent) for name in AgreementTime().as_dict()
                },
                "memory": memory(),
            }
        )

    def _write_when_due(self) -> None:
        """Write in the course of a run, for at most a hundredth of its time."""
        if self._pause is None or (start := time.monotonic()) < self._next_write:
            return
        self.write()
        end = time.monotonic()
        self._next_write = end + max(self._pause, 100 * (end - start))

    def finish(self, model: list[Any]) -> None:
        """Record the parameter shards of every model chunk and the peak memory, and write."""
        rows, steps = self.data["intervals"], len(self.data["steps"])
        if steps and (not rows or rows[-1]["step"] != steps):
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
        """Write ``rank<N>.json``; a reader never sees half a file."""
        rank = int(os.environ.get("RANK", "0"))
        text = json.dumps({"rank": rank, **self.data}, indent=1)
        write_text(self.directory / f"rank{rank}.json", text)
        self._written = True


def exact(value: Any) -> dict[str, Any]:
    """A number as ``{"hex", "value"}``: ``float.hex`` keeps every bit, and the decimal is to read.

    ``value`` is a Python number or a tensor of one element, of any float type (all are exact in
    a Python float). JSON has no NaN and no infinity, so their decimal is a string.
    """
    number = float(value)
    shown: float | str = number if math.isfinite(number) else str(number)
    return {"hex": number.hex(), "value": shown}
