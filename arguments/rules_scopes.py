"""Which scopes a model has, and options of layers that a graph cannot hold.

Some rules repeat assertions of ``TransformerConfig.__post_init__`` in megatron-core 0.19.2, before
a model is built. With the others the host waits for the device, or Python code runs at every step,
which a replay does not run.
"""

from __future__ import annotations

from dataclasses import asdict

from megatron_cg.arguments.layers import read_tokens
from megatron_cg.arguments.layout import available_scopes
from megatron_cg.arguments.rule import ROUTER_SCOPES, Configuration, Facts, Rule
from megatron_cg.arguments.schema import WHOLE_LAYER, RunArguments

_ROUTER_INSTEAD = "--cuda-graph-modules attn moe_router"
_WITHOUT_MOE = "or leave the MoE layers out: type --cuda-graph-modules attn"
_DROP_AND_PAD = "--moe-expert-capacity-factor 1.0 --moe-pad-expert-input-to-capacity"
_GEMM = "--cg-grouped-gemm torch"
_PART = {
    "attn": "attention",
    "mlp": "a dense MLP",
    "moe": "experts",
    "moe_router": "experts",
    "moe_preprocess": "experts",
    "mamba": "a Mamba mixer",
    WHOLE_LAYER: "a layer",
}
_PACKS = (
    "packed sequences (--sft, --rl-use-sequence-packing or --dataloader-inter-document-masking)"
)


def _has_scope(given: Configuration, *scopes: str) -> bool:
    return set(scopes) <= set(given.run.cuda_graph_modules)


def _moe_scopes_without_experts(given: Configuration) -> list[Facts]:
    asked = [scope for scope in given.run.cuda_graph_modules if scope in ROUTER_SCOPES]
    return [{"scopes": " ".join(asked)}] if asked and not given.run.is_moe else []


def _preprocess_synchronizes(given: Configuration) -> bool:
    run = given.run
    return (
        _has_scope(given, "moe_preprocess")
        and run.is_moe
        and not run.drops_and_pads
        and run.moe_token_dispatcher_type == "alltoall"
        and (
            run.moe_expert_capacity_factor is not None
            or run.moe_router_padding_for_fp8
            or run.moe_router_padding_for_quantization
        )
    )


def _scopes_asked_for(run: RunArguments) -> list[str]:
    """The run's scopes; MoE scopes of a model without experts break a rule of their own."""
    return [scope for scope in run.scope_names if run.is_moe or scope not in ROUTER_SCOPES]


def _scopes_on_no_layer(given: Configuration) -> list[Facts]:
    layers = given.layers
    if layers is None:
        return []
    return [
        {"scope": scope, "count": len(layers), "part": _PART[scope]}
        for scope in _scopes_asked_for(given.run)
        if not any(scope in has for has, _ in layers)
    ]


def _scopes_deselected(given: Configuration) -> list[Facts]:
    """Scopes that ``--cg-layers`` takes from each layer that has them, with the first of these."""
    layers = given.layers or []
    return [
        {"scope": scope, "first": next(i for i, (has, _) in enumerate(layers) if scope in has)}
        for scope in _scopes_asked_for(given.run)
        if any(scope in has for has, _ in layers)
        and not any(scope in captured for _, captured in layers)
    ]


def _whole_moe_layers(given: Configuration) -> list[Facts]:
    moe = given.whole_moe_layers
    if not moe or given.run.drops_and_pads or given.has_torch_experts:
        return []
    return [{"count": len(moe), "first": moe[0]}]


def _layer_selection(given: Configuration) -> list[Facts]:
    """``--cg-layers`` must be well formed and match the run's scopes and layers."""
    run = given.run
    selection, broken = read_tokens(given.graph.cg_layers)
    unfit = selection.violations(run.cuda_graph_modules, run.num_layers, available_scopes(run))
    return [
        {**asdict(violation), "found": violation.found.removeprefix("--cg-layers ")}
        for violation in (*broken, *unfit)
    ]


SCOPE_RULES = (
    Rule(
        "moe-and-router",
        lambda c: _has_scope(c, "moe", "moe_router"),
        "--cuda-graph-modules has both moe and moe_router",
        "moe captures the whole MoE layer, the router in it, so the router would be captured twice",
        "keep one of the two: type --cuda-graph-modules attn moe_router (any MoE model), or "
        f"--cuda-graph-modules attn moe with {_GEMM} or {_DROP_AND_PAD}",
    ),
    Rule(
        "preprocess-without-router",
        lambda c: _has_scope(c, "moe_preprocess") and not _has_scope(c, "moe_router"),
        "--cuda-graph-modules has moe_preprocess without moe_router",
        "Megatron captures moe_preprocess only as the continuation of the router's graph",
        "type --cuda-graph-modules attn moe_router moe_preprocess",
    ),
    Rule(
        "moe-without-experts",
        _moe_scopes_without_experts,
        "--cuda-graph-modules {scopes} in a model without experts",
        "these scopes are parts of a MoE layer",
        "type --cuda-graph-modules attn mlp, or make it a MoE model with --num-experts 8",
    ),
    # A graph can hold experts if it has fixed shapes: by drop and pad, or by counts on the GPU.
    Rule(
        "moe-without-drop-and-pad",
        lambda c: (
            _has_scope(c, "moe")
            and c.run.is_moe
            and not c.run.drops_and_pads
            and not c.has_torch_experts
        ),
        "--cuda-graph-modules moe without drop-and-pad experts",
        "how many tokens each expert gets then differs from step to step, and Transformer "
        "Engine's grouped GEMM reads it on the CPU, which a capture does not allow",
        f"add {_GEMM}, or add {_DROP_AND_PAD}, or type {_ROUTER_INSTEAD}",
    ),
    Rule(
        "preprocess-synchronizes",
        _preprocess_synchronizes,
        "--cuda-graph-modules moe_preprocess with --moe-token-dispatcher-type alltoall and a "
        "capacity factor or router padding for FP8 or FP4",
        "the dispatcher then copies token counts to the CPU and waits for them within preprocess, "
        "which a capture does not allow",
        "drop moe_preprocess from --cuda-graph-modules, or make the experts drop and pad: "
        f"{_DROP_AND_PAD}",
    ),
    Rule(
        "preprocess-shared-expert",
        lambda c: (
            _has_scope(c, "moe_preprocess") and c.run.is_moe and c.run.moe_shared_expert_overlap
        ),
        "--cuda-graph-modules moe_preprocess with --moe-shared-expert-overlap",
        "the graph would end between two stages of the shared expert, which Megatron (0.19.2) "
        "leaves in a state that its next pass does not accept",
        "drop moe_preprocess from --cuda-graph-modules, or drop --moe-shared-expert-overlap",
    ),
    Rule(
        "scope-selects-nothing",
        _scopes_on_no_layer,
        "--cuda-graph-modules {scope}",
        "none of the model's {count} layers has {part}, so nothing would be captured",
        "drop {scope} from --cuda-graph-modules",
    ),
    Rule(
        "scope-selects-nothing",
        _scopes_deselected,
        "--cg-layers leaves {scope} on no layer that has it",
        "the first layer with it is layer {first}",
        "type --cg-layers {scope}:{first}-",
    ),
    Rule(
        "whole-moe-layer",
        _whole_moe_layers,
        "an empty --cuda-graph-modules captures whole layers, {count} of them MoE layers (the "
        "first is layer {first}) without drop-and-pad",
        "how many tokens each expert gets differs from step to step and is read back to the CPU, "
        "which a capture does not allow",
        f"add {_GEMM}, or type {_ROUTER_INSTEAD}, or add {_DROP_AND_PAD}, or name the dense layers "
        "with --cg-layers layer:0",
    ),
    Rule("cg-layers", _layer_selection, "--cg-layers {found}", "{reason}", "{remedy}"),
)
"""They give Megatron's own answer, or a stricter one."""

_OPTIONS = (
    Rule(
        "sinkhorn-router",
        lambda c: c.captures_router and "sinkhorn" in c.run.moe_router_load_balancing_type,
        "--moe-router-load-balancing-type sinkhorn with a captured MoE router",
        "its iteration ends when a value on the GPU is small enough, so the CPU waits for that "
        "value in every round, which a capture does not allow",
        f"type --moe-router-load-balancing-type aux_loss, {_WITHOUT_MOE}",
    ),
    Rule(
        "dispatcher-reads-counts",
        lambda c: c.captures_experts and c.run.moe_token_dispatcher_type == "allgather",
        "--moe-token-dispatcher-type allgather in MoE layers that are captured with their experts",
        "this dispatcher copies the number of each expert's tokens to the CPU and waits for it, "
        "with drop-and-pad too, which a capture does not allow",
        "type --moe-token-dispatcher-type alltoall, or --cuda-graph-modules attn moe_router",
    ),
    Rule(
        "routing-trace",
        lambda c: c.captures_router and c.run.moe_routing_trace_path is not None,
        "--moe-routing-trace-path with a captured MoE router",
        "Megatron writes the choices of a router from a hook on it, and a replay runs no hook of a "
        "module inside the graph: nothing would be written",
        f"drop --moe-routing-trace-path, {_WITHOUT_MOE}",
    ),
    Rule(
        "largest-attention-logits",
        lambda c: c.run.captures("attn") and (c.run.qk_clip or c.run.log_max_attention_logit),
        "--qk-clip or --log-max-attention-logit with captured attention",
        "Python code of the attention hands the largest logits of a step over to the optimizer "
        "and the log, and a replay does not run it: nothing would be clipped or logged",
        "drop --qk-clip and --log-max-attention-logit (with --bf16, megatron-core 0.19.2 does not "
        "find the layers of a Megatron-FSDP model and ends with an AttributeError, without graphs "
        "too), or, without --bf16, type --cuda-graph-modules with scopes other than attn",
    ),
)

_PACKED_SEQUENCES = (
    Rule(
        "packed-sequences",
        lambda c: c.run.packs_sequences and (c.run.captures("attn") or c.run.captures("mamba")),
        f"{_PACKS} with captured attention or Mamba mixers",
        "a pack's boundaries reach the layer in a PackedSeqParams, and Megatron's graphs take only "
        "tensors (cu_seqlens differs from step to step in length and values, max_seqlen is a "
        "number)",
        "leave attn and mamba out of --cuda-graph-modules: name scopes behind attention, such as "
        "mlp or moe_router",
    ),
    Rule(
        "packed-microbatches",
        lambda c: c.run.packs_sequences and (c.run.micro_batch_size or 1) > 1,
        f"{_PACKS} with --micro-batch-size {{run.micro_batch_size}}",
        "Megatron joins the samples of a microbatch into one, and its graphs have the shape of "
        "separate samples: none would be replayed",
        "type --micro-batch-size 1, and a longer --seq-length for as many tokens",
    ),
)

RULES = (*SCOPE_RULES, *_OPTIONS, *_PACKED_SEQUENCES)
