"""Recomputed and offloaded activations together with graphs.

The rules of selective recompute are assertions of ``TransformerConfig.__post_init__`` in
megatron-core 0.19.2, in our words. Megatron refuses full recompute altogether; here each layer
recomputes itself inside its graph (``integrations/megatron/full_recompute.py``).
"""

from __future__ import annotations

from megatron_cg.arguments.rule import Configuration, Facts, Rule
from megatron_cg.arguments.schema import WHOLE_LAYER, mtp_is_repeated, recomputes_layers

_PARTS = ("attn", "mlp", "moe", "mamba")
"""The scopes that together are a layer."""

_REPEATED_DRAW = (
    "the recomputation would have to draw the same random numbers a second time, which Megatron "
    "does not do inside a graph"
)


def _recomputes_in_graph(given: Configuration, module: str, scope: str) -> bool:
    return given.run.recomputes(module) and given.run.captures(scope)


def _partial_layers(given: Configuration) -> list[Facts]:
    """The first layer of which a graph holds a part, not the whole; 0 if that is not known.

    The checkpoint of a whole layer is inside its graph, so the graph holds the whole layer. A layer
    of MTP is like the last one, and has all scopes of the run.
    """
    run = given.run
    if not recomputes_layers(run):
        return []
    if given.layers is None:
        return [] if run.is_whole_layer else [{"layer": 0}]
    layers = list(given.layers)
    if run.mtp_num_layers:
        last, _ = layers[-1]
        layers.append((last, last.intersection(run.scope_names)))
    for index, (has, captured) in enumerate(layers):
        if captured and WHOLE_LAYER not in captured and not has.intersection(_PARTS) <= captured:
            return [{"layer": index}]
    return []


_FULL = (
    Rule(
        "full-recompute-of-parts",
        _partial_layers,
        "--recompute-granularity full with graphs of a part of a layer (layer {layer})",
        "the recompute of the whole layer would be around this graph, and recompute around a graph "
        "saves no memory",
        "capture whole layers: drop --cuda-graph-modules, or type --cuda-graph-modules attn mlp "
        "(dense) or attn moe (experts, with --cg-grouped-gemm torch or drop and pad); or type "
        "--recompute-granularity selective",
    ),
    Rule(
        "dropout-in-full-recompute",
        lambda c: (
            recomputes_layers(c.run)
            and (c.run.attention_dropout != 0.0 or c.run.hidden_dropout != 0.0)
        ),
        "--recompute-granularity full with --attention-dropout {run.attention_dropout} and "
        "--hidden-dropout {run.hidden_dropout}",
        _REPEATED_DRAW,
        "type --attention-dropout 0 --hidden-dropout 0, or drop --recompute-granularity",
    ),
    Rule(
        "jitter-in-full-recompute",
        lambda c: recomputes_layers(c.run) and c.run.moe_input_jitter_eps is not None,
        "--recompute-granularity full with --moe-input-jitter-eps {run.moe_input_jitter_eps}",
        _REPEATED_DRAW,
        "drop --moe-input-jitter-eps, or drop --recompute-granularity",
    ),
    Rule(
        "low-precision-full-recompute",
        lambda c: recomputes_layers(c.run) and (c.run.fp8 is not None or c.run.fp4 is not None),
        "--recompute-granularity full with FP8 or FP4",
        "Megatron recomputes such layers by Transformer Engine's own checkpoint, and that has not "
        "been made to work inside a graph",
        "drop --fp8-format and --fp4-format, or drop --recompute-granularity",
    ),
    Rule(
        "hybrid-full-recompute",
        lambda c: recomputes_layers(c.run) and c.run.hybrid_layer_pattern is not None,
        "--recompute-granularity full in a hybrid model",
        "the checkpoint is moved into the layers of a TransformerBlock alone, and this model has a "
        "HybridStack",
        "type --recompute-granularity selective, or drop --recompute-granularity",
    ),
    Rule(
        "repeated-prediction-full-recompute",
        lambda c: (
            recomputes_layers(c.run)
            and c.run.recompute_method == "uniform"
            and mtp_is_repeated(c.run)
        ),
        "--recompute-granularity full --recompute-method uniform with --mtp-use-repeated-layer and "
        "--mtp-num-layers {run.mtp_num_layers}",
        "each use of a weight then has its own backward pass, and Megatron-FSDP overwrites the "
        "gradient of the use before it while that is being reduced, and reduces it again "
        "(megatron-core 0.19.2). Gradients are lost or counted several times, and no two runs are "
        "equal, without graphs as well",
        "type --recompute-method block, which leaves that layer out, or drop "
        "--mtp-use-repeated-layer",
    ),
    Rule(
        "distributed-full-recompute",
        lambda c: recomputes_layers(c.run) and c.run.distribute_saved_activations,
        "--distribute-saved-activations",
        "a graph reads its input from static memory of its own, so there is nothing to distribute",
        "drop --distribute-saved-activations, or add --sequence-parallel instead",
    ),
)

_SELECTIVE = (
    Rule(
        "moe-recompute-around-router",
        lambda c: c.run.recomputes("moe") and "moe_router" in c.run.cuda_graph_modules,
        "--recompute-modules moe with --cuda-graph-modules moe_router",
        "the recomputed MoE layer contains the router's graph, and what is recomputed must lie "
        "wholly inside or wholly outside of a graph",
        "type --recompute-modules moe_act, or drop moe_router from --cuda-graph-modules",
    ),
    Rule(
        "dropout-in-recomputed-attention",
        lambda c: c.run.attention_dropout != 0.0 and _recomputes_in_graph(c, "core_attn", "attn"),
        "--attention-dropout {run.attention_dropout} in attention that is captured and recomputed",
        _REPEATED_DRAW,
        "type --attention-dropout 0, or leave core_attn out of --recompute-modules",
    ),
    Rule(
        "dropout-in-recomputed-mlp",
        lambda c: (
            c.run.hidden_dropout != 0.0
            and any(_recomputes_in_graph(c, part, part) for part in ("mlp", "moe"))
        ),
        "--hidden-dropout {run.hidden_dropout} in an MLP or MoE layer that is captured and "
        "recomputed",
        _REPEATED_DRAW,
        "type --hidden-dropout 0, or leave mlp and moe out of --recompute-modules",
    ),
)

_OFFLOADING = (
    Rule(
        "cpu-offloading",
        lambda c: c.run.cpu_offloading,
        "--cpu-offloading-num-layers",
        "activations are then moved to the CPU by Python code that a replay does not run",
        "drop --cpu-offloading-num-layers",
    ),
    Rule(
        "activation-offloading",
        lambda c: c.run.fine_grained_activation_offloading,
        "--fine-grained-activation-offloading",
        "the backward graph of a layer reloads activations of the layer before it, so one layer "
        "that runs eagerly beside replays would make gradients wrong, without an error",
        "drop --fine-grained-activation-offloading",
    ),
)

RULES = (*_FULL, *_SELECTIVE, *_OFFLOADING)
