"""The fast path in a run without flags for it: eager runs, and runs on the tape.

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
"""The environment variable that is 1 where a run installs the fast path itself."""


def variable(fast_path: bool) -> dict[str, str]:
    """The environment of a run that installs the fast path itself, or does without."""
    return {VARIABLE: str(int(fast_path))}


def is_given(environment: Mapping[str, str] = os.environ) -> bool:
    """Whether this run was started to install the fast path itself."""
    return environment.get(VARIABLE) == "1"


class EagerFastPath:
    """Installs the fast path between two eager steps, as a capture would.

    Args:
        wanted: whether it is installed at all.
        warmup_steps: the number of steps before that, as many as runs with graphs train eagerly.
    """

    def __init__(self, wanted: bool, warmup_steps: int) -> None:
        self._wanted, self._steps_left = wanted, warmup_steps
        self._undo = ExitStack()

    def before_step(self, subject: Callable[[], tuple[nn.Module, Sequence[Any]]]) -> None:
        """Call before each step; ``subject`` returns the model and its optimizers."""
        if self._wanted and self._steps_left == 0:
            model, optimizers = subject()
            path = install(find_megatron_fsdp(model), optimizers=optimizers)
            self._undo.callback(path.close)
        self._steps_left -= 1

    def close(self) -> None:
        """Remove what was installed. Safe to call twice."""
        self._undo.close()
