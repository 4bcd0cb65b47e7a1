"""Measures one rank's steps kind by kind, and writes after each kind."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch

from megatron_cg.files import write_text
from megatron_cg.telemetry.machine_load import machine
from megatron_cg.tools.bench.measure import kinds
from megatron_cg.tools.bench.measure.captures import CaptureMeter
from megatron_cg.tools.bench.measure.device import synchronize
from megatron_cg.tools.bench.measure.kinds import Finish, Steps
from megatron_cg.tools.bench.measure.sampling import SUFFIX
from megatron_cg.tools.bench.measure.windows import TRACED, Windows
from megatron_cg.upstream.symbols import installed_version
from megatron_cg.version import __version__

FORMAT = 1
_PACKAGES = ("torch", "megatron-core", "megatron-fsdp", "transformer-engine", "mamba-ssm")


class Measurement:
    """Call :meth:`before_step` and :meth:`after_step` around each step, then :meth:`close`.

    Args:
        windows: which steps are measured, and how.
        directory: where ``rank<N>.json`` is written.
    """

    def __init__(self, windows: Windows, directory: Path) -> None:
        self._windows, self._directory = windows, directory
        self.meter = CaptureMeter(self._captured)
        """Measures captures; its counters are those of the timed steps too."""
        self._kinds = list(windows.kinds())
        self._rank = int(os.environ.get("RANK", "0"))
        self._step = 0
        self._kind = ""
        self._steps = Steps()
        self._finish: Finish | None = None
        self._loss: Any = None
        versions = {name: installed_version(name) for name in _PACKAGES}
        self.data: dict[str, Any] = {
            "format": FORMAT,
            "rank": self._rank,
            "versions": versions | {"megatron-cg": __version__},
            "device": machine(),
            "captures": [],
            "finished": False,
        }

    def before_step(self) -> None:
        """Begin the next step, and a new kind if one is due."""
        kind = self._kinds[self._step] if self._step < len(self._kinds) else ""
        if kind != self._kind:
            self._change_to(kind)
        self._step += 1
        self._steps.starts.append(time.perf_counter())

    def after_step(self, loss: Any = None) -> None:
        """End the step; ``loss`` is a number or a tensor of one element, read much later."""
        self._loss = loss

    def close(self) -> None:
        """End the last kind and write. Safe to call twice."""
        self._change_to("")
        self.data["finished"] = self._step >= len(self._kinds)
        self.write()

    def abandon(self, error: BaseException) -> None:
        """Write the finished kinds of steps; what the error ended is dropped."""
        self._finish = None
        self.data["error"] = f"{type(error).__name__}: {error}"
        self.write()

    def write(self) -> None:
        """Write ``rank<N>.json``; a reader never sees a partial file."""
        write_text(self._directory / f"rank{self._rank}.json", json.dumps(self.data, indent=1))

    def _captured(self, metrics: Mapping[str, Any]) -> None:
        """Record one capture and the number of steps before it."""
        self.data["captures"].append({"after_step": self._step, **metrics})

    def _change_to(self, kind: str) -> None:
        """Finish the steps of one kind, write what was measured, and begin those of another."""
        synchronize()
        if self._finish is not None:
            self._steps.end = time.perf_counter()
            found = self._finish(self._steps)
            if self._kind == "timed" and self._loss is not None:
                found["loss"] = float(self._loss)
            self.data[self._kind] = found
            self.write()
        self._kind, self._steps = kind, Steps()
        begin = self._measured().get(kind)
        self._finish = begin() if begin else None

    def _measured(self) -> dict[str, Callable[[], Finish]]:
        """How the steps of each kind are measured on this rank."""
        found: dict[str, Callable[[], Finish]] = {
            "timed": partial(kinds.timed, self.meter.counts),
            "probed": kinds.probed,
        }
        if self._rank == 0:
            path = self._directory / f"samples{SUFFIX}"
            found["sampled"] = partial(kinds.sampled, path, native=self._windows.native)
        if self._rank == 0 and torch.cuda.is_available():
            path = self._directory / "trace.json"
            found["profiled"] = partial(kinds.traced, path, host=True)
            if kinds.can_trace_device():
                path = self._directory / "device_trace.json"
                found[TRACED] = partial(kinds.traced, path, host=False)
        return found
