"""Recomputed and offloaded activations together with graphs.

The rules of selective recompute are assertions of ``TransformerConfig.__post_init__`` in
megatron-core 0.19.2, in our words. Megatron refuses full recompute altogether; here each layer
recomputes itself inside its graph (``integrations/megatron/full_recompute.py``).
"""

from __future__ import annotations

from collections.abc import Iterator

from megatron_cg.arguments.layers import read_tokens
from megatron_cg.arguments.layout import available_scopes
from megatron_cg.arguments.rule import Refusal, Rule
from megatron_cg.arguments.schema import (
    WHOLE_LAYER,
    Environment,
    GraphArguments,
    RunArguments,
    prediction_is_repeated,
    recomputes_layers,
)
from megatron_cg.errors import Violation

_PARTS = ("attn", "mlp", "moe", "mamba")
"""The scopes that together are a layer."""


def _recomputes(run: RunArguments, module: str) -> bool:
    return run.recompute_granularity == "selective" and module in run.recompute_modules


def _captures(run: RunArguments, scope: str) -> bool:
    return run.is_whole_layer or scope in run.cuda_graph_modules


def _draws_in_recomputed_mlp(run: RunArguments) -> bool:
    return run.hidden_dropout != 0.0 and any(
        _recomputes(run, module) and _captures(run, module) for module in ("mlp", "moe")
    )


_REPEATED_DRAW = (
    "the recomputation would have to draw the same random numbers a second time, which Megatron "
    "does not do inside a graph"
)


def _partial_layer(run: RunArguments, graph: GraphArguments) -> int | None:
    """The first layer of which a graph holds a part, not the whole; 0 if that is not known.

    A layer of multi-token prediction is like the last one, and has all scopes of the run.
    """
    available = available_scopes(run)
    if available is None:
        return None if run.is_whole_layer else 0
    selection, _ = read_tokens(graph.cg_layers)
    count = len(available)
    layers = [
        (has, selection.scopes(i, count, run.cuda_graph_modules)) for i, has in enumerate(available)
    ]
    if run.mtp_num_layers:
        layers.append((available[-1], run.scope_names))
    for index, (has, scopes) in enumerate(layers):
        on = has.intersection(scopes)
        if on and WHOLE_LAYER not in on and not has.intersection(_PARTS) <= on:
            return index
    return None


def parts_of_recomputed_layers(
    run: RunArguments, graph: GraphArguments, environment: Environment
) -> Iterator[Violation]:
    """The checkpoint of a whole layer is inside its graph, so the graph holds the whole layer."""
    layer = _partial_layer(run, graph) if recomputes_layers(run) else None
    if layer is not None:
        yield Violation(
            "full-recompute-of-parts",
            f"--recompute-granularity full with graphs of a part of a layer (layer {layer})",
            "the recompute of the whole layer would be around this graph, and recompute around a "
            "graph saves no memory",
            "capture whole layers: drop --cuda-graph-modules, or type --cuda-graph-modules attn "
            "mlp (dense) or attn moe (experts, with --cg-grouped-gemm torch or drop and pad); or "
            "type --recompute-granularity selective",
        )


RULES: tuple[Rule, ...] = (
    parts_of_recomputed_layers,
    Refusal(
        "dropout-in-full-recompute",
        lambda run: (
            recomputes_layers(run) and (run.attention_dropout != 0.0 or run.hidden_dropout != 0.0)
        ),
        "--recompute-granularity full with --attention-dropout {run.attention_dropout} and "
        "--hidden-dropout {run.hidden_dropout}",
        _REPEATED_DRAW,
        "type --attention-dropout 0 --hidden-dropout 0, or drop --recompute-granularity",
    ),
    Refusal(
        "jitter-in-full-recompute",
        lambda run: recomputes_layers(run) and run.moe_input_jitter_eps is not None,
        "--recompute-granularity full with --moe-input-jitter-eps {run.moe_input_jitter_eps}",
        _REPEATED_DRAW,
        "drop --moe-input-jitter-eps, or drop --recompute-granularity",
    ),
    Refusal(
        "low-precision-full-recompute",
        lambda run: recomputes_layers(run) and (run.fp8 is not None or run.fp4 is not None),
        "--recompute-granularity full with FP8 or FP4",
        "Megatron recomputes such layers by Transformer Engine's own checkpoint, and that has not "
        "been made to work inside a graph",
        "drop --fp8-format and --fp4-format, or drop --recompute-granularity",
    ),
    Refusal(
        "hybrid-full-recompute",
        lambda run: recomputes_layers(run) and run.hybrid_layer_pattern is not None,
        "--recompute-granularity full in a hybrid model",
        "the checkpoint is moved into the layers of a TransformerBlock alone, and this model has a "
        "HybridStack",
        "type --recompute-granularity selective, or drop --recompute-granularity",
    ),
    Refusal(
        "repeated-prediction-full-recompute",
        lambda run: (
            recomputes_layers(run)
            and run.recompute_method == "uniform"
            and prediction_is_repeated(run)
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
    Refusal(
        "distributed-full-recompute",
        lambda run: recomputes_layers(run) and run.distribute_saved_activations,
        "--distribute-saved-activations",
        "a graph reads its input from static memory of its own, so there is nothing to distribute",
        "drop --distribute-saved-activations, or add --sequence-parallel instead",
    ),
    Refusal(
        "moe-recompute-around-router",
        lambda run: _recomputes(run, "moe") and "moe_router" in run.cuda_graph_modules,
        "--recompute-modules moe with --cuda-graph-modules moe_router",
        "the recomputed MoE layer contains the router's graph, and what is recomputed must lie "
        "wholly inside or wholly outside of a graph",
        "type --recompute-modules moe_act, or drop moe_router from --cuda-graph-modules",
    ),
    Refusal(
        "dropout-in-recomputed-attention",
        lambda run: (
            run.attention_dropout != 0.0
            and _recomputes(run, "core_attn")
            and _captures(run, "attn")
        ),
        "--attention-dropout {run.attention_dropout} in attention that is captured and recomputed",
        _REPEATED_DRAW,
        "type --attention-dropout 0, or leave core_attn out of --recompute-modules",
    ),
    Refusal(
        "dropout-in-recomputed-mlp",
        _draws_in_recomputed_mlp,
        "--hidden-dropout {run.hidden_dropout} in an MLP or MoE layer that is captured and "
        "recomputed",
        _REPEATED_DRAW,
        "type --hidden-dropout 0, or leave mlp and moe out of --recompute-modules",
    ),
    Refusal(
        "jitter-in-recomputed-moe",
        lambda run: (
            run.moe_input_jitter_eps is not None
            and _recomputes(run, "moe")
            and _captures(run, "moe")
        ),
        "--moe-input-jitter-eps {run.moe_input_jitter_eps} in a MoE layer that is captured and "
        "recomputed",
        _REPEATED_DRAW,
        "drop --moe-input-jitter-eps, or leave moe out of --recompute-modules",
    ),
    Refusal(
        "cpu-offloading",
        lambda run: run.cpu_offloading,
        "--cpu-offloading-num-layers",
        "activations are then moved to the CPU by Python code that a replay does not run",
        "drop --cpu-offloading-num-layers",
    ),
    Refusal(
        "activation-offloading",
        lambda run: run.fine_grained_activation_offloading,
        "--fine-grained-activation-offloading",
        "the backward graph of a layer reloads activations of the layer before it, so one layer "
        "that runs eagerly beside replays would make gradients wrong, without an error",
        "drop --fine-grained-activation-offloading",
    ),
)
