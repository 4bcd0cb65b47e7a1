"""Training loops on megatron-core's classes alone: what is trained, and where each result goes.

The form of NVIDIA/Megatron-LM#4232's alignment test: a small MoE ``GPTModel`` under
``FullyShardedDataParallel``, random tokens, 20 steps, eagerly and with graphs.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from packaging.version import Version

from megatron_cg.upstream.symbols import installed_version

HAS_V2 = Version(installed_version("megatron-core") or "0").release >= (0, 20)
WITHOUT_V2 = "megatron-core has Megatron-FSDP v2 for its models from 0.20 on"
STEPS, MICROBATCHES, BATCH = 20, 2, 2
VERIFY_STEPS = 2
"""Not all: the others show that training continues with the numbers of graphs."""
WARMUP = 3 if torch.cuda.is_available() else 1
"""Tapes need no step in which cuBLAS and the caching allocator settle."""
PREPROCESS = ("attn", "moe_router", "moe_preprocess")
EXPERTS = ("attn", "moe")
"""Without drop and pad: the models' experts compute by torch's grouped GEMM."""
EAGER, ENABLED, NATIVE = "eager", "enable", "native"
GROUPED = {"moe_grouped_gemm": True}
EP2 = {"expert_model_parallel_size": 2}
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


@dataclass(frozen=True)
class Group:
    """What one set of processes trains: a model in one parallel layout."""

    name: str
    config: dict[str, Any] = field(default_factory=dict)
    """Fields of TransformerConfig; sizes of parallelism are among them."""
    scopes: tuple[tuple[str, ...], ...] = (PREPROCESS,)
    dtype: str = "bf16"
    driver: str = ENABLED
    """A helper of Megatron after ``megatron_cg.enable()``; NATIVE: with the native backend."""
    local: bool = False
    """The layers are those of Megatron's local spec instead of Transformer Engine's."""
    moe_rows: float | None = None
    """As ``--cg-moe-rows``; steps that exceed it are repeated."""
    moe_stash: float | None = None
    """As ``--cg-moe-stash``; no step exceeds it."""
    fsdp_version: int = 1
    """As ``--megatron-fsdp-version``; 2 is of megatron-core 0.20."""

    @property
    def lacks(self) -> str:
        """What the installed megatron-core has not; empty if the group can be trained."""
        return "" if self.fsdp_version == 1 or HAS_V2 else WITHOUT_V2

    def runs(self) -> list[Run]:
        graphed = [Run(self.dtype, scopes, self.driver) for scopes in self.scopes]
        return [Run(self.dtype), *graphed]


@dataclass(frozen=True)
class Run:
    dtype: str
    scopes: tuple[str, ...] = ()
    driver: str = EAGER

    @property
    def name(self) -> str:
        return "-".join((self.dtype, self.driver, *self.scopes))


GROUPS = {
    group.name: group
    for group in (
        Group("default", scopes=(("attn",), PREPROCESS, ("moe_router",))),
        Group("tp2", {"tensor_model_parallel_size": 2, "sequence_parallel": True}),
        Group("ep2", EP2),
        Group("mtp", {"mtp_num_layers": 1}, dtype="fp32"),
        # One layer predicts twice; it stays eager.
        Group("mtp-repeated", {"mtp_num_layers": 2, "mtp_use_repeated_layer": True}),
        Group("native", driver=NATIVE),
        Group("native-local", {"moe_grouped_gemm": False}, dtype="fp32", driver=NATIVE, local=True),
        Group("dropless-ep2", {**GROUPED, **EP2}, scopes=(EXPERTS,)),
        Group(
            "dropless-recompute",
            {**GROUPED, **RECOMPUTE, **EP2, "mtp_num_layers": 1},
            scopes=(EXPERTS,),
        ),
        Group("dropless-rows", {**GROUPED, **EP2}, scopes=(EXPERTS,), moe_rows=1.0),
        Group("dropless-stash", {**GROUPED, **EP2}, scopes=(EXPERTS,), moe_stash=4.0),
        Group("v2", fsdp_version=2),
        Group("v2-dropless-ep2", {**GROUPED, **EP2}, scopes=(EXPERTS,), fsdp_version=2),
        Group(
            "v2-dropless-rows",
            {**GROUPED, **EP2, "mtp_num_layers": 1},
            scopes=(EXPERTS,),
            moe_rows=1.0,
            fsdp_version=2,
        ),
        Group("latent-attention", {"multi_latent_attention": True, "rope_type": "rope", **LATENT}),
    )
}
