"""Recomputed and offloaded activations together with graphs.

The first five rules are assertions of ``TransformerConfig.__post_init__`` in megatron-core 0.19.2,
in our words.
"""

from __future__ import annotations

from megatron_cg.arguments.rule import Refusal, Rule
from megatron_cg.arguments.schema import RunArguments


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

RULES: tuple[Rule, ...] = (
    Refusal(
        "full-recompute",
        lambda run: run.recompute_granularity == "full",
        "--recompute-granularity full",
        "whole layers are then run again in the backward pass, around the graph instead of in it",
        "type --recompute-granularity selective --recompute-modules core_attn, or drop "
        "--recompute-granularity",
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
        "its copies on other streams are captured with the layer, and this has not been made to "
        "work under Megatron-FSDP, whose parameters are gathered on streams outside of the graph",
        "drop --fine-grained-activation-offloading",
    ),
)
