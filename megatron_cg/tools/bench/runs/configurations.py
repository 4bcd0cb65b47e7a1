"""Defines the configurations and the flags that make each of them. Pure.

Relied on: megatron-core 0.19.2. ``--cuda-graph-impl full_iteration`` needs
``--no-check-for-nan-in-loss-and-grad`` (``validate_args``) and takes no ``--cuda-graph-modules``.
It captures forward and backward of all microbatches in the step after ``--cuda-graph-warmup-steps``
(``full_cuda_graph.py``). Under Megatron-FSDP it sets ``megatron_fsdp_cuda_graph_mode`` and
``fsdp_all_gather_in_start_param_sync`` itself (``training.py``). The optimizer step stays outside
the graph. An MoE model with dropless routing reads token counts on the host, so Megatron's graph
of an iteration cannot hold it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from megatron_cg.tools.align.command import GRAPH_FLAGS

EAGER, EAGER_FAST_PATH, DDP_EAGER = "fsdp-eager", "fsdp-eager-fast-path", "ddp-eager"
GRAPHS, PLAIN, DDP_GRAPHS = "fsdp-graphs", "fsdp-graphs-plain", "ddp-graphs"
FULL = "fsdp-full-iteration"
TORCH_EAGER, EXPERTS = "fsdp-eager-torch-gemm", "fsdp-graphs-experts"
PEER_EXPERTS = "fsdp-graphs-experts-peer"
NATIVE_GRAPHS = "fsdp-graphs-native"


@dataclass(frozen=True)
class Configuration:
    """One way to train the same model."""

    name: str
    description: str
    fsdp: bool = True
    graphs: Literal["none", "partial", "full"] = "partial"
    fast_path: bool = False
    """Whether it has the fast path."""
    models: Literal["all", "dense", "MoE"] = "all"
    """The models that it makes sense for."""
    torch_gemm: bool = False
    """Whether experts compute by torch's grouped GEMM; graphs then hold them."""
    peer: bool = False
    """Whether graphs of experts exchange tokens by peer memory."""
    native: bool = False
    """Whether graphs are captured without Transformer Engine."""
    baseline: str = EAGER
    """The name of the configuration that its ratios are to."""

    def words(self, scopes: Sequence[str], warmup_steps: int) -> list[str]:
        """Its own flags; all configurations share the others."""
        words: list[str] = []
        if self.fsdp and (self.graphs != "none" or self.fast_path):
            # Unsharded parameters at fixed addresses, for graphs or for the fast path.
            words += GRAPH_FLAGS
        words += ["--cg-grouped-gemm", "torch"] if self.torch_gemm else []
        if self.graphs == "none":
            return ["--cuda-graph-impl", "none", *words]
        words += ["--cuda-graph-warmup-steps", str(warmup_steps)]
        if self.graphs == "full":
            return [*words, "--cuda-graph-impl", "full_iteration"]
        words += ["--cuda-graph-impl", "transformer_engine"]
        words += ["--cg-backend", "native"] if self.native else []
        words += ["--cg-moe-exchange", "peer"] if self.peer else []
        if captured := self.captured(scopes):
            words += ["--cuda-graph-modules", *captured]
        if self.fsdp and not self.fast_path:
            words += ["--cg-no-fsdp-fast-path"]
        return words

    def captured(self, scopes: Sequence[str]) -> tuple[str, ...]:
        """What partial graphs hold where others hold ``scopes``."""
        if not self.torch_gemm or not scopes:
            return tuple(scopes)
        return (*(scope for scope in scopes if not scope.startswith("moe")), "moe")

    def suits(self, *, moe: bool) -> bool:
        """Whether it makes sense for a model with experts, or without."""
        return self.models in ("all", "MoE" if moe else "dense")


def _by_name(*configurations: Configuration) -> dict[str, Configuration]:
    return {one.name: one for one in configurations}


CONFIGURATIONS = _by_name(
    Configuration(EAGER, "Megatron-FSDP, eager", graphs="none"),
    Configuration(
        EAGER_FAST_PATH,
        "Megatron-FSDP, eager, with the fast path alone",
        graphs="none",
        fast_path=True,
    ),
    Configuration(GRAPHS, "Megatron-FSDP with partial graphs", fast_path=True),
    Configuration(PLAIN, "Megatron-FSDP with partial graphs, without the fast path"),
    Configuration(
        DDP_EAGER, "DDP with the distributed optimizer, eager", fsdp=False, graphs="none"
    ),
    Configuration(
        DDP_GRAPHS, "DDP with Megatron's own partial graphs of the same scopes", fsdp=False
    ),
    Configuration(
        FULL, "Megatron-FSDP with a graph of the whole iteration", graphs="full", models="dense"
    ),
)
"""The configurations that a table has unless others are asked for."""

_OF_MOE: dict[str, Any] = {"models": "MoE", "torch_gemm": True, "baseline": TORCH_EAGER}
"""Dropless experts in graphs, and the baseline with the same grouped GEMM."""
ON_REQUEST = _by_name(
    Configuration(
        TORCH_EAGER, "Megatron-FSDP, eager, with torch's grouped GEMM", graphs="none", **_OF_MOE
    ),
    Configuration(
        EXPERTS,
        "Megatron-FSDP with graphs that hold whole MoE layers, by torch's grouped GEMM",
        fast_path=True,
        **_OF_MOE,
    ),
    Configuration(
        PEER_EXPERTS,
        "the same graphs, with tokens exchanged by peer memory",
        fast_path=True,
        peer=True,
        **_OF_MOE,
    ),
    Configuration(
        NATIVE_GRAPHS,
        "Megatron-FSDP with partial graphs by the native backend",
        fast_path=True,
        native=True,
    ),
)
"""The configurations that only ``--only`` selects."""
KNOWN = CONFIGURATIONS | ON_REQUEST
