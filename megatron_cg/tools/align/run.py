"""The two runs of a comparison: their command lines, data, processes, and what came of them."""

import os
import re
import signal
import subprocess
import sys
import sysconfig
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields
from pathlib import Path

from megatron_cg.arguments.megatron import PACKING
from megatron_cg.arguments.rules import ANY_RUN
from megatron_cg.arguments.schema import GraphArguments, flag_of
from megatron_cg.errors import STEP_DIFFERS, MegatronCGError
from megatron_cg.tools.record.compare import (
    FAILED,
    Comparison,
    Outcome,
    RecordError,
    compare,
    read_run,
)
from megatron_cg.upstream.symbols import Symbol, folder_of

_BUILDER = Symbol(
    "megatron.core.datasets.indexed_dataset:IndexedDatasetBuilder",
    "the writer of Megatron's indexed format",
    attributes=("add_item", "end_document", "finalize"),
)
RELIES_ON = (_BUILDER,)

EAGER, GRAPHS = "eager", "graphs"
VERIFY_STEPS = 3  # what alignments set ``--cg-verify-steps`` to
PACKAGE = Path(__file__).resolve().parents[2]

BASE_FLAGS = (
    *("--use-megatron-fsdp", "--data-parallel-sharding-strategy", "optim_grads_params"),
    *("--ckpt-format", "fsdp_dtensor", "--use-distributed-optimizer"),
    *("--overlap-grad-reduce", "--overlap-param-gather", "--no-gradient-accumulation-fusion"),
    *("--transformer-impl", "transformer_engine", "--bf16", "--no-rope-fusion"),
    *("--lr", "1e-4", "--min-lr", "1e-5", "--lr-decay-style", "constant", "--clip-grad", "1.0"),
    *("--eval-iters", "0", "--eval-interval", "1000", "--log-interval", "1", "--seed", "1234"),
    "--no-create-attention-mask-in-dataloader",
    *("--te-rng-tracker", "--deterministic-mode"),
)
"""The flags of both runs, whatever the model: the generator of ``--te-rng-tracker`` draws other
numbers than the default one."""

_PACKS = {flag_of(name) for name in PACKING}  # flags that pack several samples into one sequence

FLAGS_OF_V1 = ("--use-distributed-optimizer",)
"""Those of them that Megatron-FSDP v2 refuses."""

GRAPH_FLAGS = ("--fsdp-double-buffer", "--fsdp-db-use-persist-buf-on-alloc-fail")

DETERMINISTIC_ENVIRONMENT = {
    "NVTE_ALLOW_NONDETERMINISTIC_ALGO": "0",
    "NCCL_ALGO": "Ring",
    "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
    "MAMBA_DETERMINISTIC": "1",
    "TORCHINDUCTOR_FX_GRAPH_CACHE": "0",
    "TORCHINDUCTOR_AUTOGRAD_CACHE": "0",
}
"""Variables without which even two eager runs can differ.

The first three megatron-core 0.19.2 requires for --deterministic-mode (training/determinism.py).
The fourth is for mamba-ssm (2.3.2, utils/determinism.py): its Triton kernels choose their block
sizes at import, before --deterministic-mode is known, and otherwise by timing.

The last two are for code compiled for any number of rows, as Megatron's activation of experts.
Inductor chooses how a kernel sums by the number of rows that it is compiled with (torch 2.11,
``_persistent_reduction_configs``), which torch's caches on disk do not know: a later run would take
the kernel of another rank.
"""

ABOUT_GRAPHS = frozenset(
    flag_of(field.name) for field in fields(GraphArguments) if field.name not in ANY_RUN
)
"""Flags of this package for the graph run alone; a run without graphs refuses them."""

END_OF_DOCUMENT = 256  # the token after each file of the data; tokens 0 to 255 are its bytes

OVERDUE = "did not end within --timeout"
"""How a run's log and the comparison describe a run that had to be stopped."""
_TAIL = 40
_STOP_SECONDS = 20.0  # how long processes have to end by themselves before they are killed
_MARK = "MEGATRON_CG_RUN"
"""The variable by which the processes of a run are found, whatever session or parent they have."""
_DIFFERED = re.compile(rf".* {STEP_DIFFERS}: .*")
# The exception that torch.multiprocessing prints first has no text in its line.
_NAMED = re.compile(
    r"^\s*(?:\[rank\d+\]:\s*)?((?:(?:\w+\.)*\w*(?:Error|Exception|Interrupt)\b(?!: *$)"
    r"|megatron_cg: error: ).*?)\s*$",
    re.M,
)
_OURS = ("megatron_cg: error: ", "megatron_cg.")
# torchrun's report of the process that failed first, if a signal ended it.
_KILLED = re.compile(
    r"Root Cause .*?^\s*rank\s*: (\d+) .*?^\s*traceback : (Signal \d+ \(\w+\))", re.M | re.S
)
# torchrun's line on which process failed. It follows the cause but does not name it.
_TORCHRUN = re.compile(r"^E\d{4} .*\bfailed \(exitcode")


@dataclass(frozen=True)
class Plan:
    """What both runs share; ``model`` and ``extra`` are Megatron's flags.

    ``extra`` comes last, because argparse uses the last of two equal flags.
    """

    script: Path
    nproc: int
    model: tuple[str, ...]
    steps: int
    scopes: tuple[str, ...] = ("attn",)
    warmup_steps: int = 3
    fsdp_version: int = 1
    bf16: bool = True
    """False means no ``--bf16``, so fp32."""
    graph_extra: tuple[str, ...] = ()  # flags for the graph run, most of them this package's
    extra: tuple[str, ...] = ()
    """Megatron's flags for both runs; ``{run}`` in them becomes ``eager`` or ``graphs``."""


def arguments(plan: Plan, *, graphs: bool, data: Sequence[str], record: Path) -> list[str]:
    words = [sys.executable, "-P", "-m", "torch.distributed.run"]
    words += ["--standalone", "--nproc-per-node", str(plan.nproc)]
    base = [flag for flag in BASE_FLAGS if plan.bf16 or flag != "--bf16"]
    if not _PACKS.isdisjoint(plan.extra):
        base.remove("--no-rope-fusion")  # Graphs of attention that take packs need it.
    if plan.fsdp_version != 1:
        base = [flag for flag in base if flag not in FLAGS_OF_V1]
        base += ["--megatron-fsdp-version", str(plan.fsdp_version)]
    words += ["-m", "megatron_cg", str(plan.script), *plan.model, *base, *data]
    words += ["--train-iters", str(plan.steps)]
    words += graph_flags(plan) if graphs else ["--cuda-graph-impl", "none"]
    extra = [word.replace("{run}", GRAPHS if graphs else EAGER) for word in plan.extra]
    return [*words, *extra, "--cg-record", str(record)]


def graph_flags(plan: Plan) -> list[str]:
    words = ["--cuda-graph-impl", "transformer_engine"]
    if plan.scopes:
        words += ["--cuda-graph-modules", *plan.scopes]
    words += ["--cuda-graph-warmup-steps", str(plan.warmup_steps)]
    words += ["--cg-verify-steps", str(VERIFY_STEPS)]
    return [*words, *(GRAPH_FLAGS if plan.fsdp_version == 1 else ()), *plan.graph_extra]


def environment(inherited: Mapping[str, str]) -> dict[str, str]:
    """The environment of one run, which finds this package from any working directory.

    And torch's own cuDNN, if that is a separate package: Note [Two copies of cuDNN] in
    ``doctor/checks.py``.
    """
    env = {**inherited, **DETERMINISTIC_ENVIRONMENT, "PYTHONUNBUFFERED": "1"}
    env.pop("CUDA_DEVICE_MAX_CONNECTIONS", None)  # Megatron-FSDP refuses the value 1.
    env["PYTHONPATH"] = ":".join(filter(None, [str(PACKAGE.parent), env.get("PYTHONPATH")]))
    if (folder := folder_of("nvidia.cudnn")) is not None:
        env.setdefault("CUDNN_HOME", str(folder))
    return env


def example_script() -> Path:
    """The shipped ``pretrain_gpt.py``; ``megatron_cg/examples`` is a link in a checkout."""
    script = PACKAGE / "examples" / "pretrain_gpt.py"
    if not script.is_file():
        raise MegatronCGError(f"there is no {script}; name a pretraining script with --script.")
    return script


def gpu_count() -> int:
    import torch

    return torch.cuda.device_count()


def check_gpus(plan: Plan) -> None:
    if not plan.script.is_file():
        raise MegatronCGError(f"--script {plan.script}: there is no such file.")
    gpus = gpu_count()
    if gpus < plan.nproc:
        smaller = "a smaller --nproc, or " if gpus else ""
        raise MegatronCGError(
            f"--nproc {plan.nproc} needs as many GPUs, and {gpus} can be seen: give {smaller}"
            "--backend tape to compare on the CPU."
        )


def python_text(directory: Path, limit: int = 4 * 2**20) -> Path:
    """Write ``directory/text.{bin,idx}``, Megatron's indexed format; returns the prefix.

    Each document has the bytes of a module of Python's standard library, in the order of names, up
    to ``limit`` bytes in all.
    """
    import numpy
    import torch

    directory.mkdir(parents=True, exist_ok=True)
    prefix, size = directory.resolve() / "text", 0
    builder = _BUILDER.find()(f"{prefix}.bin", dtype=numpy.uint16)
    for file in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        if size >= limit:
            break
        size += file.stat().st_size
        tokens = numpy.fromfile(file, dtype=numpy.uint8).astype(numpy.int32)
        builder.add_item(torch.from_numpy(numpy.append(tokens, numpy.int32(END_OF_DOCUMENT))))
        builder.end_document()
    builder.finalize(f"{prefix}.idx")
    return prefix


def data_flags(prefix: Path, cache: Path) -> list[str]:
    """Megatron's arguments for such a dataset; sample indices go to ``cache``.

    The preset sets the vocabulary size: ids above 256 exist in the model but do not occur. With
    few documents, Megatron's split can leave a share empty, so all are for training. By default the
    last id of the vocabulary ends a document.
    """
    flags = ["--data-path", str(prefix), "--split", "100,0,0", "--data-cache-path", str(cache)]
    flags += ["--tokenizer-type", "NullTokenizer"]
    return [*flags, "--null-tokenizer-eod-id", str(END_OF_DOCUMENT)]


@dataclass(frozen=True)
class Run:
    """One run: its command line and environment, and the directory for its log and record."""

    name: str
    words: Sequence[str]
    env: Mapping[str, str]
    directory: Path

    @property
    def _mark(self) -> str:
        return f"{os.getpid()} {self.directory}"

    @property
    def record(self) -> Path:
        return self.directory / "record"

    @property
    def log(self) -> Path:
        return self.directory / "log.txt"

    def make(self, timeout: float) -> str:
        """Start it and wait for its end; returns why it failed, as a clause, or nothing.

        Leaves no process behind, also after an interrupt.
        """
        try:
            process = self.start()
            code = process.wait(timeout)
        except subprocess.TimeoutExpired:
            # Read before stopping it: torchrun would report the signal as an error.
            named = named_error(self.text())
            overdue = (f"said {named!r} and " if named else "") + f"{OVERDUE} {timeout:g} s"
            _stop(self._mark)
            process.wait()
            with self.log.open("a") as log:
                log.write(f"\nTimeoutError: the run {overdue}\n")
            return overdue
        finally:
            _stop(self._mark)
        return _end(code, self.text()) if code else ""

    def start(self) -> subprocess.Popen[bytes]:
        """Start it in its own session: Ctrl-C reaches this process alone, which stops it."""
        self.directory.mkdir(parents=True, exist_ok=True)
        print(f"{self.name} run started", file=sys.stderr, flush=True)
        with self.log.open("wb") as log:
            return subprocess.Popen(
                self.words,
                env={**self.env, _MARK: self._mark},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def text(self) -> str:
        return self.log.read_text(errors="replace")


def _stop(mark: str) -> None:
    """End all processes of a run: those that a signal does not end in time are killed."""
    try:
        _end_all(mark, signal.SIGTERM)
    finally:  # also after a second Ctrl-C
        _end_all(mark, signal.SIGKILL)


def _end_all(mark: str, number: int) -> None:
    """Send a signal to each process with this mark, and wait until none is left, or that long."""
    deadline, told = time.monotonic() + _STOP_SECONDS, set[int]()
    while (left := _marked(mark)) and time.monotonic() < deadline:
        for pid in left - told:
            with suppress(ProcessLookupError):
                os.kill(pid, number)
        told |= left
        time.sleep(0.1)


def _marked(mark: str) -> set[int]:
    variable, found = os.fsencode(f"{_MARK}={mark}"), set()
    for place in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # It may have ended, or be another user's.
            if variable in (place / "environ").read_bytes().split(b"\0"):
                found.add(int(place.name))
    return found


def make_run(plan: Plan, data: Path, directory: Path, name: str) -> Run:
    """The run ``name``, ``eager`` or ``graphs``, in a folder of that name; not started yet."""
    directory /= name
    flags = data_flags(data, directory / "cache")
    words = arguments(plan, graphs=name == GRAPHS, data=flags, record=directory / "record")
    return Run(name, words, environment(os.environ), directory)


def check_start(directory: Path) -> None:
    for record in directory.glob("*/record"):
        raise MegatronCGError(f"{record} holds an earlier run: give another --work-dir.")


def run_and_compare(
    runs: Sequence[Run], timeout: float, eager_record: Path | None = None
) -> Outcome:
    """Make the runs in turn, each within ``timeout`` seconds, and compare their records.

    The last run is the one with graphs. With the record of an eager run it is the only one.
    """
    for run in runs:
        failure = run.make(timeout)
        if not failure and not run.record.exists():
            why = "training did not begin, or the log says why the record was not written"
            failure = f"left no record: {why}"
        if failure:
            reason = f"the {run.name} run {failure}"
            return Outcome(Comparison(FAILED, reason), log_tail(run.text()))
    log = runs[-1].text()
    try:
        eager, graphed = map(read_run, (eager_record or runs[0].record, runs[-1].record))
    except RecordError as error:
        return Outcome(Comparison(FAILED, str(error)), log_tail(log))
    return Outcome(compare(eager, graphed), "\n".join(_DIFFERED.findall(log)), eager, graphed)


def _end(code: int, log: str) -> str:
    named, killed = named_error(log), _KILLED.search(log)
    # A process with a failed GPU aborts while it exits, after it has reported the cause.
    if killed is not None and not named.startswith(_OURS):
        return f"ended with exit code {code}: rank {killed[1]} was ended by {killed[2]}"
    return f"ended with exit code {code}: {named or 'no error was named'}"


def named_error(log: str) -> str:
    """The line of ``log`` that names the error, as Python prints it; empty if there is none.

    An error of this package says what to do, so it comes before the exception that it was raised
    from. Of several errors the first counts: other ranks and torchrun fail as a consequence.
    """
    named = _NAMED.findall(log)
    return next((line for line in named if line.startswith(_OURS)), named[0] if named else "")


def log_tail(log: str) -> str:
    lines = log.splitlines()
    end = next((n for n, line in enumerate(lines) if _TORCHRUN.match(line)), len(lines))
    return "\n".join(lines[max(0, end - _TAIL) : end])


def table(rows: Sequence[Sequence[str]]) -> str:
    """A table in Markdown; the first row is its head."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    rows = [rows[0], ["-" * width for width in widths], *rows[1:]]
    return "\n".join(f"| {' | '.join(map(str.ljust, row, widths))} |" for row in rows)
