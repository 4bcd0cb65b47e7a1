"""The parts of the fast path in a run without flags for them: eager runs, and runs on the tape.

An eager run gets the fast path as a baseline: what graphs bring by themselves is the difference
between it and a run with graphs. No flag turns this on, since the votes of a session guard the
fast path of a user's run.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from typing import Any

from torch import nn

from megatron_cg.fastpath import install
from megatron_cg.fsdp.fsdp_model import find_megatron_fsdp

VARIABLE = "MEGATRON_CG_BENCH_FAST_PATH"
"""The environment variable that names the parts, separated by commas."""


def variable(parts: Sequence[str]) -> dict[str, str]:
    """The environment of a run that installs ``parts`` itself."""
    return {VARIABLE: ",".join(parts)}


def given_parts(environment: Mapping[str, str] = os.environ) -> tuple[str, ...]:
    """The parts that this run was started with; empty for none."""
    return tuple(filter(None, environment.get(VARIABLE, "").split(",")))


class EagerFastPath:
    """Installs parts of the fast path between two eager steps, as a capture would.

    Args:
        parts: what to install; nothing if empty.
        warmup_steps: the number of steps before that, as many as runs with graphs train eagerly.
    """

    def __init__(self, parts: Sequence[str], warmup_steps: int) -> None:
        self._parts, self._steps_left = tuple(parts), warmup_steps
        self._undo = ExitStack()

    def before_step(self, subject: Callable[[], tuple[nn.Module, Sequence[Any]]]) -> None:
        """Call before each step; ``subject`` returns the model and its optimizers."""
        if self._parts and self._steps_left == 0:
            model, optimizers = subject()
            path = install(find_megatron_fsdp(model), optimizers=optimizers, parts=self._parts)
            self._undo.callback(path.close)
        self._steps_left -= 1

    def close(self) -> None:
        """Remove what was installed. Safe to call twice."""
        self._undo.close()
