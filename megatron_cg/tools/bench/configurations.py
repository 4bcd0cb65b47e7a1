"""The ways to run one training, and how a launch line is edited for each. Pure.

Relied on: megatron-core 0.19.2. ``--exit-interval`` ends a run whatever its number of iterations;
``--log-memory-interval`` prints the peaks of torch's allocator.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from megatron_cg.nearest import did_you_mean
from megatron_cg.tools.align.command import GRAPH_FLAGS
from megatron_cg.tools.bench import BenchError
from megatron_cg.tools.bench.launch_line import LaunchLine, split_flags

_MODULES = "--cuda-graph-modules"
_NO_MASK = "--no-create-attention-mask-in-dataloader"
_OF_OTHER_GRAPHS = ("--enable-cuda-graph", "--external-cuda-graph")
_OF_FSDP = (
    *("--data-parallel-sharding-strategy", "--outer-dp-sharding-strategy", "--ckpt-format"),
    *("--init-model-with-meta-device", "--suggested-communication-unit-size"),
)
"""Flags that only Megatron-FSDP has, besides those with ``fsdp`` in their names."""
_LEFT_OUT = (
    *("--save", "--load", "--finetune", "--pretrained-checkpoint", "--exit-on-missing-checkpoint"),
    *("--tensorboard-dir", "--exit-duration-in-mins", "--cg-record", "--cg-report"),
)
"""Flags of a run that neither reads nor leaves anything; those that begin ``--wandb-`` too."""


@dataclass(frozen=True)
class Configuration:
    """One way to run the training."""

    title: str
    fsdp: bool = True
    captures: str = "nothing"
    """``nothing``, ``partial`` (MoE layers up to their experts) or ``whole`` layers."""
    torch_gemm: bool = False
    """Whether experts compute by torch's grouped GEMM, which graphs of whole MoE layers need."""
    of_experts: bool = False
    """Whether it makes sense only for a model with experts."""

    @property
    def launched(self) -> bool:
        """Whether it needs this package's launcher."""
        return self.fsdp and (self.captures != "nothing" or self.torch_gemm)


EAGER, DDP, GRAPHS = "eager", "ddp", "graphs"
CONFIGURATIONS = {
    EAGER: Configuration("Megatron-FSDP, eager"),
    DDP: Configuration("DDP, Megatron's graphs", fsdp=False, captures="partial"),
    GRAPHS: Configuration("Megatron-FSDP, graphs", captures="whole"),
    "eager-torch": Configuration(
        "Megatron-FSDP, eager, torch's grouped GEMM", torch_gemm=True, of_experts=True
    ),
    "partial": Configuration("Megatron-FSDP, partial graphs", captures="partial", of_experts=True),
    "partial-torch": Configuration(
        "Megatron-FSDP, partial graphs, torch's grouped GEMM",
        captures="partial",
        torch_gemm=True,
        of_experts=True,
    ),
}
"""By the names that ``--only`` takes; the first three are the default."""


def chosen(only: str | None, line: LaunchLine) -> list[str]:
    """The names of the configurations to run. Raises BenchError for one that does not exist."""
    names = only.split(",") if only else [EAGER, DDP, GRAPHS]
    for name in names:
        if name not in CONFIGURATIONS:
            hint = did_you_mean(name, CONFIGURATIONS)
            raise BenchError(f"--only {name}{hint}: there are {', '.join(CONFIGURATIONS)}.")
        if CONFIGURATIONS[name].of_experts and not line.has("--num-experts"):
            raise BenchError(f"--only {name}: the model has no --num-experts. Leave it out.")
    return list(dict.fromkeys(names))


def edited(line: LaunchLine, name: str, *, steps: int) -> LaunchLine:
    """The line of one configuration, whose log says what it measures.

    Args:
        line: that of the training.
        name: of the configuration.
        steps: after which the run ends.
    """
    configuration = CONFIGURATIONS[name]
    _, flags = split_flags(line.flags, _is_left_out)
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
    if configuration.captures == "nothing":
        return gemm
    flags: tuple[str, ...] = ("--cuda-graph-impl", "transformer_engine", _NO_MASK)
    if configuration.fsdp:
        flags += (*GRAPH_FLAGS, "--no-gradient-accumulation-fusion", *gemm)
    if name != GRAPHS:
        return (*flags, _MODULES, *partial_modules(line))
    if not line.has(_MODULES) and not line.has("--cuda-graph-impl"):
        flags += _whole_layers(line)
    return (*flags, *of_graphs)


def partial_modules(line: LaunchLine) -> tuple[str, ...]:
    """What partial graphs capture of the line's model."""
    if line.has("--hybrid-layer-pattern"):
        return ("mamba", "attn")
    experts = line.has("--num-experts")
    return ("attn", "moe_router", "moe_preprocess") if experts else ("attn", "mlp")


def _whole_layers(line: LaunchLine) -> tuple[str, ...]:
    """The README's flags for whole layers; experts in FP8 or FP4 stay outside of graphs."""
    low_precision = line.has("--fp8-format") or line.has("--fp4-format")
    if not line.has("--num-experts") or low_precision or line.has("--hybrid-layer-pattern"):
        return (_MODULES, *partial_modules(line))
    shared = line.value("--expert-model-parallel-size") not in ("", "1")
    exchange = ("--cg-moe-exchange", "peer") if shared else ()
    return ("--cg-grouped-gemm", "torch", _MODULES, "attn", "moe", *exchange)


def captured(line: LaunchLine) -> str:
    """What the graphs of an edited line hold, in words; empty for an eager run."""
    if not line.has("--cuda-graph-impl"):
        return ""
    words, _ = split_flags(line.flags, lambda name: name == _MODULES)
    # Only the last of several counts.
    last = " ".join(words).rpartition(_MODULES)[2]
    return last.replace("=", " ").strip() or "whole layers"


def _is_left_out(flag: str) -> bool:
    return flag in _LEFT_OUT or flag.startswith("--wandb-")


def _is_of_graphs(flag: str) -> bool:
    ours = flag.startswith(("--cuda-graph-", "--cg-"))
    return ours or flag in GRAPH_FLAGS or flag in _OF_OTHER_GRAPHS


def _is_of_fsdp(flag: str) -> bool:
    return "fsdp" in flag or flag in _OF_FSDP
