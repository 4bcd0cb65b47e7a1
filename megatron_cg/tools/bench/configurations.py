"""Defines the configurations and the flags that make each of them. Pure.

Relied on: megatron-core 0.19.2. ``--cuda-graph-impl full_iteration`` needs
``--no-check-for-nan-in-loss-and-grad`` (``validate_args``) and takes no ``--cuda-graph-modules``.
It captures forward and backward of all microbatches in the step after ``--cuda-graph-warmup-steps``
(``full_cuda_graph.py``). Under Megatron-FSDP it sets ``megatron_fsdp_cuda_graph_mode`` and
``fsdp_all_gather_in_start_param_sync`` itself (``training.py``). The optimizer step stays outside
the graph. An MoE model with dropless routing reads token counts on the host, so such a graph cannot
capture it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from megatron_cg.tools.align.command import BASE_FLAGS, GRAPH_FLAGS

EAGER, DDP_EAGER = "fsdp-eager", "ddp-eager"
GRAPHS, PLAIN, DDP_GRAPHS = "fsdp-graphs", "fsdp-graphs-plain", "ddp-graphs"
FULL = "fsdp-full-iteration"

_FSDP_ONLY = {
    "--use-megatron-fsdp": 0,
    "--data-parallel-sharding-strategy": 1,
    "--ckpt-format": 1,
}
"""Flags in BASE_FLAGS that DDP does not use, with the number of their values."""


@dataclass(frozen=True)
class Configuration:
    """One way to train the same model."""

    name: str
    description: str
    fsdp: bool
    graphs: Literal["none", "partial", "full"]
    dense_only: bool = False
    extra: tuple[str, ...] = ()

    def words(self, scopes: Sequence[str], warmup_steps: int) -> list[str]:
        """Its own flags; all configurations share the others."""
        if self.graphs == "none":
            return ["--cuda-graph-impl", "none"]
        words = ["--cuda-graph-warmup-steps", str(warmup_steps)]
        if self.graphs == "full":
            words += ["--cuda-graph-impl", "full_iteration"]
        else:
            words += ["--cuda-graph-impl", "transformer_engine"]
            words += ["--cuda-graph-modules", *scopes] if scopes else []
        return [*words, *(GRAPH_FLAGS if self.fsdp else ()), *self.extra]


CONFIGURATIONS = {
    configuration.name: configuration
    for configuration in (
        Configuration(EAGER, "Megatron-FSDP, eager", True, "none"),
        Configuration(GRAPHS, "Megatron-FSDP with partial graphs", True, "partial"),
        Configuration(
            PLAIN,
            "the same without the fast path of FSDP's hooks",
            True,
            "partial",
            extra=("--cg-no-fsdp-fast-path",),
        ),
        Configuration(DDP_EAGER, "DDP with the distributed optimizer, eager", False, "none"),
        Configuration(
            DDP_GRAPHS,
            "DDP with Megatron's own partial graphs of the same scopes",
            False,
            "partial",
        ),
        Configuration(
            FULL, "Megatron-FSDP with a graph of the whole iteration", True, "full", dense_only=True
        ),
    )
}


def shared_words(*, fsdp: bool, check_for_nan: bool, rope_fusion: bool) -> list[str]:
    """The flags that all configurations of a table share, as in a production run.

    ``--deterministic-mode`` is not among them. The check for NaN is off by default: it makes DDP
    wait for the GPU at each bucket, but does not check Megatron-FSDP's sharded gradients.
    ``--log-interval`` is large, so that no step includes the time of a log line.
    """
    left_out = {"--deterministic-mode": 0} | ({} if fsdp else _FSDP_ONLY)
    left_out |= {"--no-rope-fusion": 0} if rope_fusion else {}
    words = without(BASE_FLAGS, left_out)
    words += ["--manual-gc", "--log-interval", "1000"]
    return words if check_for_nan else [*words, "--no-check-for-nan-in-loss-and-grad"]


def without(words: Sequence[str], flags: dict[str, int]) -> list[str]:
    """``words`` without these flags and the given number of values after each."""
    kept, skip = [], 0
    for word in words:
        if skip:
            skip -= 1
        elif word in flags:
            skip = flags[word]
        else:
            kept.append(word)
    return kept
