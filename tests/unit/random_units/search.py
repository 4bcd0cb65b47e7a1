"""Tries many programs, in several processes."""

import faulthandler
import logging
import multiprocessing
import os
import warnings
from collections.abc import Iterator, Sequence
from contextlib import redirect_stdout
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch

from tests.unit.random_units.programs import Program, draw
from tests.unit.random_units.training import Outcome, outcome_of

LIMIT = 600
"""Seconds until a program hangs."""


def _work(given: list[int | Program], sent: Connection) -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    logging.disable()
    with Path(os.devnull).open("w") as unread, redirect_stdout(unread):  # of captures
        for one in given:
            faulthandler.dump_traceback_later(LIMIT, exit=True)
            sent.send((one, *outcome_of(one, sent.send)))


def outcomes(
    given: Sequence[int | Program], jobs: int
) -> Iterator[tuple[int | Program, Program, Outcome]]:
    """Seed, program and outcome of all, of so many processes; a dead one is replaced."""
    context = multiprocessing.get_context("spawn")
    running: dict[Any, tuple[Any, list[int | Program]]] = {}
    graphed: dict[Any, Program] = {}
    """By pipe, the program whose eager training is over."""

    def start(left: list[int | Program]) -> None:
        mine, theirs = context.Pipe(duplex=False)
        worker = context.Process(target=_work, args=(left, theirs), daemon=True)
        worker.start()
        theirs.close()
        running[mine] = worker, left

    for job in range(min(jobs, len(given))):
        start([*given[job::jobs]])
    while running:
        pipe: Any
        for pipe in wait([*running]):
            worker, left = running[pipe]
            try:
                received = pipe.recv()
                if isinstance(received, Program):
                    graphed[pipe] = received
                    continue
                yield received
                del left[0]
                graphed.pop(pipe, None)
            except EOFError:
                del running[pipe]
                worker.join()
                if left:
                    kind = "hanging" if worker.exitcode == 1 else "crashed"
                    one = left[0]
                    program = graphed.get(pipe) or (one if isinstance(one, Program) else draw(one))
                    kind = kind if pipe in graphed else "not eager"  # torch's fault
                    yield one, program, Outcome(kind, f"its process ended with {worker.exitcode}")
                if left[1:]:
                    start(left[1:])
