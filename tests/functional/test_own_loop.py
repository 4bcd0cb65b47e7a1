"""Loops on megatron-core's classes alone train the same losses and norms with graphs.

One set of two processes trains each group of ``loops.py``, and each of its runs is a test.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from filelock import FileLock

from tests.functional.conftest import GPUS, skip_without, torchrun
from tests.functional.loops import EAGER, GROUPS, MICROBATCHES, STEPS, WARMUP, Group, Run

Results = dict[str, dict[str, Any]]

CASES = [
    pytest.param(group, run, id=f"{group.name}-{run.name}")
    for group in GROUPS.values()
    for run in group.runs()
    if run.driver != EAGER
]


@pytest.fixture(scope="module")
def results(shared: Path) -> Callable[[Group], list[Results]]:
    """What each rank trained in a group's runs, which are started when first asked for.

    Once for all of pytest's processes, where there are several.
    """

    def results_of(group: Group) -> list[Results]:
        directory = shared / f"own-loop-{group.name}"
        directory.mkdir(exist_ok=True)
        with FileLock(directory / "lock"):
            if not (directory / "log.txt").exists():
                script = ["-m", "tests.functional.own_loop", group.name, str(directory)]
                torchrun(script, directory)
        return read(group, directory)

    return results_of


def read(group: Group, directory: Path) -> list[Results]:
    """What each rank wrote; a run without a result has the end of the log as its error."""
    tail = (directory / "log.txt").read_text(errors="replace")[-8000:]
    files = [directory / f"rank{rank}.json" for rank in range(GPUS)]
    found = [json.loads(file.read_text()) if file.exists() else {} for file in files]
    for result in found:
        for run in group.runs():
            result.setdefault(run.name, {"error": f"the run has no result; the log ends:\n{tail}"})
    return found


@pytest.mark.parametrize(("group", "run"), CASES)
def test_losses_and_gradient_norms_are_equal_to_eager(
    group: Group, run: Run, results: Callable[[Group], list[Results]]
) -> None:
    skip_without(GPUS)
    if group.lacks:
        pytest.skip(group.lacks)
    for found in results(group):
        check(group, found[Run(run.dtype).name], found[run.name], STEPS)


def check(group: Group, eager: dict[str, Any], graphs: dict[str, Any], steps: int) -> None:
    """Both trained every step, to the same bits, and each graph was replayed in each pass.

    With a bound of rows some steps were repeated eagerly, and only these. With a stash there was
    memory for the rows that were kept.
    """
    assert "error" not in eager, eager["error"]
    assert "error" not in graphs, graphs["error"]
    for name in ("losses", "norms"):
        assert len(eager[name]) == steps and len(set(eager[name])) == steps
        assert graphs[name] == eager[name]
    counts = graphs["graphs"]
    replays = counts["captured"] * (steps - WARMUP) * MICROBATCHES
    assert counts["captured"] > 0 and counts["replayed"] == replays
    assert (counts["repeated"] > 0) == (group.moe_rows is not None)
    assert (graphs["kept"] > 0) == (group.moe_stash is not None)
    eager_passes = counts["captured"] * counts["repeated"] * MICROBATCHES
    assert counts["eager"] == eager_passes and counts["mismatched"] == 0
    # A step beyond the bound is repeated and not compared.
    assert counts["steps_verified"] + counts["repeated"] > 0 == counts["steps_differed"]
