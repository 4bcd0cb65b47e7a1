"""What a function returns in each of several processes, and whether a process ends."""

import json
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch.distributed as dist

from megatron_cg.tools.cpu.launch import run_processes


def on_ranks(body: Callable[[], Any], processes: int = 2) -> list[Any]:
    """What ``body`` returned in each process of ``run_processes``, by rank, in JSON's types."""
    with tempfile.TemporaryDirectory(prefix="megatron-cg-") as folder:
        files = [Path(folder, f"{rank}.json") for rank in range(processes)]
        run_processes(partial(_keep_result, body, files), processes)
        return [json.loads(file.read_text()) for file in files]


def _keep_result(body: Callable[[], Any], files: list[Path]) -> None:
    file = files[dist.get_rank()]
    file.write_text(json.dumps(body()))


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
