"""One call of ``megatron-cg bench``: the edited lines, the runs in turn, the table, the JSON.

Relied on: megatron-core 0.19.2, ``training_log``, ``report_memory`` and ``_print_args``.
``--exit-interval`` ends a run whatever its number of iterations; ``--log-memory-interval`` prints
the peaks of torch's allocator.
"""

import argparse
import json
import os
import re
import shlex
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from megatron_cg.__main__ import CACHE_ENTRIES, CACHE_VARIABLE
from megatron_cg.arguments.schema import PACKAGES
from megatron_cg.errors import MegatronCGError
from megatron_cg.tools.align import run as align
from megatron_cg.tools.align.presets import Preset, load_preset
from megatron_cg.tools.launch_line import LaunchLine, read_line
from megatron_cg.upstream.symbols import installed_version
from megatron_cg.version import __version__

INCOMPLETE = 3  # the exit code when a run failed
_TAIL = 20  # lines of a failed run's log
SCHEMA = {"name": "megatron_cg.bench", "version": 5}

# Ranks write to one log, so nothing is asked of the beginnings of lines.
_STEP = re.compile(
    r" iteration +(?P<iteration>\d+)/ *\d+ \|.*"
    r" elapsed time per iteration \(ms\): (?P<ms>[\d.]+) \|"
    r"(?: throughput per GPU \(TFLOP/s/GPU\): (?P<tflops>[\d.]+) \|)?.*"
    r" global batch size: +(?P<batch>\d+) \|(?:.* lm loss: (?P<loss>\S+) \|)?"
)
_MEMORY = re.compile(
    r"memory \(MB\) .*\| max allocated: (?P<allocated>[\d.]+)"
    r" .*\| max reserved: (?P<reserved>[\d.]+)"
)
_ARGUMENT = re.compile(r"\b(seq_length|world_size) \.{2,} (\d+)")

_MODULES, _GEMM = "--cuda-graph-modules", "--cg-grouped-gemm"
_NO_MASK = "--no-create-attention-mask-in-dataloader"
_OF_FSDP = (
    *("--data-parallel-sharding-strategy", "--outer-dp-sharding-strategy", "--ckpt-format"),
    *("--init-model-with-meta-device", "--suggested-communication-unit-size"),
)
"""Flags that only Megatron-FSDP has, besides those with ``fsdp`` in their names."""
_LEFT_OUT = (
    *("--save", "--load", "--finetune", "--pretrained-checkpoint", "--exit-on-missing-checkpoint"),
    *("--tensorboard-dir", "--wandb-project", "--cg-record", "--exit-duration-in-mins"),
)
"""Flags that no run has, so that it reads and leaves nothing."""


class Configuration(NamedTuple):
    title: str
    fsdp: bool = True
    graphs: bool = True


GRAPHS, _SAME_GEMM = "graphs", "eager-gemm"
CONFIGURATIONS = {
    "eager": Configuration("Megatron-FSDP, eager", graphs=False),
    "ddp": Configuration("DDP, Megatron's graphs", fsdp=False),
    GRAPHS: Configuration("Megatron-FSDP, graphs"),
    _SAME_GEMM: Configuration("Megatron-FSDP, eager, the graphs' GEMM", graphs=False),
}
"""By the names that ``--only`` takes; the last is for models with experts."""


def given_line(words: Sequence[str]) -> LaunchLine:
    """The user's line, without this package's launcher. It must train under Megatron-FSDP."""
    line = read_line(words).without_launcher()
    if not line.has("--use-megatron-fsdp"):
        raise MegatronCGError(
            "the line has no --use-megatron-fsdp, under which this package makes graphs: add "
            "--use-megatron-fsdp --data-parallel-sharding-strategy optim_grads_params "
            "--ckpt-format fsdp_dtensor. The run under DDP is made from it."
        )
    return line


def preset_line(
    preset: Preset,
    data: Path,
    *,
    nproc: int,
    microbatches: int,
    steps: int,
    extra: Sequence[str] = (),
) -> LaunchLine:
    """Align's line of a preset with ``extra`` flags, fused as Transformer Engine can, for speed.

    An even number of GPUs shares the experts in pairs.
    """
    batch = int(str(preset.flags["micro-batch-size"])) * microbatches * nproc
    flags = ["--global-batch-size", f"{batch}", "--manual-gc"]
    # The check makes DDP wait for the GPU at every bucket, and does not look at sharded gradients.
    flags.append("--no-check-for-nan-in-loss-and-grad")
    # Lines are also checked where it is not installed.
    fuses, experts = bool(installed_version("transformer-engine")), "num-experts" in preset.flags
    flags += ["--moe-permute-fusion"] * (experts and fuses)
    flags += ["--expert-model-parallel-size", "2"] * (experts and nproc % 2 == 0)
    fused = () if "multi-latent-attention" in preset.flags or not fuses else ("--no-rope-fusion",)
    files = align.data_flags(data, data.parent / "cache")
    plan = align.Plan(align.example_script(), nproc, tuple(preset.arguments()), steps)
    line = given_line(align.arguments(plan, graphs=False, data=files, record=data.parent))
    line = line.without("--deterministic-mode", "--cuda-graph-impl", "--cg-record", *fused)
    return line.followed_by(*flags, *extra)


def chosen(only: str | None, line: LaunchLine) -> list[str]:
    """The names of the configurations to run. Raises MegatronCGError for one that cannot be run."""
    names = only.split(",") if only else ("eager", "ddp", GRAPHS)
    for name in names:
        if name not in CONFIGURATIONS:
            raise MegatronCGError(f"--only {name}: there are {', '.join(CONFIGURATIONS)}.")
        if name == _SAME_GEMM and not line.has("--num-experts"):
            raise MegatronCGError(f"--only {name}: the model has no --num-experts. Leave it out.")
    return list(dict.fromkeys(names))


def edited(line: LaunchLine, name: str, *, steps: int) -> LaunchLine:
    made = line.kept(lambda flag: flag not in _LEFT_OUT and not _is_of_graphs(flag))
    if not CONFIGURATIONS[name].fsdp:
        made = made.kept(lambda flag: "fsdp" not in flag and flag not in _OF_FSDP)
        made = made.followed_by("--use-distributed-optimizer")
        split = map(line.values, ("--tensor-model-parallel-size", "--context-parallel-size"))
        if {*split} - {None, ("1",)}:  # Megatron asks for it on Hopper, and FSDP refuses it.
            made = made.with_variable("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    elif _is_under_v2(line):
        made = made.kept(lambda flag: flag not in align.FLAGS_OF_V1)
    if name in (GRAPHS, _SAME_GEMM):
        made = made.with_launcher()
    made = made.followed_by(*_graph_flags(line, name))
    made = made.followed_by("--eval-iters", "0", "--exit-interval", str(steps))
    made = made.followed_by("--log-interval", "1", "--log-throughput")
    return made.followed_by("--log-memory-interval", str(steps))


def _graph_flags(line: LaunchLine, name: str) -> tuple[str, ...]:
    """The flags about graphs and grouped GEMM.

    For ``graphs`` those of the line come last, and without any that choose what is captured, what
    the README's line captures. The other configurations ignore those of the line.
    """
    if not CONFIGURATIONS[name].graphs:
        return (_GEMM, *(line.values(_GEMM) or ("torch",))) if name == _SAME_GEMM else ()
    flags: tuple[str, ...] = ("--cuda-graph-impl", "transformer_engine", _NO_MASK)
    if name != GRAPHS:
        return (*flags, _MODULES, *_partial_modules(line))
    of_v1 = () if _is_under_v2(line) else align.GRAPH_FLAGS
    flags += (*of_v1, "--no-gradient-accumulation-fusion")
    flags += ("--keep-fp8-transpose-cache",) * line.has("--fp8-param-gather")
    if not line.has(_MODULES) and not line.has("--cuda-graph-impl"):
        flags += _whole_layers(line)
    return (*flags, *line.kept(_is_of_graphs).words)


def _is_under_v2(line: LaunchLine) -> bool:
    return line.values("--megatron-fsdp-version") == ("2",)


def _partial_modules(line: LaunchLine) -> tuple[str, ...]:
    if line.has("--hybrid-layer-pattern"):
        return ("mamba", "attn")
    experts = line.has("--num-experts")
    return ("attn", "moe_router", "moe_preprocess") if experts else ("attn", "mlp")


def _whole_layers(line: LaunchLine) -> tuple[str, ...]:
    """The README's flags for whole layers; without a kernel for all experts these stay outside."""
    is_quantized = line.has("--fp8-format") or line.has("--fp4-format")
    gemm = line.values(_GEMM) or ("te" if is_quantized else "torch",)
    outside = line.has("--hybrid-layer-pattern") or gemm == ("te",)
    if outside or not line.has("--num-experts"):
        return (_MODULES, *_partial_modules(line))
    shared = line.values("--expert-model-parallel-size") not in (None, ("1",))
    exchange = ("--cg-moe-exchange", "peer") if shared else ()
    stated = () if line.has(_GEMM) else (_GEMM, *gemm)
    return (*stated, _MODULES, "attn", "moe", *exchange)


def captured(line: LaunchLine) -> str:
    if not line.has("--cuda-graph-impl"):
        return ""
    return " ".join(line.values(_MODULES) or ()) or "whole layers"


def _is_of_graphs(flag: str) -> bool:
    return "cuda-graph" in flag or flag.startswith("--cg-") or flag in align.GRAPH_FLAGS


def invoke(args: argparse.Namespace, extra: Sequence[str]) -> int:
    steps = args.settle_steps + args.steps
    with tempfile.TemporaryDirectory(prefix="megatron-cg-bench-") as temporary:
        folder = (args.work_dir or Path(temporary)).resolve()
        if args.preset is None:
            line = given_line(extra)
        else:
            preset = load_preset(args.preset)
            data = align.python_text(folder / "data")
            sizes = {"nproc": args.nproc or preset.nproc, "microbatches": args.microbatches}
            line = preset_line(preset, data, **sizes, steps=steps, extra=extra)
        runs = {name: edited(line, name, steps=steps) for name in chosen(args.only, line)}
        if args.dry_run:
            for name, line in runs.items():
                print(f"# {name}\n{shlex.join(line.command)}")
            return 0
        if not (here := machine())["gpus"]:
            text = "--dry-run prints its lines anywhere, and megatron-cg plan computes the memory."
            raise MegatronCGError(f"nvidia-smi finds no GPU: start it where there are some. {text}")
        settings = {"settle_steps": args.settle_steps, "steps": args.steps}
        results: dict[str, Any] = {"schema": SCHEMA, "machine": here, "settings": settings}
        results["runs"] = []
        _write(args.out, results)  # It may not be writable, and the runs take long.
        for name, line in runs.items():
            results["runs"].append(_made(name, line, folder, args))
            _write(args.out, results)
    print_results(results)
    if args.out is not None:
        print(f"written: {args.out}")
    return INCOMPLETE if any(run["error"] for run in results["runs"]) else 0


def _write(out: Path | None, results: Mapping[str, Any]) -> None:
    if out is not None:
        out.parent.mkdir(parents=True, exist_ok=True)
        whole = out.with_name(f"{out.name}.part")  # A full disk leaves what was there.
        whole.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
        whole.replace(out)


def _made(name: str, line: LaunchLine, folder: Path, args: argparse.Namespace) -> dict[str, Any]:
    """Make one run; returns what is known of it, for JSON. A failure is printed."""
    # Without our launcher too, cuBLASLt's cache is as large as with it.
    env = {CACHE_VARIABLE: str(CACHE_ENTRIES), **os.environ}
    if args.preset is not None:
        env = align.environment(env)
        env = {n: env[n] for n in env if n not in align.DETERMINISTIC_ENVIRONMENT}
    run = align.Run(name, line.command, env, folder / name)
    made: dict[str, Any] = {"configuration": name, "captured": captured(line)}
    made |= {"command": line.command, "error": ""}
    failure, text = run.make(args.timeout), run.text()
    try:
        if failure:
            raise MegatronCGError(failure)
        made |= read_log(text, settle=args.settle_steps, steps=args.steps)
    except MegatronCGError as error:
        made["error"] = str(error)
        made["tail"] = align.log_tail(text).splitlines()[-_TAIL:]
        print(*made["tail"], sep="\n", file=sys.stderr)
        print(f"the run {run.name} failed: {error}", file=sys.stderr, flush=True)
    return made


def read_log(text: str, *, settle: int, steps: int) -> dict[str, Any]:
    """What a run's log says of ``steps`` steps after the first ``settle`` ones, for JSON.

    ``step_ms`` of each, their median ``ms`` and ``quartiles``; in a step of median length
    ``tflops`` (per GPU, as Megatron counts operations) and ``tokens`` per second and GPU;
    ``allocated_mib`` and ``reserved_mib`` (the peaks of torch's allocator since the start, on the
    printed rank that has most); and the last ``loss``. What the log has not is None. Raises
    MegatronCGError if it has fewer steps.
    """
    lines = list(_STEP.finditer(text))
    timed = [line for line in lines if settle < int(line["iteration"]) <= settle + steps]
    if len(timed) < steps:
        raise MegatronCGError(
            f"the log has {len(lines)} steps, and {settle} + {steps} were asked for: give a "
            "smaller --settle-steps or --steps, or a longer training"
        )
    times = [float(line["ms"]) for line in timed]
    two = times if len(times) > 1 else times * 2
    low, median, high = statistics.quantiles(two, method="inclusive")
    tflops = [float(line["tflops"]) for line in timed if line["tflops"]]
    sizes = {name: int(number) for name, number in _ARGUMENT.findall(text)}
    batch = int(timed[-1]["batch"]) * sizes.get("seq_length", 0) / sizes.get("world_size", 1)
    peaks = list(_MEMORY.finditer(text))
    return {
        "step_ms": times,
        "ms": median,
        "quartiles": [low, high],
        "tflops": statistics.median(tflops) if tflops else None,
        "tokens": batch / median * 1e3 or None,
        "allocated_mib": max((float(peak["allocated"]) for peak in peaks), default=None),
        "reserved_mib": max((float(peak["reserved"]) for peak in peaks), default=None),
        "loss": float(timed[-1]["loss"]) if timed[-1]["loss"] else None,
    }


def machine() -> dict[str, Any]:
    """GPUs by name with their driver, cores, and versions; never the name of the host."""
    query = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(query, check=True, capture_output=True, text=True, timeout=60)
        rows = [line.rsplit(", ", 1) for line in done.stdout.splitlines() if ", " in line]
    except (OSError, subprocess.SubprocessError):
        rows = []
    versions = {name: installed_version(name) for name in PACKAGES}
    return {
        "gpus": [name for name, _ in rows],
        "driver": rows[0][1] if rows else None,
        "versions": versions | {"megatron-cg": __version__},
    }


def print_results(results: dict[str, Any]) -> None:
    here = results["machine"]
    gpus = here["gpus"]
    kinds = ", ".join(f"{gpus.count(name)} x {name}" for name in dict.fromkeys(gpus))
    versions = ", ".join(f"{name} {found}" for name, found in here["versions"].items() if found)
    print(f"\n{kinds}, driver {here['driver']}; {versions}\n")
    made = [run for run in results["runs"] if not run["error"]]
    if made:
        print(align.table([*_rows(made)]))
    for run in results["runs"]:
        if run["error"]:
            print(f"\n{run['configuration']} failed: {run['error']}")


def _rows(runs: Sequence[Mapping[str, Any]]) -> Iterator[list[str]]:
    """A table of runs; ratios are to the first."""
    head = ["run", "captured", "ms a step", "quartiles", f"of {runs[0]['configuration']}"]
    yield [*head, "TFLOP/s per GPU", "tokens/s per GPU", "allocated MiB", "reserved MiB"]
    forms = {"tflops": ".1f", "tokens": ",.0f", "allocated_mib": ",.0f", "reserved_mib": ",.0f"}
    for run in runs:
        name, ratio = run["configuration"], run["ms"] / runs[0]["ms"]
        title = f"{name}: {CONFIGURATIONS[name].title}"
        times = [f"{run['ms']:.1f}", "{:.1f} to {:.1f}".format(*run["quartiles"]), f"{ratio:.3f}"]
        cells = ["-" if run[key] is None else format(run[key], form) for key, form in forms.items()]
        yield [title, run["captured"] or "-", *times, *cells]
