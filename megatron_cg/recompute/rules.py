"""What layers that recompute themselves in their graphs need."""

from megatron_cg.arguments.rule import Configuration, Facts, Rule
from megatron_cg.arguments.schema import WHOLE_LAYER, mtp_is_repeated, recomputes_layers
from megatron_cg.errors import say

_PARTS = frozenset({"attn", "mlp", "moe", "mamba"})
"""The scopes that together are a layer."""
_SELECTIVE = "{type:--recompute-granularity selective} and {drop:--recompute-num-layers}"
_DRAWS = (
    "the recomputation would have to draw the same random numbers a second time, which Megatron "
    "does not do inside a graph"
)


def _captures_parts(given: Configuration) -> bool:
    """Whether a graph holds a part of a layer that is recomputed as a whole.

    The checkpoint of a whole layer is inside its graph, so the graph holds the whole layer.
    """
    unknown = [(_PARTS, frozenset(given.run.scope_names))]
    layers = unknown if given.layers is None else given.layers
    return recomputes_layers(given.run) and any(
        captured and WHOLE_LAYER not in captured and not has & _PARTS <= captured
        for has, captured in layers
    )


def _against_full_recompute(given: Configuration) -> list[Facts]:
    run = given.run
    found = (
        (
            run.attention_dropout != 0.0 or run.hidden_dropout != 0.0,
            "{flag:--attention-dropout {run.attention_dropout} --hidden-dropout "
            "{run.hidden_dropout}}",
            _DRAWS,
            "{type:--attention-dropout 0 --hidden-dropout 0}",
        ),
        *(
            (is_set, f"{{flag:{flag}}}", _DRAWS, f"{{drop:{flag}}}")
            for is_set, flag in (
                (run.moe_input_jitter_eps is not None, "--moe-input-jitter-eps"),
                (run.moe_router_force_load_balancing, "--moe-router-force-load-balancing"),
                (run.moe_router_force_biased is not None, "--moe-router-force-biased"),
            )
        ),
        (
            run.has_low_precision,
            "FP8 or FP4",
            "Megatron recomputes such layers by Transformer Engine's own checkpoint, and that has "
            "not been made to work inside a graph",
            "{drop:--fp8-format --fp4-format}",
        ),
        (
            run.hybrid_layer_pattern is not None,
            "a hybrid model",
            "the checkpoint is moved into the layers of a TransformerBlock alone, and this model "
            "has a HybridStack",
            "{drop:--recompute-granularity}",
        ),
        (
            run.recompute_method == "uniform" and mtp_is_repeated(run),
            "{flag:--recompute-method uniform} and {flag:--mtp-use-repeated-layer}",
            "each use of a weight has its own backward pass, and Megatron-FSDP overwrites the "
            "gradient of the use before it while that is being reduced (megatron-core 0.19.2), so "
            "no two runs are equal, without graphs as well",
            "{type:--recompute-method block}",
        ),
    )
    if not recomputes_layers(run):
        return []
    return [
        {"what": say(what, run=run), "why": why, "instead": say(instead)}
        for broken, what, why, instead in found
        if broken
    ]


RULES = (
    Rule(
        "full-recompute-of-parts",
        _captures_parts,
        "{flag:--recompute-granularity full} with graphs of a part of a layer",
        "the recompute of the whole layer would be around this graph, and recompute around a graph "
        "saves no memory",
        "capture whole layers: {drop:--cuda-graph-modules}, or "
        "{type:--cuda-graph-modules attn mlp} (dense) or {flag:--cuda-graph-modules attn moe} "
        f"(experts, with {{flag:--cg-grouped-gemm}} or drop and pad); or {_SELECTIVE}",
    ),
    Rule(
        "full-recompute",
        _against_full_recompute,
        "{flag:--recompute-granularity full} with {what}",
        "{why}",
        f"{{instead}}, or {_SELECTIVE}",
    ),
)
