"""Counters of graphs in Megatron's log, in TensorBoard and in Weights & Biases.

Megatron looks up ``training_log`` as a global of its module after each step. Its parameter
``iteration`` counts steps from 1. ``is_first_iteration`` is set when Megatron prints the line of
the first step, whatever ``--log-interval``. Megatron prints with ``print_rank_last``, on the rank
that also has the writers of ``megatron.training.global_vars``; they are None on other ranks and
when they are disabled.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any, Protocol

from megatron_cg.consensus.agreement_time import AgreementTime
from megatron_cg.replay.counters import Counters
from megatron_cg.telemetry.record import note_step
from megatron_cg.telemetry.step_phases import StepPhases
from megatron_cg.upstream.patch import put_over
from megatron_cg.upstream.symbols import Symbol

_TRAINING = "megatron.training.training"
_VARIABLES = "megatron.training.global_vars"
_LOG = Symbol(
    "megatron-core",
    f"{_TRAINING}:training_log",
    "what logs after each step",
    parameters=("iteration", "is_first_iteration"),
)
_PRINT = Symbol("megatron-core", f"{_TRAINING}:print_rank_last", "what prints a line of the log")
_ARGS = Symbol("megatron-core", f"{_VARIABLES}:get_args", "the run's arguments")
_TENSORBOARD = Symbol("megatron-core", f"{_VARIABLES}:get_tensorboard_writer", "a writer or None")
_WANDB = Symbol("megatron-core", f"{_VARIABLES}:get_wandb_writer", "a writer or None")
RELIES_ON = (_LOG, _PRINT, _ARGS, _TENSORBOARD, _WANDB)

_COUNTS = ("captured", "replayed", "eager", "mismatched", "recaptured", "verified")
_REPEATED = "repeated"
_COPIES = ("inputs_copied", "bytes_copied")
_TIMES = ("waiting_ms", "exchanging_ms")
Totals = dict[str, float]


class Counted(Protocol):
    """The graphs of one model, as far as they are counted."""

    def counted(self) -> tuple[Counters, AgreementTime]:
        """All counts so far, and what votes cost."""


def follow_log(helpers: Sequence[Counted]) -> Callable[[], None]:
    """Show the counters of ``helpers`` in Megatron's log and writers; returns the undo.

    ``helpers`` is read again at each step. If it is empty, only the phases of steps are recorded.
    Raises UpstreamChangedError when a function of Megatron is not as relied on.
    """
    old = _LOG.find()
    signature = inspect.signature(old)
    log = _Log(helpers)

    @wraps(old)
    def training_log(*args: Any, **kwargs: Any) -> Any:
        given = signature.bind(*args, **kwargs).arguments
        log.before()
        result = old(*args, **kwargs)
        # Megatron prints an extra line for the first step; ours follows the interval only.
        log.after(int(given["iteration"]))
        return result

    return put_over(*_LOG.place(), training_log)


class _Log:
    def __init__(self, helpers: Sequence[Counted]) -> None:
        self._helpers = helpers
        self._phases = StepPhases()
        self._last: Totals = {}
        self._args, self._print = _ARGS.find(), _PRINT.find()
        self._tensorboard, self._wandb = _TENSORBOARD.find(), _WANDB.find()

    def before(self) -> None:
        """Runs before Megatron resets its timers."""
        phases = self._phases.of_last_step()
        if phases:
            note_step("phases", phases)

    def after(self, iteration: int) -> None:
        """Write and print the lines that are due after that step."""
        if not self._helpers:
            return
        args = self._args()
        tensorboard, wandb = self._tensorboard(), self._wandb()
        write = (tensorboard or wandb) and iteration % args.tensorboard_log_interval == 0
        show = iteration % args.log_interval == 0
        if not (write or show):
            return
        now = totals([helper.counted() for helper in self._helpers])
        if write:
            values = {f"megatron_cg/{name}": value for name, value in now.items()}
            for name, value in values.items() if tensorboard else ():
                tensorboard.add_scalar(name, value, iteration)
            if wandb:
                wandb.log(values, iteration)
        if show and now["captured"]:
            self._print(log_line(self._last, now))
            self._last = now


def totals(counted: Sequence[tuple[Counters, AgreementTime]]) -> Totals:
    """The values to show, by name, summed over models: since the run began, on this rank.

    Repeated steps are among them once there are any.
    """
    found: Totals = dict.fromkeys((*_COUNTS, _REPEATED, *_COPIES, *_TIMES), 0)
    for counters, votes in counted:
        for name, value in (counters.as_dict() | votes.as_dict()).items():
            if name in found:
                found[name] += value
    if not found[_REPEATED]:
        del found[_REPEATED]
    return found


def log_line(last: Totals, now: Totals) -> str:
    """One line in Megatron's format: the increments since the previous line, on this rank."""
    new = {name: value - last.get(name, 0) for name, value in now.items()}
    counts = " | ".join(f"{name}: {new[name]:.0f}" for name in _COUNTS)
    if _REPEATED in new:
        counts += f" | {_REPEATED}: {new[_REPEATED]:.0f}"
    copied = f"copied: {new['inputs_copied']:.0f} tensors, {new['bytes_copied'] / 2**20:.1f} MiB"
    votes = f"votes (ms): {new['waiting_ms']:.1f} waiting, {new['exchanging_ms']:.1f} exchanging"
    return f" megatron_cg | {counts} | {copied} | {votes} |"
