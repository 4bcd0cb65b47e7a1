"""The ways to run one training, and how a launch line is edited for each. Pure.

Relied on: megatron-core 0.19.2. ``--exit-interval`` ends a run whatever its number of iterations;
``--log-memory-interval`` prints the peaks of torch's allocator.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from megatron_cg.nearest import did_you_mean
from megatron_cg.tools.align.command import GRAPH_FLAGS
from megatron_cg.tools.bench import BenchError
from megatron_cg.tools.bench.launch_line import LaunchLine, split_flags

_MODULES = "--cuda-graph-modules"
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


class Configuration(NamedTuple):
    """One way to run the training."""

    title: str
    fsdp: bool = True
    graphs: bool = True
    torch_gemm: bool = False
    """Whether experts compute by torch's grouped GEMM, as in graphs of whole MoE layers."""

    @property
    def launched(self) -> bool:
        """Whether it needs this package's launcher."""
        return self.fsdp and (self.graphs or self.torch_gemm)


GRAPHS = "graphs"
_DEFAULT = ("eager", "ddp", GRAPHS)
CONFIGURATIONS = {
    "eager": Configuration("Megatron-FSDP, eager", graphs=False),
    "ddp": Configuration("DDP, Megatron's graphs", fsdp=False),
    GRAPHS: Configuration("Megatron-FSDP, graphs"),
    "eager-torch": Configuration(
        "Megatron-FSDP, eager, torch's GEMM", graphs=False, torch_gemm=True
    ),
    "partial": Configuration("Megatron-FSDP, partial graphs"),
    "partial-torch": Configuration("Megatron-FSDP, partial graphs, torch's GEMM", torch_gemm=True),
}
"""By the names that ``--only`` takes; all but the first three are for models with experts."""


def chosen(only: str | None, line: LaunchLine) -> list[str]:
    """The names of the configurations to run. Raises BenchError for one that cannot be run."""
    names = only.split(",") if only else _DEFAULT
    for name in names:
        if name not in CONFIGURATIONS:
            hint = did_you_mean(name, CONFIGURATIONS)
            raise BenchError(f"--only {name}{hint}: there are {', '.join(CONFIGURATIONS)}.")
        if name not in _DEFAULT and not line.has("--num-experts"):
            raise BenchError(f"--only {name}: the model has no --num-experts. Leave it out.")
    return list(dict.fromkeys(names))


def edited(line: LaunchLine, name: str, *, steps: int) -> LaunchLine:
    """The line of the configuration ``name``, which ends after ``steps`` and logs each of them."""
    configuration = CONFIGURATIONS[name]
    _, flags = split_flags(line.flags, _LEFT_OUT.__contains__)
    of_graphs, flags = split_flags(flags, _is_of_graphs)
    if not configuration.fsdp:
        _, flags = split_flags(flags, _is_of_fsdp)
        flags = (*flags, "--use-distributed-optimizer")
    flags = (*flags, *_graph_flags(line, name, of_graphs))
    flags += ("--eval-iters", "0", "--exit-interval", str(steps), "--log-interval", "1")
    flags += ("--log-throughput", "--log-memory-interval", str(steps))
    return replace(line, flags=flags)


def _graph_flags(line: LaunchLine, name: str, of_graphs: Sequence[str]) -> tuple[str, ...]:
    """The flags about graphs and grouped GEMM.

    For ``graphs`` those of the line come last, and without any that choose what is captured, what
    the README's line captures. The other configurations ignore those of the line.
    """
    configuration = CONFIGURATIONS[name]
    gemm = ("--cg-grouped-gemm", "torch") if configuration.torch_gemm else ()
    if not configuration.graphs:
        return gemm
    flags: tuple[str, ...] = ("--cuda-graph-impl", "transformer_engine", _NO_MASK)
    if configuration.fsdp:
        flags += (*GRAPH_FLAGS, "--no-gradient-accumulation-fusion", *gemm)
    if name != GRAPHS:
        return (*flags, _MODULES, *_partial_modules(line))
    if not line.has(_MODULES) and not line.has("--cuda-graph-impl"):
        flags += _whole_layers(line)
    return (*flags, *of_graphs)


def _partial_modules(line: LaunchLine) -> tuple[str, ...]:
    """What partial graphs capture of the line's model."""
    if line.has("--hybrid-layer-pattern"):
        return ("mamba", "attn")
    experts = line.has("--num-experts")
    return ("attn", "moe_router", "moe_preprocess") if experts else ("attn", "mlp")


def _whole_layers(line: LaunchLine) -> tuple[str, ...]:
    """The README's flags for whole layers; experts in FP8 or FP4 stay outside of graphs."""
    outside = any(map(line.has, ("--fp8-format", "--fp4-format", "--hybrid-layer-pattern")))
    if outside or not line.has("--num-experts"):
        return (_MODULES, *_partial_modules(line))
    shared = line.value("--expert-model-parallel-size") not in ("", "1")
    exchange = ("--cg-moe-exchange", "peer") if shared else ()
    return ("--cg-grouped-gemm", "torch", _MODULES, "attn", "moe", *exchange)


def captured(line: LaunchLine) -> str:
    """What the graphs of an edited line hold, in words; empty for an eager run."""
    if not line.has("--cuda-graph-impl"):
        return ""
    return line.value(_MODULES) or "whole layers"


def _is_of_graphs(flag: str) -> bool:
    return "cuda-graph" in flag or flag.startswith("--cg-") or flag in GRAPH_FLAGS


def _is_of_fsdp(flag: str) -> bool:
    return "fsdp" in flag or flag in _OF_FSDP
