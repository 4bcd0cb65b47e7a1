"""Captured scopes, recompute, and options of layers that a graph cannot hold.

Scopes and selectively recomputed modules that contradict each other are refused by Megatron itself:
``TransformerConfig.__post_init__`` of megatron-core 0.19.2.
"""

from megatron_cg.arguments.rule import Configuration, Facts, Rule

_PACKS = (
    "packed sequences ({flag:--sft}, {flag:--rl-use-sequence-packing} or "
    "{flag:--dataloader-inter-document-masking})"
)


def _layer_selection(given: Configuration) -> list[Facts]:
    """``--cg-layers`` must be well formed and match the run's scopes and layers."""
    selection, broken = given.selection
    unfit = selection.violations(given.run.cuda_graph_modules, given.run.num_layers)
    return [vars(violation) for violation in (*broken, *unfit)]


def _captures_router(given: Configuration) -> bool:
    run = given.run
    return run.is_moe and (run.captures("moe") or run.captures("moe_router"))


RULES = (
    Rule(
        "preprocess-shared-expert",
        lambda c: "moe_preprocess" in c.run.cuda_graph_modules and c.run.moe_shared_expert_overlap,
        "{flag:--cuda-graph-modules moe_preprocess} with {flag:--moe-shared-expert-overlap}",
        "the graph would end between two stages of the shared expert, which Megatron (0.19.2) "
        "leaves in a state that its next pass does not accept",
        "drop moe_preprocess from {flag:--cuda-graph-modules}, or "
        "{drop:--moe-shared-expert-overlap}",
    ),
    Rule(
        "scope-selects-nothing",
        lambda c: c.layers is not None and not any(captured for _, captured in c.layers),
        "no layer of the model has a scope that {flag:--cuda-graph-modules} and {flag:--cg-layers} "
        "select",
        "nothing would be captured",
        "{type:--cuda-graph-modules attn mlp} (dense) or "
        "{flag:--cuda-graph-modules attn moe_router} (MoE), and {drop:--cg-layers}",
    ),
    Rule("cg-layers", _layer_selection, "{found}", "{reason}", "{remedy}"),
    Rule(
        "recompute-of-attention",
        lambda c: (
            c.run.captures("attn")
            and c.run.recomputes("core_attn")
            and c.run.sequence_parallel
            and c.run.hidden_dropout != 0.0
        ),
        "{flag:--recompute-modules core_attn} with captured attention, {flag:--sequence-parallel} "
        "and dropout",
        "attention advances the random state that dropout reads too. Where it is recomputed, an "
        "eager pass does that twice and a graph, in which Megatron recomputes nothing, once",
        "{type:--hidden-dropout 0}, or {drop:--recompute-granularity}",
    ),
    Rule(
        "recompute-of-mhc",
        lambda c: c.run.recomputes("mhc"),
        "{flag:--recompute-modules mhc}",
        "layers then share checkpoints, which are recomputed together behind the last of them. A "
        "replay adds none, and the pass that it is compared with adds some that nothing recomputes",
        "drop mhc from {flag:--recompute-modules}",
    ),
    Rule(
        "activation-offloading",
        lambda c: c.run.fine_grained_activation_offloading,
        "{flag:--fine-grained-activation-offloading}",
        "the backward graph of a layer reloads activations of the layer before it, so one layer "
        "that runs eagerly beside replays would make gradients wrong, without an error",
        "{drop:--fine-grained-activation-offloading}",
    ),
    Rule(
        "routing-replay",
        lambda c: c.run.moe_enable_routing_replay and _captures_router(c),
        "{flag:--moe-enable-routing-replay} with a captured MoE router",
        "Python code of the router records or repeats its choices, and a replay does not run it",
        "{drop:--moe-enable-routing-replay}, or {type:--cuda-graph-modules attn}",
    ),
    Rule(
        "sinkhorn-router",
        lambda c: "sinkhorn" in c.run.moe_router_load_balancing_type and _captures_router(c),
        "{flag:--moe-router-load-balancing-type sinkhorn} with a captured MoE router",
        "its iteration ends when a value on the GPU is small enough, so the CPU waits for it in "
        "each round, which a capture does not allow",
        "{type:--moe-router-load-balancing-type aux_loss}, or {type:--cuda-graph-modules attn}",
    ),
    Rule(
        "largest-attention-logits",
        lambda c: c.run.captures("attn") and (c.run.qk_clip or c.run.log_max_attention_logit),
        "{flag:--qk-clip} or {flag:--log-max-attention-logit} with captured attention",
        "Python code of the attention hands the largest logits of a step over to the optimizer "
        "and the log, and a replay does not run it: nothing would be clipped or logged",
        "{drop:--qk-clip --log-max-attention-logit}, or {type:--cuda-graph-modules} with scopes "
        "other than attn",
    ),
    Rule(
        "packed-sequences",
        lambda c: c.run.packs_sequences and (c.run.captures("attn") or c.run.captures("mamba")),
        f"{_PACKS} with captured attention or Mamba mixers",
        "a pack's boundaries reach the layer in a PackedSeqParams, and Megatron's graphs take only "
        "tensors (cu_seqlens differs from step to step in length and values, max_seqlen is a "
        "number)",
        "leave attn and mamba out of {flag:--cuda-graph-modules}: name scopes behind attention, "
        "such as mlp or moe_router",
    ),
)
