"""Counters of graphs in Megatron's log, in TensorBoard and in Weights & Biases.

Megatron looks up ``training_log`` as a global of its module after each step; its parameter
``iteration`` counts steps from 1. Megatron prints with ``print_rank_last``, on the rank that also
has the writers of ``megatron.training.global_vars``; they are None on other ranks and when they are
disabled.
"""

import inspect
from collections.abc import Callable, Sequence
from typing import Any

from megatron_cg.replay.mismatch_policy import Counters
from megatron_cg.upstream.patch import run_instead
from megatron_cg.upstream.symbols import Symbol

_TRAINING = "megatron.training.training"
_VARIABLES = "megatron.training.global_vars"
_LOG = Symbol(f"{_TRAINING}:training_log", "what logs after each step", parameters=("iteration",))
_PRINT = Symbol(f"{_TRAINING}:print_rank_last", "what prints a line of the log")
_ARGS = Symbol(f"{_VARIABLES}:get_args", "the run's arguments")
_TENSORBOARD = Symbol(f"{_VARIABLES}:get_tensorboard_writer", "a writer or None")
_WANDB = Symbol(f"{_VARIABLES}:get_wandb_writer", "a writer or None")
RELIES_ON = (_LOG, _PRINT, _ARGS, _TENSORBOARD, _WANDB)

_COUNTS = (
    *("captured", "replayed", "eager", "mismatched", "verified", "outputs_only"),
    *("gradients_unstable", "repeated", "steps_verified"),
)


def follow_log(counted: Callable[[], Sequence[Counters]]) -> Callable[[], None]:
    """Show counters in Megatron's log and writers; returns the undo.

    ``counted`` returns those of each model, at each step. Raises UpstreamChangedError when a
    function of Megatron is not as relied on.
    """
    signature = inspect.signature(_LOG.find())
    get_args, print_line = _ARGS.find(), _PRINT.find()
    get_tensorboard, get_wandb = _TENSORBOARD.find(), _WANDB.find()
    last: dict[str, int] = {}

    def log(training_log: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        result = training_log(*args, **kwargs)
        if counters := counted():
            show(counters, int(signature.bind(*args, **kwargs).arguments["iteration"]))
        return result

    def show(counters: Sequence[Counters], iteration: int) -> None:
        args, tensorboard, wandb = get_args(), get_tensorboard(), get_wandb()
        is_written = (tensorboard or wandb) and iteration % args.tensorboard_log_interval == 0
        is_printed = iteration % args.log_interval == 0
        if not (is_written or is_printed):
            return
        now = totals(counters)
        if is_written:
            values = {f"megatron_cg/{name}": value for name, value in now.items()}
            for name, value in values.items() if tensorboard else ():
                tensorboard.add_scalar(name, value, iteration)
            if wandb:
                wandb.log(values, iteration)
        if is_printed and now["captured"]:
            print_line(log_line(last, now))
            last.update(now)

    return run_instead(_LOG, log)


def totals(counted: Sequence[Counters]) -> dict[str, int]:
    """The values to show, by name, summed over models: since the run began, on this rank."""
    return {name: sum(getattr(counters, name) for counters in counted) for name in _COUNTS}


def log_line(last: dict[str, int], now: dict[str, int]) -> str:
    """One line in Megatron's format: the increments since the previous line, on this rank."""
    new = {name: value - last.get(name, 0) for name, value in now.items()}
    counts = " | ".join(f"{name.replace('_', ' ')}: {new[name]}" for name in _COUNTS)
    return f" megatron_cg | {counts} |"
