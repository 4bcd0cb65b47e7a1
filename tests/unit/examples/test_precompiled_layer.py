"""The example of precompiled code: saved by one process, trained with on two CPU ranks."""

from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from contextlib import redirect_stdout
from functools import partial
from multiprocessing import get_context
from pathlib import Path

import pytest
import torch.distributed as dist

from examples import precompiled_layer
from megatron_cg.tape import launch


def printed(folder: Path, body: Callable[[], None]) -> None:
    """Run in a process of several, whose output goes to a file of its rank's name."""
    with (folder / str(dist.get_rank())).open("w") as file, redirect_stdout(file):
        body()


def test_the_compiled_layers_train_as_the_eager_ones_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = launch.run_processes

    def trained(artifacts: Path) -> list[str]:
        with monkeypatch.context() as patch:
            patch.setattr(
                launch, "run_processes", lambda body: own(partial(printed, tmp_path, body))
            )
            precompiled_layer.main(["--load", str(artifacts)])
        return (tmp_path / "0").read_text().splitlines()

    # In a new process, as users run it: it changes settings of torch.
    with ProcessPoolExecutor(1, get_context("forkserver")) as pool:
        pool.submit(precompiled_layer.main, ["--save", str(tmp_path / "compiled")]).result()
    compiled, eager = trained(tmp_path / "compiled"), trained(tmp_path / "nothing")
    assert [line.partition(", ")[0] for line in compiled] == ["compiled"] * 3
    assert [line.partition(", ")[0] for line in eager] == ["eager"] * 3
    steps = [[line.partition(", ")[2] for line in lines] for lines in (compiled, eager)]
    assert steps[0] == steps[1] and len(set(steps[0])) == 3
