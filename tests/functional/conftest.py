"""What functional tests share: GPUs, or the reason to skip, and ways to run a case or a script."""

import faulthandler
import hashlib
import importlib.util
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path

import numpy
import pytest
import torch
from filelock import FileLock
from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

from megatron_cg.tools.align.presets import load_preset
from megatron_cg.tools.align.run import (
    END_OF_DOCUMENT,
    Plan,
    Run,
    arguments,
    environment,
    example_script,
    make_run,
    python_text,
    run_and_compare,
)
from megatron_cg.tools.record.compare import Outcome
from tests.functional.cases import DEVICE_COUNTS, PACKS, Case
from tests.functional.loops import HAS_V2, WITHOUT_V2
from tests.functional.tampered import MUTATION, SCENARIO

ROOT = Path(__file__).resolve().parents[2]
TIMEOUT = 420.0
"""Seconds of a run of two ranks with other tests beside it; more ranks are given more."""
TAMPERED = Path(__file__).with_name("tampered.py")
"""The example script for a case with a scenario, and for a mutation of the run with graphs."""
GPUS = 2
"""Of scripts that are run by :func:`torchrun`."""
MEMORY_OF_A_TEST = 5 * 2**30
"""Bytes of each GPU: a process of a run takes up to 4.7 GiB."""
# Kernels of NCCL wait on the GPU for other ranks. Those of many tests side by side would fill it
# with more channels, and all would wait.
os.environ.setdefault("NCCL_MAX_NCHANNELS", "1")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers() -> int:
    """How many tests ``-n auto`` runs at once: what the smallest GPU has memory for."""
    gpus = range(torch.cuda.device_count())
    memory = min((torch.cuda.get_device_properties(gpu).total_memory for gpu in gpus), default=0)
    return max(1, memory // MEMORY_OF_A_TEST)


def skip_without(gpus: int) -> None:
    found = torch.cuda.device_count()
    if found < gpus:
        pytest.skip(f"needs {gpus} GPUs, and {found} can be seen")
    if not has_extension():
        pytest.skip("needs transformer-engine with its PyTorch extension")


def torchrun(script: Sequence[str], folder: Path, **env: str) -> tuple[str, str]:
    """Run a script on two GPUs, with its log in ``folder``; why it failed, or "", and the log."""
    words = "-m torch.distributed.run --standalone --nproc-per-node".split()
    command = [sys.executable, *words, str(GPUS), *script]
    run = Run(folder.name, command, environment(os.environ) | env, folder)
    return run.make(TIMEOUT), run.text()


@cache
def lacks_device_counts() -> str:
    """Why Transformer Engine's grouped GEMM cannot read counts on the device, of a process here."""
    asks = "import torch, {0}.pytorch, {1}; print({1}.lacks_device_counts())"
    code = asks.format("transformer_engine", "megatron_cg.experts.rules")
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return found.stdout.rstrip("\n").rpartition("\n")[2]


def has_extension() -> bool:
    """Whether Transformer Engine's PyTorch extension is installed, without importing it.

    Built from source it is a module of its own; until it is imported, transformer-engine 2.20 hides
    it inside of its package.
    """
    package = importlib.util.find_spec("transformer_engine")
    places = (package and package.submodule_search_locations) or ()
    return importlib.util.find_spec("transformer_engine_torch") is not None or any(
        next(Path(place).rglob("transformer_engine_torch*"), None) for place in places
    )


@pytest.fixture(autouse=True)
def _own_time_limits() -> None:
    """Leave the time limit to the runs: they stop their workers, and pytest's limit would not."""
    faulthandler.cancel_dump_traceback_later()


@pytest.fixture(scope="session")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    base = tmp_path_factory.getbasetemp()
    return base.parent if "PYTEST_XDIST_WORKER" in os.environ else base


@pytest.fixture(scope="session")
def data(shared: Path) -> Path:
    folder = shared / "data"
    folder.mkdir(exist_ok=True)
    with FileLock(folder / "lock"):
        if not (folder / "text.bin").exists():
            return python_text(folder)
        return folder / "text"


@pytest.fixture(scope="session")
def blocks(data: Path) -> Path:
    """The same text, with a document for each run of lines without an empty one."""
    made, text = data.with_name("blocks"), Path(f"{data}.bin").read_bytes()
    with FileLock(data.parent / "lock"):
        if not Path(f"{made}.idx").exists():
            builder = IndexedDatasetBuilder(f"{made}.bin", dtype=numpy.uint16)
            for block in text[::2].split(b"\n\n"):
                tokens = numpy.frombuffer(block, dtype=numpy.uint8).astype(numpy.int32)
                builder.add_item(torch.from_numpy(numpy.append(tokens, END_OF_DOCUMENT)))
                builder.end_document()
            builder.finalize(f"{made}.idx")
    return made


@pytest.fixture
def align(data: Path, blocks: Path, shared: Path, tmp_path: Path) -> Callable[..., Outcome]:
    """Train a case eagerly and with graphs and compare.

    Cases whose eager runs are the same command in the same environment share one.
    """

    def run(case: Case, *, mutation: str | None = None, timeout: float | None = None) -> Outcome:
        skip_without(case.gpus)
        if case.fsdp_version == 2 and not HAS_V2:
            pytest.skip(WITHOUT_V2)
        if case.needs == DEVICE_COUNTS:
            if missing := lacks_device_counts():
                pytest.skip(f"needs {case.needs}: {missing}")
        elif case.needs and importlib.util.find_spec(case.needs) is None:
            pytest.skip(f"needs {case.needs}")
        tampered = mutation is not None or case.scenario
        plan = plan_of(case, tmp_path, TAMPERED if tampered else example_script())
        names, record = ["eager", "graphs"], None
        text = blocks if set(PACKS) <= set(case.flags) else data
        with pytest.MonkeyPatch.context() as patch:
            env = (*case.env, (SCENARIO, case.scenario)) if case.scenario else case.env
            for name, value in env:
                patch.setenv(name, value)
            if not any("{directory}" in word for word in case.flags):
                record = baseline(plan, text, env, shared / "baselines")
                del names[0]
            if mutation is not None:
                patch.setenv(MUTATION, mutation)
            runs = [make_run(plan, text, runs_of(case, tmp_path), name) for name in names]
            return run_and_compare(runs, timeout or time_limit(case.gpus), record)

    return run


def time_limit(gpus: int) -> float:
    return TIMEOUT * max(1, gpus // 2)


def baseline(plan: Plan, data: Path, env: tuple[tuple[str, str], ...], baselines: Path) -> Path:
    """The record of the plan's eager run, which the first test that asks for it makes."""
    command = arguments(plan, graphs=False, data=(), record=Path())
    directory = baselines / hashlib.sha256(repr((command, env)).encode()).hexdigest()[:16]
    directory.mkdir(parents=True, exist_ok=True)
    done = directory / "done"
    with FileLock(directory / "lock"):
        if not done.exists():
            attempt = directory / f"attempt{len(list(directory.glob('attempt*')))}"
            run = make_run(plan, data, attempt, "eager")
            failure = run.make(time_limit(plan.nproc))
            assert not failure, f"the eager run {failure}:\n{run.text()[-3000:]}"
            done.write_text(str(run.record))
        return Path(done.read_text())


@pytest.fixture
def log(tmp_path: Path) -> Callable[..., str]:
    def read(case: Case, run: str = "graphs") -> str:
        return (runs_of(case, tmp_path) / run / "log.txt").read_text(errors="replace")

    return read


def runs_of(case: Case, directory: Path) -> Path:
    return directory / "runs" / case.name


def plan_of(case: Case, directory: Path, script: Path) -> Plan:
    """The two runs of a case; ``{directory}`` in its flags is ``directory``."""

    def placed(words: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(word.replace("{directory}", str(directory)) for word in words)

    return Plan(
        script=script,
        nproc=case.gpus,
        model=tuple(load_preset(case.preset).arguments()),
        steps=case.steps,
        scopes=case.scopes,
        fsdp_version=case.fsdp_version,
        bf16=case.bf16,
        graph_extra=placed(case.graph_flags),
        extra=placed(case.flags),
    )
