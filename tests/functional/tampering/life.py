"""What happens to a run between its steps, and ways in which it ends early."""

import atexit
import gc
import os
import signal
import sys
from collections.abc import Callable, Iterable
from typing import Any

import torch

from megatron_cg.capture import session
from megatron_cg.replay.mismatch_policy import Counters
from megatron_cg.telemetry import graphs_deleted, note
from megatron_cg.upstream.patch import replace_function
from tests.functional.tampering.places import ForcedError, before_capture, before_steps, rank

LAST = 1
"""The rank to which things happen that happen to one only."""


def sessions_open(when: str) -> None:
    """Print how many models have graphs; one write, so that ranks do not mix their lines."""
    sys.stdout.write(f"rank {rank()}: {session.open_sessions()} sessions open {when}\n")
    sys.stdout.flush()


def _fail(step: int) -> None:
    raise ForcedError(f"forced before step {step}")


ENDS: dict[str, tuple[Callable[[int], object], bool]] = {
    "raise": (_fail, True),  # The others then wait for it in a collective.
    "exit": (lambda _: sys.exit(0), False),
    "kill": (lambda _: os.kill(os.getpid(), signal.SIGKILL), True),  # As without memory.
    "signal": (lambda _: os.kill(os.getpid(), signal.SIGTERM), True),  # As a scheduler does.
    "destroy": (lambda _: sys.exit(), False),  # Then, with graphs alive, groups are destroyed.
}
"""What ends a run before a step, by name, and whether it happens to one rank alone."""


def end_at(name: str, number: str) -> None:
    end, alone = ENDS[name]

    def act(step: int, _model: Any) -> None:
        if step == int(number) and (rank() == LAST or not alone):
            sessions_open(f"before step {step}")
            end(step)

    atexit.register(sessions_open, "at exit")
    before_steps(act)


def destroy_groups() -> None:
    sessions_open("before destroying the groups")
    torch.distributed.destroy_process_group()
    sessions_open("after destroying the groups")
    note("groups destroyed", True)


def captured_again_before(steps: Iterable[int]) -> None:
    """Delete the graphs before each of these steps and capture them again; note what each did."""
    sessions: list[dict[str, int]] = []

    def deleted(counters: Counters, total: Counters) -> None:
        graphs_deleted(counters, total)
        sessions.append(counters.as_dict())
        note("sessions", sessions)

    replace_function(session, "graphs_deleted", deleted)
    _capture_before(steps, 1)


def capture_often(count: int, step: int = 6) -> None:
    """Before that step, delete the graphs and capture again so often; note the GPU's memory.

    What is noted after each capture are the bytes that torch has allocated and those that it has
    reserved, once it has given back what nobody uses.
    """
    memory: list[tuple[int, int]] = []

    def used() -> None:
        gc.collect()
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        memory.append((torch.cuda.memory_allocated(), torch.cuda.memory_reserved()))
        note("memory", memory)

    _capture_before([step], count, used)


def _capture_before(steps: Iterable[int], times: int, then: Callable[[], object] = int) -> None:
    wanted, helpers = set(steps), list[Any]()

    def again(step: int, _model: Any) -> None:
        for _ in range(times) if step in wanted and helpers else ():
            helpers[0].controller.delete()
            helpers[0].controller.capture()
            then()

    before_capture(helpers.append)
    before_steps(again)
