"""The ways to run one training, and how a launch line is edited for each. Pure.

Relied on: megatron-core 0.19.2. ``--exit-interval`` ends a run whatever its number of iterations;
``--log-memory-interval`` prints the peaks of torch's allocator.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from megatron_cg.errors import MegatronCGError
from megatron_cg.tools.align.presets import Preset
from megatron_cg.tools.align.run import (
    FLAGS_OF_V1,
    GRAPH_FLAGS,
    Plan,
    arguments,
    data_flags,
    example_script,
)
from megatron_cg.tools.launch_line import LaunchLine, read_line
from megatron_cg.upstream.symbols import installed_version

_MODULES, _GEMM = "--cuda-graph-modules", "--cg-grouped-gemm"
_NO_MASK = "--no-create-attention-mask-in-dataloader"
_OF_FSDP = (
    *("--data-parallel-sharding-strategy", "--outer-dp-sharding-strategy", "--ckpt-format"),
    *("--init-model-with-meta-device", "--suggested-communication-unit-size"),
)
"""Flags that only Megatron-FSDP has, besides those with ``fsdp`` in their names."""
_LEFT_OUT = (
    *("--save", "--load", "--finetune", "--pretrained-checkpoint", "--exit-on-missing-checkpoint"),
    *("--tensorboard-dir", "--wandb-project", "--cg-record", "--cg-report"),
    "--exit-duration-in-mins",
)
"""Flags that no run has, so that it reads and leaves nothing."""


class BenchError(MegatronCGError):
    """A benchmark cannot be made as asked."""


class Configuration(NamedTuple):
    title: str
    fsdp: bool = True
    graphs: bool = True
    launched: bool = True
    """Whether it needs this package's launcher."""


GRAPHS, _SAME_GEMM = "graphs", "eager-gemm"
_DEFAULT = ("eager", "ddp", GRAPHS)
CONFIGURATIONS = {
    "eager": Configuration("Megatron-FSDP, eager", graphs=False, launched=False),
    "ddp": Configuration("DDP, Megatron's graphs", fsdp=False, launched=False),
    GRAPHS: Configuration("Megatron-FSDP, graphs"),
    _SAME_GEMM: Configuration("Megatron-FSDP, eager, the graphs' GEMM", graphs=False),
}
"""By the names that ``--only`` takes; the last is for models with experts."""


def given_line(words: Sequence[str]) -> LaunchLine:
    """The user's line, without this package's launcher. Raises BenchError without Megatron-FSDP."""
    line = read_line(words).without_launcher()
    if not line.has("--use-megatron-fsdp"):
        raise BenchError(
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
    files = data_flags(data, data.parent / "cache")
    plan = Plan(example_script(), nproc, tuple(preset.arguments()), steps)
    line = given_line(arguments(plan, graphs=False, data=files, record=data.parent))
    line = line.without("--deterministic-mode", "--cuda-graph-impl", "--cg-record", *fused)
    return line.followed_by(*flags, *extra)


def chosen(only: str | None, line: LaunchLine) -> list[str]:
    """The names of the configurations to run. Raises BenchError for one that cannot be run."""
    names = only.split(",") if only else _DEFAULT
    for name in names:
        if name not in CONFIGURATIONS:
            raise BenchError(f"--only {name}: there are {', '.join(CONFIGURATIONS)}.")
        if name == _SAME_GEMM and not line.has("--num-experts"):
            raise BenchError(f"--only {name}: the model has no --num-experts. Leave it out.")
        if name == _SAME_GEMM and _is_quantized(line) and not line.has(_GEMM):
            raise BenchError(f"--only {name}: torch's is for BF16. Say {_GEMM}, or leave it out.")
    return list(dict.fromkeys(names))


def edited(line: LaunchLine, name: str, *, steps: int, every: int = 1) -> LaunchLine:
    configuration = CONFIGURATIONS[name]
    made = line.kept(lambda flag: flag not in _LEFT_OUT and not _is_of_graphs(flag))
    if not configuration.fsdp:
        made = made.kept(lambda flag: "fsdp" not in flag and flag not in _OF_FSDP)
        made = made.followed_by("--use-distributed-optimizer")
    elif _is_under_v2(line):
        made = made.kept(lambda flag: flag not in FLAGS_OF_V1)
    if configuration.launched:
        made = made.with_launcher()
    made = made.followed_by(*_graph_flags(line, name))
    made = made.followed_by("--eval-iters", "0", "--exit-interval", str(steps))
    made = made.followed_by("--log-interval", str(every), "--log-throughput")
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
    of_v1 = () if _is_under_v2(line) else GRAPH_FLAGS
    flags += (*of_v1, "--no-gradient-accumulation-fusion")
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
    gemm = line.values(_GEMM) or ("te" if _is_quantized(line) else "torch",)
    outside = line.has("--hybrid-layer-pattern") or gemm == ("te",)
    if outside or not line.has("--num-experts"):
        return (_MODULES, *_partial_modules(line))
    shared = line.values("--expert-model-parallel-size") not in (None, ("1",))
    exchange = ("--cg-moe-exchange", "peer") if shared else ()
    stated = () if line.has(_GEMM) else (_GEMM, *gemm)
    return (*stated, _MODULES, "attn", "moe", *exchange)


def _is_quantized(line: LaunchLine) -> bool:
    return line.has("--fp8-format") or line.has("--fp4-format")


def captured(line: LaunchLine) -> str:
    if not line.has("--cuda-graph-impl"):
        return ""
    return " ".join(line.values(_MODULES) or ()) or "whole layers"


def _is_of_graphs(flag: str) -> bool:
    return "cuda-graph" in flag or flag.startswith("--cg-") or flag in GRAPH_FLAGS
