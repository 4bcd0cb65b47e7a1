"""What a run trained, written as it was: losses, gradient norms and parameter shards.

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
import time
from collections.abc import Callable
from contextlib import ExitStack
from functools import wraps
from pathlib import Path
from typing import Any

import torch

from megatron_cg import __version__
from megatron_cg.align.shards import parameter_digests
from megatron_cg.undo import set_attribute
from megatron_cg.versions import changed, installed_version, lookup

_PACKAGE = "megatron-core"
_MODULE = "megatron.training.training"
_PACKAGES = ("torch", "megatron-core", "megatron-fsdp", "transformer-engine")
CAPTURED_AFTER = "captured_after_step"
_active: Recorder | None = None


def note(key: str, value: Any) -> None:
    """Put ``value``, anything JSON can hold, under ``key`` into this rank's record.

    Does nothing where nothing is recorded. A note that comes after training is written too.
    """
    if _active is not None:
        _active.note(key, value)


def note_capture() -> None:
    """Record after how many steps the graphs were captured; see :func:`note`."""
    if _active is not None:
        _active.note(CAPTURED_AFTER, len(_active.data["steps"]))


def install_recorder(directory: str | Path) -> Callable[[], None]:
    """Record the run of this process into ``directory/rank<N>.json``; returns the undo.

    The file is written when Megatron's ``train`` ends, by return, exception or ``sys.exit``.
    Raises UpstreamChangedError when ``train`` or ``train_step`` are not as we know them.
    """
    global _active
    recorder = Recorder(Path(directory))
    module = lookup(_PACKAGE, _MODULE, "the module of Megatron's training loop")
    train = _function("train", ("forward_step_func", "model"))
    evaluate = _function("evaluate", ("forward_step_func", "data_iterator", "model"))
    step = _function("train_step", ("forward_step_func", "data_iterator", "model", "optimizer"))
    with ExitStack() as stack:
        stack.callback(set_attribute(module, "train_step", recorder.wrap_step(step)))
        stack.callback(set_attribute(module, "train", recorder.wrap_train(train)))
        stack.callback(set_attribute(module, "evaluate", recorder.wrap_evaluate(evaluate)))
        undo = stack.pop_all()
    _active = recorder

    def uninstall() -> None:
        global _active
        undo.close()
        if _active is recorder:
            _active = None

    return uninstall


def _function(name: str, first_parameters: tuple[str, ...]) -> Callable[..., Any]:
    """Megatron's function of that name, whose parameters must begin with those given."""
    expected = f"a function of ({', '.join(first_parameters)}, ...)"
    found: Callable[..., Any] = lookup(_PACKAGE, f"{_MODULE}:{name}", expected)
    if tuple(inspect.signature(found).parameters)[: len(first_parameters)] != first_parameters:
        raise changed(_PACKAGE, f"{_MODULE}:{name}", expected)
    return found


class Recorder:
    """One rank's record, grown step by step and written to a file of its own."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._written = False
        self.data: dict[str, Any] = {
            "format": 1,
            "versions": {name: installed_version(name) for name in _PACKAGES}
            | {"megatron-cg": __version__},
            "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
            "finished": False,
            "error": None,
            "steps": [],
            "parameters": {},
            "graphs": None,
        }

    def note(self, key: str, value: Any) -> None:
        """Set ``key``; a file that was already written is written again."""
        self.data[key] = value
        if self._written:
            self.write()

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

    def finish(self, model: list[Any]) -> None:
        """Record the parameter shards of every model chunk and the peak memory, and write."""
        for index, chunk in enumerate(model):
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
        self.directory.mkdir(parents=True, exist_ok=True)
        path = self.directory / f"rank{rank}.json"
        part = path.with_suffix(".part")
        part.write_text(json.dumps({"rank": rank, **self.data}, indent=1), encoding="utf-8")
        os.replace(part, path)
        self._written = True


def exact(value: Any) -> dict[str, Any]:
    """A number as ``{"hex", "value"}``: ``float.hex`` keeps every bit, and the decimal is to read.

    ``value`` is a Python number or a tensor of one element, of any float type (all are exact in
    a Python float). JSON has no NaN and no infinity, so their decimal is a string.
    """
    number = float(value)
    shown: float | str = number if math.isfinite(number) else str(number)
    return {"hex": number.hex(), "value": shown}
