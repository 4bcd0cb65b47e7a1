"""What a function returns in each of several processes, and how processes end."""

import faulthandler
import json
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch.distributed as dist
from torch.multiprocessing.spawn import ProcessRaisedException

from megatron_cg.consensus import exchange
from megatron_cg.tape.launch import run_processes

HANGS_AFTER = 900.0
"""Seconds after which a process that waits for another is ended, with where it waits."""


def on_ranks(body: Callable[[], Any], processes: int = 2) -> list[Any]:
    """What ``body`` returned in each process of ``run_processes``, by rank, in JSON's types."""
    with tempfile.TemporaryDirectory(prefix="megatron-cg-") as folder:
        files = [Path(folder, f"{rank}.json") for rank in range(processes)]
        run_processes(partial(_keep_result, body, files), processes)
        return [json.loads(file.read_text()) for file in files]


def _keep_result(body: Callable[[], Any], files: list[Path]) -> None:
    faulthandler.dump_traceback_later(HANGS_AFTER, exit=True)
    files[dist.get_rank()].write_text(json.dumps(body()))


def ended(body: Callable[[], Any], error: type[Exception] = Exception) -> dict[int, str]:
    """By rank the traces of such errors, of two processes of which one at least raises.

    And what ``body`` returned, if it did so before the other process ended this one too.
    """
    with tempfile.TemporaryDirectory(prefix="megatron-cg-") as folder:
        with pytest.raises(ProcessRaisedException):
            run_processes(partial(_keep_end, body, error, Path(folder)))
        return {int(file.name): file.read_text() for file in Path(folder).iterdir()}


def _keep_end(body: Callable[[], Any], error: type[Exception], folder: Path) -> None:
    file = folder / str(dist.get_rank())
    faulthandler.dump_traceback_later(HANGS_AFTER, exit=True)
    try:
        file.write_text(str(body()))
    except error:
        file.write_text(traceback.format_exc())
        raise


@contextmanager
def soon_over() -> Iterator[None]:
    """A vote to which a rank does not come is over in three seconds."""
    soon = timedelta(seconds=3)
    with patch.object(exchange, "FALLING_BACK", soon), patch.object(exchange, "TIMEOUT", soon):
        yield


def ends(pid: int) -> bool:
    """Whether a process ends within five minutes; it may still be waited for, see proc(5)."""
    deadline = time.monotonic() + 300
    while time.monotonic() < deadline:
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except OSError:
            return True
        if state == "Z":
            return True
        time.sleep(0.05)
    return False
