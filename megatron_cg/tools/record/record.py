"""Records what a run trained, bit for bit: losses, gradient norms and parameter shards.

There are also step times, counters and captures. ``compare.py`` has the format.

Megatron looks up ``train``, ``train_step`` and ``evaluate`` as globals of their module for each
call; Megatron-Bridge (0.6.2) does so in several modules, for ``train_step`` once when ``train``
begins. ``train_step`` returns eight values: the first is the loss dictionary, the second
``skipped_iter`` and the sixth the gradient norm. The first of ``evaluate`` is such a dictionary.

The recorder reads values after the step returns, so it cannot change what it records. A step's time
ends when its losses are read, which waits for the optimizer. Python writes a float with as many
digits as it takes to read the same bits back; a float holds any value of a smaller type.
"""

import hashlib
import inspect
import json
import logging
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from datetime import UTC, datetime
from itertools import chain
from pathlib import Path
from typing import Any, Literal, TextIO

import torch
from torch import nn

from megatron_cg.arguments.schema import PACKAGES
from megatron_cg.fsdp.roles import fsdp_class
from megatron_cg.fsdp.sharding import find_megatron_fsdp
from megatron_cg.replay.borders import local
from megatron_cg.replay.verify import bytes_of
from megatron_cg.telemetry import record_to
from megatron_cg.tools.record.compare import FORMAT
from megatron_cg.upstream.patch import Undo, combined_undo, run_instead
from megatron_cg.upstream.symbols import Symbol, changed, installed_version
from megatron_cg.version import __version__

logger = logging.getLogger(__name__)

_BUFFERS = {kind: f"{kind}_weight_buffer" for kind in ("main", "model", "transpose")}


def parameter_digests(model: nn.Module) -> dict[str, str]:
    """SHA-256 of this rank's shard of every parameter, by ``<weights>:<parameter name>``.

    Under Megatron-FSDP the weights are ``main`` (updated by the optimizer), ``model`` (used by the
    layers) and, with FP8 parameters, ``transpose``. Without Megatron-FSDP, and for parameters that
    are not sharded, they are ``parameter``. Waits for the device.
    """
    if torch.cuda.is_available():
        # If weights are not sharded, the last step's all-gather may still be in flight on its own
        # stream.
        torch.cuda.synchronize()
    fsdp: Any = find_megatron_fsdp(model)
    if fsdp is None:
        return {f"parameter:{name}": digest(value) for name, value in model.named_parameters()}
    buffer = fsdp.param_and_grad_buffer
    digests: dict[str, str] = {}
    for group in buffer.parameter_groups:
        kinds = {kind: getattr(group, name) for kind, name in _BUFFERS.items()}
        present = {kind: weights for kind, weights in kinds.items() if weights is not None}
        # If only some of a group's weights are sharded (ZeRO-1 and 2), the others also hold copies
        # of weights of other ranks, which the next all-gather renews: their state is random.
        only_own = any(weights.is_data_distributed for weights in present.values())
        for item, parameter in enumerate(group.params):
            name = buffer.param_to_name[parameter]
            if not present:
                digests[f"parameter:{name}"] = digest(parameter)
            for kind, weights in present.items():
                value = weights.get_item(item, only_shard=only_own)
                digests[f"{kind}:{name}"] = digest(value)
    return digests


def digest(tensor: torch.Tensor) -> str:
    """SHA-256 of dtype, shape and bytes, for any dtype and device."""
    value = local(tensor).detach().cpu()
    hashed = hashlib.sha256(f"{value.dtype} {tuple(value.shape)} ".encode())
    hashed.update(bytes_of(value).numpy().data)
    return hashed.hexdigest()


def _loop(train: str, step: str, evaluate: str) -> tuple[Symbol, ...]:
    model, what = ("forward_step_func", "data_iterator", "model"), "a function of the loop"
    return (
        Symbol(f"{train}:train", what, parameters=("forward_step_func", "model")),
        Symbol(f"{step}:train_step", what, parameters=(*model, "optimizer")),
        Symbol(f"{evaluate}:evaluate", what, parameters=model),
    )


LoopName = Literal["megatron", "bridge"]
_MEGATRON, _BRIDGE = "megatron.training.training", "megatron.bridge.training"
_LOOPS: Mapping[str, tuple[Symbol, ...]] = {
    "megatron": _loop(_MEGATRON, _MEGATRON, _MEGATRON),
    "bridge": _loop(f"{_BRIDGE}.pretrain", f"{_BRIDGE}.train", f"{_BRIDGE}.eval"),
}
RELIES_ON = (
    *chain(*_LOOPS.values()),
    *fsdp_class("ParamAndGradBuffer", "parameter_groups", "param_to_name"),
    *fsdp_class("ParameterGroup", "params", *_BUFFERS.values()),
    *fsdp_class("DataParallelBuffer", "get_item", "is_data_distributed"),
)


@combined_undo
def install_recorder(directory: str | Path, loop: LoopName = "megatron") -> Iterator[Undo]:
    """Record the run of this process into ``directory/rank<N>.jsonl``; returns the undo.

    Raises UpstreamChangedError when a function of ``loop`` is not as relied on.
    """
    recorder = Recorder(Path(directory))
    functions = (recorder.train, recorder.train_step, recorder.evaluate)
    for symbol, function in zip(_LOOPS[loop], functions, strict=True):
        yield run_instead(symbol, function)
    yield recorder.close
    yield record_to(recorder)


class Recorder:
    """The record of one rank; its file grows step by step, from the begin of training."""

    def __init__(self, directory: Path) -> None:
        rank = int(os.environ.get("RANK", "0"))
        self._path = directory / f"rank{rank}.jsonl"
        self._lines: list[str] = []
        self._has_begun = self._failed = False
        self._file: TextIO | None = None
        self._steps = 0
        self._add(
            format=FORMAT,
            rank=rank,
            world_size=int(os.environ.get("WORLD_SIZE", "1")),
            versions={name: installed_version(name) for name in PACKAGES}
            | {"megatron-cg": __version__},
            device=torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
            command=list(sys.argv),
        )

    def begin(self) -> None:
        self._has_begun = True
        self.note("began", datetime.now(UTC).isoformat(timespec="seconds"))

    def note(self, key: str, value: Any) -> None:
        self._add(**{key: value})

    def add_capture(self, capture: Mapping[str, Any]) -> None:
        """Add a capture, and the number of steps trained before it."""
        self.note("captures", [{"after_step": self._steps, **capture}])

    def train_step(self, step: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call ``step``, and add its loss, gradient norm and time to the record."""
        start = time.perf_counter()
        result = step(*args, **kwargs)
        if not isinstance(result, tuple) or len(result) != 8:
            of = Symbol(f"{step.__module__}:train_step", "what returns eight values")
            raise changed(of.distribution, of.path, of.expected)
        losses, skipped, grad_norm = result[0], result[1], result[5]
        self.add_step(losses, grad_norm, bool(skipped), start)
        return result

    def evaluate(self, evaluate: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call ``evaluate``, and store its losses with those of the last trained step."""
        result = evaluate(*args, **kwargs)
        if self._steps and result[0]:
            losses = {f"evaluation {name}": float(value) for name, value in result[0].items()}
            self.note("evaluation", losses)
        return result

    def train(self, train: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call ``train``; begin the file, and end it with the parameters or with the error."""
        model = inspect.signature(train).bind(*args, **kwargs).arguments["model"]
        self.begin()
        try:
            result = train(*args, **kwargs)
        except BaseException as error:
            self.finish(model) if isinstance(error, SystemExit) else self.fail(error)
            raise
        self.finish(model)
        return result

    def add_step(self, losses: dict[str, Any], grad_norm: Any, skipped: bool, start: float) -> None:
        """Add one step; ``start`` is the ``time.perf_counter()`` of its begin."""
        self._steps += 1
        step = {
            "losses": {name: float(value) for name, value in losses.items()},
            "grad_norm": None if grad_norm is None else float(grad_norm),
            "skipped": skipped,
            "milliseconds": (time.perf_counter() - start) * 1e3,
        }
        self._add(steps=[step])

    def finish(self, model: list[Any]) -> None:
        """Record the parameter shards of every model chunk."""
        for index, chunk in enumerate(model):
            prefix = "" if len(model) == 1 else f"{index}:"
            found = parameter_digests(chunk).items()
            self._add(parameters={f"{prefix}{name}": digest for name, digest in found})
        self._has_begun = True
        self._add(finished=True)

    def fail(self, error: BaseException) -> None:
        self._has_begun = True
        self._add(error=f"{type(error).__name__}: {error}")

    def close(self) -> None:
        if self._file is not None:
            with suppress(OSError):  # A full disk was told.
                self._file.close()

    def _add(self, **entry: Any) -> None:
        """Write a line, if training has begun; the first ones replace an older file.

        A full disk is logged once and ends no run: other ranks would wait for this one forever,
        and the checkpoint after training would be lost.
        """
        if self._failed:
            return
        self._lines.append(json.dumps(entry, ensure_ascii=False, default=str) + "\n")
        if not self._has_begun:
            return
        lines, self._lines = self._lines, []
        try:
            if self._file is None:
                self._path.parent.mkdir(parents=True, exist_ok=True)
                self._path.unlink(missing_ok=True)  # Also a link or a pipe that lies there.
                # A path in it may have bytes that are no UTF-8.
                self._file = self._path.open("a", encoding="utf-8", errors="replace")
            self._file.writelines(lines)
            self._file.flush()  # A killed run lacks nothing.
        except OSError as error:
            self._failed = True
            reason = f"{error.filename or self._path} cannot be written: {error.strerror}"
            logger.warning("megatron_cg: %s. Training goes on without a record.", reason)
