"""Every option of Megatron's parser that shapes a layer, and how its capture ends.

``TRIED`` are traced on the meta device, ``READ`` cannot be built there and were read, ``OUTSIDE``
do not change what a captured layer runs. An option of ``GROUPS`` that is in none of them is new.
"""

from __future__ import annotations

from dataclasses import dataclass

from megatron_cg.tools.plan.request import _PRESET_FLAGS

GROUPS = (
    *("moe", "mla", "network size", "experimental_attention_variant"),
    "transformer configuration",
)
"""Groups of ``megatron.training.arguments`` (megatron-core 0.19.2) that configure layers."""

CAPTURED, HOST_READ, REFUSED = "captured", "host read", "refused"
"""How a trace ends: as a graph, at a read on the host, or with Megatron's own refusal."""

_COMMON = (
    "--num-layers 2 --hidden-size 64 --ffn-hidden-size 128 --num-attention-heads 4 --seq-length 32 "
    "--max-position-embeddings 32 --vocab-size 64 --micro-batch-size 2 --swiglu "
    "--position-embedding-type rope --untie-embeddings-and-output-weights --disable-bias-linear "
    "--normalization RMSNorm --attention-dropout 0 --hidden-dropout 0"
)
_GQA = "--group-query-attention --num-query-groups 2"
_MOE = (
    f"{_GQA} --num-experts 4 --moe-ffn-hidden-size 32 --moe-router-topk 2 --moe-grouped-gemm "
    "--moe-token-dispatcher-type alltoall --moe-aux-loss-coeff 0.01"
)
_FULL = "--recompute-granularity full --recompute-method"
_PAD = f"{_MOE} --moe-expert-capacity-factor 1.0 --moe-pad-expert-input-to-capacity"
_MLA = (
    "--multi-latent-attention --q-lora-rank 16 --kv-lora-rank 16 --qk-head-dim 16 "
    "--qk-pos-emb-head-dim 16 --v-head-dim 16 --rope-type rope"
)
_MAMBA = (
    f"{_GQA} --hybrid-layer-pattern M* --mamba-state-dim 16 --mamba-head-dim 16 "
    "--mamba-num-groups 2 --disable-mamba-mem-eff-path"
)
BASES = {
    "dense": (_GQA, "attn mlp"),
    "whole": (_GQA, ""),
    "router": (_MOE, "attn moe_router"),
    "preprocess": (_MOE, "attn moe_router moe_preprocess"),
    "experts": (_PAD, "attn moe"),
    "whole experts": (_PAD, ""),
    "latent": (_MLA, "attn mlp"),
    "mamba": (_MAMBA, "mamba attn"),
}
"""Tiny models by name: flags beside the common ones, and scopes; none is the whole layer."""


@dataclass(frozen=True)
class Try:
    """Flags on a base, and how they end."""

    base: str
    words: str = ""
    end: str = CAPTURED
    rule: str = ""
    """Our rule that refuses them."""
    without: str = ""
    """A flag of the base that is left out."""

    def __str__(self) -> str:
        return " ".join(
            filter(None, (self.base, self.words, self.without and f"no {self.without}"))
        )

    @property
    def argv(self) -> list[str]:
        """The whole command line."""
        more, scopes = BASES[self.base]
        words = [*_COMMON.split(), *_PRESET_FLAGS, *more.split()]
        if self.base == "mamba":  # whose pattern says how many layers there are
            del words[:2]
        if scopes:
            words += ["--cuda-graph-modules", *scopes.split()]
        return [word for word in words if word != self.without] + self.words.split()


def _each(bases: str, *words: str) -> list[Try]:
    return [Try(base, one) for base in bases.split(",") for one in words]


_BALANCE = "--moe-router-load-balancing-type"
_SINKHORN = f"{_BALANCE} sinkhorn --moe-aux-loss-coeff 0"
_SHARED = "--moe-shared-expert-intermediate-size 32"
_FLEX = "--moe-token-dispatcher-type flex --moe-flex-dispatcher-backend"

TRIED = (
    *(Try(base) for base in BASES),
    *(Try(base, without="--disable-bias-linear") for base in ("dense", "whole")),
    # Routers.
    *(Try(base, _SINKHORN, HOST_READ, "sinkhorn-router") for base in ("router", "preprocess")),
    Try("experts", _SINKHORN, REFUSED, "sinkhorn-router"),
    Try("whole experts", _SINKHORN, REFUSED, "sinkhorn-router"),
    Try("dense", f"{_MOE} {_SINKHORN} --cuda-graph-modules attn"),
    *_each(
        "router,experts",
        f"{_BALANCE} seq_aux_loss",
        f"{_BALANCE} global_aux_loss",
        f"{_BALANCE} none --moe-aux-loss-coeff 0",
        f"{_BALANCE} aux_loss global_aux_loss --moe-aux-loss-coeff 0.01 0.01",
    ),
    Try("router", f"{_BALANCE} quantile_balancing --moe-aux-loss-coeff 0"),
    Try("router", "--moe-expert-capacity-factor 1.0"),
    Try("router", "--moe-expert-capacity-factor 1.0 --moe-token-drop-policy position"),
    *_each(
        "preprocess,experts",
        "--moe-router-pre-softmax",
        "--moe-router-pre-softmax --moe-router-topk-scaling-factor 2.5",
        "--moe-router-score-function sigmoid",
        "--moe-router-score-function sqrtsoftplus",
        "--moe-router-dtype fp32",
        "--moe-router-dtype fp64",
        "--moe-router-score-function sigmoid --moe-router-enable-expert-bias",
        "--moe-router-force-load-balancing",
        "--moe-router-force-biased 0.5",
        "--moe-router-force-biased=-0.5",
        "--moe-router-num-groups 2 --moe-router-group-topk 1",
        "--moe-z-loss-coeff 0.01",
        "--moe-input-jitter-eps 0.01",
        "--moe-per-layer-logging",
        "--moe-apply-probs-on-input --moe-router-topk 1 --moe-router-pre-softmax",
        "--moe-latent-size 16",
        "--moe-mlp-glu-interleave-size 16",
        _SHARED,
        f"{_SHARED} --moe-shared-expert-gate",
        f"{_SHARED} --moe-shared-expert-gate --moe-shared-expert-overlap",
        "--expert-model-parallel-size 2",
        "--tensor-model-parallel-size 2 --sequence-parallel",
    ),
    *_each("router,whole experts", f"{_SHARED} --moe-shared-expert-overlap"),
    Try("router", "--moe-routing-trace-path traces", rule="routing-trace"),
    Try("whole experts", "--moe-routing-trace-path traces", rule="routing-trace"),
    *_each("router,experts,whole experts", "--moe-enable-routing-replay"),
    # Dispatchers and experts.
    *(Try(base, without="--moe-grouped-gemm") for base in ("preprocess", "experts")),
    *_each("router,preprocess", "--moe-token-dispatcher-type allgather"),
    *(
        Try(base, "--moe-token-dispatcher-type allgather", HOST_READ, "dispatcher-reads-counts")
        for base in ("experts", "whole experts")
    ),
    Try("preprocess", "--moe-expert-capacity-factor 1.0", REFUSED, "preprocess-synchronizes"),
    Try(
        "preprocess",
        "--moe-router-padding-for-fp8 --fp8-format hybrid",
        REFUSED,
        "preprocess-synchronizes",
    ),
    Try("preprocess", "--moe-layer-recompute", REFUSED, "moe-recompute-around-router"),
    Try("experts", "--moe-layer-recompute"),
    Try("preprocess", "--overlap-dispatch-backward-with-experts-wgrad"),
    Try("experts", "--moe-single-grouped-weight", REFUSED),
    Try("experts", f"{_FLEX} deepep", REFUSED),
    *_each("dense,whole,latent,experts,whole experts", f"{_FULL} uniform --recompute-num-layers 1"),
    Try("whole", f"{_FULL} block --recompute-num-layers 1"),
    Try("router", f"{_FULL} block --recompute-num-layers 1", rule="full-recompute-of-parts"),
    Try("mamba", f"{_FULL} block --recompute-num-layers 1", rule="hybrid-full-recompute"),
    # Norms, activations, attention.
    *_each("dense,whole", "--normalization LayerNorm", "--hidden-dropout 0.1"),
    *_each(
        "dense",
        "--normalization LayerNorm --apply-layernorm-1p",
        "--norm-epsilon 1e-6",
        "--fused-residual-rmsnorm",
        "--apply-residual-connection-post-layernorm",
        "--fp32-residual-connection",
        "--qk-layernorm",
        "--qk-l2-norm",
        "--attention-output-gate",
        "--add-qkv-bias",
        "--kv-channels 32",
        "--attention-dropout 0.1",
        "--attention-backend flash",
        "--attention-backend fused",
        "--attention-backend unfused",
        "--no-bias-swiglu-fusion --glu-linear-offset 0.5",
        "--activation-func-clamp-value 7.0",
        "--no-bias-dropout-fusion --hidden-dropout 0.1",
        "--use-mup --mup-base-hidden-size 32",
        "--mlp-chunks-for-training 2",
        "--use-grouped-gemm-for-dense-mlp",
        "--deterministic-mode",
        "--disable-bf16-reduced-precision-matmul",
        "--fp8-format hybrid",
        "--mtp-num-layers 1",
        "--recompute-granularity selective",
        "--tensor-model-parallel-size 2 --sequence-parallel --tp-comm-overlap",
        "--use-kitchen-attention",
        "--window-size 8,0",
        "--window-size 8,0 --window-attn-skip-freq 2",
        "--rotary-interleaved --no-rope-fusion",
        "--rotary-percent 0.5",
        "--no-rope-freq 2",
        "--use-rope-scaling",
        "--position-embedding-type none",
        "--position-embedding-type learned_absolute",
        "--position-embedding-type yarn",
        "--position-embedding-type mrope --mrope-section 1 1 2",
    ),
    *(
        Try("dense", words, without="--swiglu")
        for words in (
            *("", "--squared-relu", "--quick-geglu", "--openai-gelu", "--no-bias-gelu-fusion"),
            "--squared-relu --use-fused-weighted-squared-relu",
        )
    ),
    *_each(
        "latent",
        "--qk-layernorm",
        "--mla-down-proj-fusion",
        "--rotary-scaling-factor 2",
        "--mscale 0.5 --mscale-all-dim 0.5",
        "--rope-type yarn",
    ),
    *_each("mamba", "--mamba-num-heads 4", "--mamba-training-ssm-states-dtype fp32"),
    Try("mamba", without="--disable-mamba-mem-eff-path"),
)

READ = {
    "kernels of Transformer Engine, which its Python calls without waiting": (
        "--moe-router-fusion --moe-permute-fusion --softmax-type --use-te-activation-func "
        "--use-transformer-engine-op-fuser --fp4-format --fp4-recipe --context-parallel-size "
        "--hierarchical-context-parallel-sizes --transformer-impl --flash-attention-version "
        "--apply-query-key-layer-scaling --use-grouped-gemm-for-shared-expert"
    ),
    "refused by preprocess-synchronizes; TransformerConfig asks for FP8, which no trace has": (
        "--moe-router-padding-for-quantization"
    ),
    "refused by largest-attention-logits; TE returns the logits": (
        "--qk-clip --qk-clip-alpha --qk-clip-threshold"
    ),
    "dispatchers of other packages; refused by dispatcher-reads-counts where they read": (
        "--moe-enable-deepep --moe-ncclep-static-shape --moe-ncclep-zero-copy "
        "--moe-permute-fusion-into-hybridep --moe-expert-rank-capacity-factor "
        "--moe-paged-stash --moe-paged-stash-page-size "
        "--moe-paged-stash-buffer-size-factor-cuda --moe-paged-stash-buffer-size-factor-cpu"
    ),
    "of HybridEP alone; a capture that reads on the host fails": (
        "--moe-hybridep-pad-uneven-dispatch-inputs"
    ),
    "experimental attention: kernels of fast_hadamard_transform, cuDNN or FLA; what reads on the "
    "host in dsa_layout.py and gated_delta_net/common.py is for packed sequences alone": (
        "--experimental-attention-variant --linear-attention-freq --linear-conv-kernel-dim "
        "--linear-key-head-dim --linear-value-head-dim --linear-num-key-heads "
        "--linear-num-value-heads --dsa-indexer-n-heads --dsa-indexer-head-dim "
        "--dsa-indexer-topk --dsa-indexer-topk-freq --dsa-indexer-skip-topk-offset "
        "--dsa-indexer-loss-coeff --dsa-indexer-use-sparse-loss --dsa-kernel-backend "
        "--dsa-indexer-rope-interleaved --no-dsa-indexer-rotate-activation "
        "--no-dsa-indexer-scoring-relu --dsa-indexer-k-norm-epsilon --dsa-indexer-k-norm-fp32"
    ),
    "FlashAttention 3 or 4, chosen once": "--batch-invariant-mode",
    "Megatron-FSDP refuses it": "--moe-single-grouped-bias",
}
"""What was read of options that cannot be built on a machine without their packages."""

OUTSIDE = {
    "a number or a choice that an option above leaves free": (
        "--moe-router-bias-update-rate --moe-router-quantile-balancing-ema "
        "--moe-shared-expert-glu-interleave-size --rotary-base --rope-scaling-factor "
        "--rotary-seq-len-interpolation-factor --use-rotary-position-embeddings "
        "--yarn-original-max-position-embeddings --yarn-beta-fast --yarn-beta-slow "
        "--yarn-correction-range-round-to-int --no-yarn-correction-range-round-to-int "
        "--no-position-embedding --mup-width-mult --mup-embedding-mult --mup-output-mult "
        "--mup-base-head-dim --mup-attn-scale-power --kitchen-attention-backend "
        "--moe-flex-dispatcher-num-sms --moe-deepep-num-sms --moe-hybridep-num-sms "
        "--moe-hybridep-num-blocks-permute --moe-hybridep-num-blocks-unpermute "
        "--moe-hybridep-num-sms-preprocessing --fp8-recipe --fp8-margin --fp8-interval "
        "--fp8-amax-history-len --fp8-amax-compute-algo --no-fp8-wgrad --fp8-output-proj "
        "--fp8-quantizer-factory --fp4-quantizer-factory --first-last-layers-bf16 "
        "--num-layers-at-start-in-bf16 --num-layers-at-end-in-bf16 --bf16 --fp16"
    ),
    "which layers there are, of which kind": (
        "--encoder-num-layers --decoder-num-layers --moe-layer-freq --is-hybrid-model "
        "--mtp-loss-scaling-factor --mtp-use-repeated-layer --mtp-detach-heads "
        "--mtp-hybrid-override-pattern --mtp-standalone"
    ),
    "parallelism and its communication, between or around the kernels of a layer": (
        "--pipeline-model-parallel-comm-backend --pipeline-model-parallel-size "
        "--max-seqlen-per-dp-cp-rank --hybrid-context-parallel --expert-tensor-parallel-size "
        "--tensor-parallel-num-weight-shards --expert-tensor-parallel-num-weight-shards "
        "--no-tp-comm-bulk-wgrad --no-tp-comm-bulk-dgrad --no-tp-comm-overlap-ag "
        "--no-tp-comm-overlap-rs --tp-comm-overlap-rs-dgrad --no-tp-comm-split-ag "
        "--no-tp-comm-split-rs --tp-comm-bootstrap-backend --overlap-moe-expert-parallel-comm "
        "--delay-wgrad-compute --ep-overlap-early-attn-memory-release --use-ring-exchange-p2p "
        "--overlap-p2p-communication-warmup-flush --high-priority-a2a-comm-stream "
        "--microbatch-group-size-per-virtual-pipeline-stage --symmetric-ar-type "
        "--account-for-embedding-in-pipeline-split --account-for-loss-in-pipeline-split"
    ),
    "initial values, and how they are made": (
        "--no-initialization --use-cpu-initialization --init-method-std "
        "--embedding-init-method-std --init-model-with-meta-device --moe-use-upcycling "
        "--moe-upcycling-granularity"
    ),
    "embedding, output layer and loss, which no graph holds": (
        "--cross-entropy-loss-fusion --cross-entropy-fusion-impl --defer-embedding-wgrad-compute "
        "--wgrad-deferral-limit --make-vocab-size-divisible-by --calculate-per-token-loss "
        "--no-clone-scatter-output-in-embedding --bert-no-binary-head"
    ),
    "other models than GPT and hybrid ones": (
        "--relative-attention-num-buckets --relative-attention-max-distance --onnx-safe"
    ),
    "recomputed and offloaded activations, with rules of their own (rules_recompute.py)": (
        "--distribute-saved-activations "
        "--recompute-modules --cpu-offloading-num-layers "
        "--cpu-offloading-retain-pinned-cpu-buffers --fine-grained-activation-offloading "
        "--offload-modules --min-offloaded-tensor-size --delay-offload-until-cuda-graph "
        "--delta-offload-bytes-across-pp-ranks --activation-offload-fraction "
        "--fine-grained-offloading-max-inflight-offloads"
    ),
    "inference": (
        "--cache-mla-latents --flash-decode --inference-cuda-graph-scope "
        "--nccl-all-reduce-for-prefill --inference-fuse-tp-communication "
        "--inference-disable-triton-nvls-kernels --inference-grouped-gemm-backend "
        "--inference-moe-disable-fused-quant-kernels --inference-moe-token-dispatcher-type "
        "--mlp-chunks-for-prefill --moe-pad-experts-for-cuda-graph-inference"
    ),
    "graphs themselves, and logs": (
        "--enable-cuda-graph --cuda-graph-warmup-steps --external-cuda-graph --cuda-graph-impl "
        "--config-logger-dir"
    ),
}
"""Options that do not change which operations a captured layer runs on the host."""


def options_of(table: dict[str, str]) -> list[str]:
    """The options in ``READ`` or ``OUTSIDE``."""
    return [word for words in table.values() for word in words.split()]
