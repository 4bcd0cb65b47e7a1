"""Which scopes a model has.

Repeats the assertions of ``TransformerConfig.__post_init__`` in megatron-core 0.19.2, before a
model is built, and adds checks that it lacks.
"""

from __future__ import annotations

from collections.abc import Iterator

from megatron_cg.arguments.layers import read_tokens
from megatron_cg.arguments.layout import available_scopes
from megatron_cg.arguments.rule import Refusal, Rule
from megatron_cg.arguments.rules_layers import whole_moe_layers
from megatron_cg.arguments.schema import WHOLE_LAYER, Environment, GraphArguments, RunArguments
from megatron_cg.errors import Violation

_MOE_SCOPES = ("moe", "moe_router", "moe_preprocess")
_ROUTER_INSTEAD = "--cuda-graph-modules attn moe_router"
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


def drops_and_pads(run: RunArguments) -> bool:
    """Whether each expert gets a fixed number of tokens."""
    return run.moe_expert_capacity_factor is not None and run.moe_pad_expert_input_to_capacity


def _preprocess_synchronizes(run: RunArguments) -> bool:
    return (
        "moe_preprocess" in run.cuda_graph_modules
        and run.is_moe
        and not drops_and_pads(run)
        and run.moe_token_dispatcher_type == "alltoall"
        and (
            run.moe_expert_capacity_factor is not None
            or run.moe_router_padding_for_fp8
            or run.moe_router_padding_for_quantization
        )
    )


def experts_missing(
    run: RunArguments, graph: GraphArguments, environment: Environment
) -> Iterator[Violation]:
    """MoE scopes need a model with more than one expert."""
    asked = [scope for scope in run.cuda_graph_modules if scope in _MOE_SCOPES]
    if asked and not run.is_moe:
        yield Violation(
            "moe-without-experts",
            f"--cuda-graph-modules {' '.join(asked)} in a model without experts",
            "these scopes are parts of a MoE layer",
            "type --cuda-graph-modules attn mlp, or make it a MoE model with --num-experts 8",
        )


def scope_selects_nothing(
    run: RunArguments, graph: GraphArguments, environment: Environment
) -> Iterator[Violation]:
    """Each scope must exist on at least one of the layers that ``--cg-layers`` selects for it."""
    available = available_scopes(run)
    if available is None:
        return
    selection, _ = read_tokens(graph.cg_layers)
    count = len(available)
    active = [selection.scopes(index, count, run.cuda_graph_modules) for index in range(count)]
    for scope in run.scope_names:
        if scope in _MOE_SCOPES and not run.is_moe:
            continue
        if not any(scope in here for here in available):
            yield Violation(
                "scope-selects-nothing",
                f"--cuda-graph-modules {scope}",
                f"none of the model's {count} layers has {_PART[scope]}, so nothing would be "
                "captured",
                f"drop {scope} from --cuda-graph-modules",
            )
        elif not any(
            scope in has and scope in on for has, on in zip(available, active, strict=True)
        ):
            index = next(index for index, has in enumerate(available) if scope in has)
            yield Violation(
                "scope-selects-nothing",
                f"--cg-layers leaves {scope} on no layer that has it",
                f"the first layer with it is layer {index}",
                f"type --cg-layers {scope}:{index}-",
            )


def whole_moe_layer(
    run: RunArguments, graph: GraphArguments, environment: Environment
) -> Iterator[Violation]:
    """Whole layers with experts need dropless support, or experts that drop and pad."""
    moe = whole_moe_layers(run, graph)
    if moe and not drops_and_pads(run) and graph.cg_grouped_gemm == "te":
        yield Violation(
            "whole-moe-layer",
            f"an empty --cuda-graph-modules captures whole layers, {len(moe)} of them MoE layers "
            f"(the first is layer {moe[0]}) without drop-and-pad",
            "how many tokens each expert gets differs from step to step and is read back to the "
            "CPU, which a capture does not allow",
            f"add {_GEMM}, or type {_ROUTER_INSTEAD}, or add {_DROP_AND_PAD}, or name the dense "
            "layers with --cg-layers layer:0",
        )


def layer_selection(
    run: RunArguments, graph: GraphArguments, environment: Environment
) -> Iterator[Violation]:
    """``--cg-layers`` must be well formed and match the run's scopes and layers."""
    selection, broken = read_tokens(graph.cg_layers)
    yield from broken
    yield from selection.violations(run.cuda_graph_modules, run.num_layers, available_scopes(run))


RULES: tuple[Rule, ...] = (
    Refusal(
        "moe-and-router",
        lambda run: {"moe", "moe_router"} <= set(run.cuda_graph_modules),
        "--cuda-graph-modules has both moe and moe_router",
        "moe captures the whole MoE layer, the router in it, so the router would be captured twice",
        "keep one of the two: type --cuda-graph-modules attn moe_router (any MoE model), or "
        f"--cuda-graph-modules attn moe with {_GEMM} or {_DROP_AND_PAD}",
    ),
    Refusal(
        "preprocess-without-router",
        lambda run: (
            "moe_preprocess" in run.cuda_graph_modules
            and "moe_router" not in run.cuda_graph_modules
        ),
        "--cuda-graph-modules has moe_preprocess without moe_router",
        "Megatron captures moe_preprocess only as the continuation of the router's graph",
        "type --cuda-graph-modules attn moe_router moe_preprocess",
    ),
    experts_missing,
    # A graph can hold experts if it has fixed shapes: by drop and pad, or by counts on the GPU.
    Refusal(
        "moe-without-drop-and-pad",
        lambda run: "moe" in run.cuda_graph_modules and run.is_moe and not drops_and_pads(run),
        "--cuda-graph-modules moe without drop-and-pad experts",
        "how many tokens each expert gets then differs from step to step, and Transformer "
        "Engine's grouped GEMM reads it on the CPU, which a capture does not allow",
        f"add {_GEMM}, or add {_DROP_AND_PAD}, or type {_ROUTER_INSTEAD}",
        where=lambda _run, graph: graph.cg_grouped_gemm == "te",
    ),
    Refusal(
        "preprocess-synchronizes",
        _preprocess_synchronizes,
        "--cuda-graph-modules moe_preprocess with --moe-token-dispatcher-type alltoall and a "
        "capacity factor or router padding for FP8 or FP4",
        "the dispatcher then copies token counts to the CPU and waits for them within preprocess, "
        "which a capture does not allow",
        "drop moe_preprocess from --cuda-graph-modules, or make the experts drop and pad: "
        f"{_DROP_AND_PAD}",
    ),
    scope_selects_nothing,
    whole_moe_layer,
    layer_selection,
)
