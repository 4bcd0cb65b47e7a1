"""Training loops on megatron-core's classes alone: what is trained, and where each result goes.

The form of NVIDIA/Megatron-LM#4232's alignment test: a small MoE ``GPTModel`` under
``FullyShardedDataParallel``, random tokens, 20 steps, eagerly and with graphs.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

STEPS, MICROBATCHES, BATCH = 20, 2, 2
WARMUP = 3 if torch.cuda.is_available() else 1
"""Tapes need no step in which cuBLAS and the caching allocator settle."""
PREPROCESS = ("attn", "moe_router", "moe_preprocess")
EXPERTS = ("attn", "moe")
"""Without drop and pad: the models' experts compute by torch's grouped GEMM."""
SCOPES = (("attn",), PREPROCESS, ("moe_router",))
EAGER, ENABLED, API, NATIVE = "eager", "enable", "api", "native"
GROUPED = {"moe_grouped_gemm": True}
_HEAD = 64 if torch.cuda.is_available() else 8
LATENT = dict.fromkeys(
    ("q_lora_rank", "kv_lora_rank", "qk_head_dim", "qk_pos_emb_head_dim", "v_head_dim"), _HEAD
)
"""Sizes of multi-latent attention."""
RECOMPUTE = {
    "recompute_granularity": "full",
    "recompute_method": "uniform",
    "recompute_num_layers": 1,
}
DRIVERS = (ENABLED, API)
"""Megatron's TECudaGraphHelper after ``megatron_cg.enable()``; ``GraphedLayers``. NATIVE is
``GraphedLayers`` with the native backend."""
TYPES = ("bf16", "fp32")


@dataclass(frozen=True)
class Group:
    """What one set of processes trains: a model in one parallel layout."""

    name: str
    config: dict[str, Any] = field(default_factory=dict)
    """Fields of TransformerConfig; sizes of parallelism are among them."""
    scopes: tuple[tuple[str, ...], ...] = SCOPES
    dtypes: tuple[str, ...] = TYPES
    drivers: tuple[str, ...] = DRIVERS
    local: bool = False
    """The layers are those of Megatron's local spec instead of Transformer Engine's."""
    moe_rows: float | None = None
    """As ``--cg-moe-rows``; steps that exceed it are repeated."""

    def runs(self) -> list[Run]:
        """Each type eagerly, and with every scope list and driver."""
        return [
            run
            for dtype in self.dtypes
            for run in (
                Run(dtype),
                *(Run(dtype, scopes, driver) for driver in self.drivers for scopes in self.scopes),
            )
        ]


@dataclass(frozen=True)
class Run:
    """One training."""

    dtype: str
    scopes: tuple[str, ...] = ()
    driver: str = EAGER

    @property
    def name(self) -> str:
        """Unique within a group."""
        return "-".join((self.dtype, self.driver, *self.scopes))


GROUPS = {
    group.name: group
    for group in (
        Group("default"),
        Group("tp2", {"tensor_model_parallel_size": 2, "sequence_parallel": True}),
        Group("ep2", {"expert_model_parallel_size": 2}),
        Group("mtp", {"mtp_num_layers": 1}),
        # One layer predicts twice; it stays eager.
        Group(
            "mtp-repeated",
            {"mtp_num_layers": 2, "mtp_use_repeated_layer": True},
            scopes=(PREPROCESS,),
        ),
        Group("native", drivers=(NATIVE,)),
        Group("native-local", {"moe_grouped_gemm": False}, drivers=(NATIVE,), local=True),
        Group("dropless", GROUPED, scopes=(EXPERTS,), dtypes=("bf16",)),
        Group(
            "dropless-ep2",
            {**GROUPED, "expert_model_parallel_size": 2},
            scopes=(EXPERTS,),
            dtypes=("bf16",),
        ),
        Group(
            "dropless-recompute",
            {**GROUPED, **RECOMPUTE, "expert_model_parallel_size": 2, "mtp_num_layers": 1},
            scopes=(EXPERTS,),
            dtypes=("bf16",),
        ),
        Group(
            "dropless-rows",
            {**GROUPED, "expert_model_parallel_size": 2},
            scopes=(EXPERTS,),
            dtypes=("bf16",),
            moe_rows=1.0,
        ),
        Group(
            "latent-attention",
            {"multi_latent_attention": True, "rope_type": "rope", **LATENT},
            scopes=(PREPROCESS,),
            dtypes=("bf16",),
            drivers=(API,),
        ),
    )
}
