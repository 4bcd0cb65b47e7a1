"""Options of layers that a graph cannot hold.

With them the host waits for the device, or Python code runs at every step, which a replay does not
run. Megatron-core 0.19.2 accepts all of them. ``tests/unit/tools/plan/test_sweep.py`` checks that
all other options of layers can be captured.
"""

from __future__ import annotations

from collections.abc import Iterator

from megatron_cg.arguments.layers import read_tokens
from megatron_cg.arguments.layout import available_scopes
from megatron_cg.arguments.rule import Refusal, Rule
from megatron_cg.arguments.schema import WHOLE_LAYER, Environment, GraphArguments, RunArguments
from megatron_cg.errors import Violation

_ROUTER_SCOPES = ("moe_router", "moe_preprocess", "moe")
_WITHOUT_MOE = "or leave the MoE layers out: type --cuda-graph-modules attn"


def whole_moe_layers(run: RunArguments, graph: GraphArguments) -> list[int]:
    """Indices of the MoE layers that are captured whole; empty if the layers are not known."""
    available = available_scopes(run)
    if not run.is_whole_layer or not run.is_moe or available is None:
        return []
    selection, _ = read_tokens(graph.cg_layers)
    count = len(available)
    return [
        index
        for index, has in enumerate(available)
        if "moe" in has and selection.scopes(index, count, ()) == (WHOLE_LAYER,)
    ]


def captures_experts(run: RunArguments, graph: GraphArguments) -> bool:
    """Whether a graph of this run holds the experts of a MoE layer."""
    return run.is_moe and ("moe" in run.cuda_graph_modules or bool(whole_moe_layers(run, graph)))


def _captures_router(run: RunArguments, graph: GraphArguments) -> bool:
    named = any(scope in _ROUTER_SCOPES for scope in run.cuda_graph_modules)
    return run.is_moe and (named or bool(whole_moe_layers(run, graph)))


def captures_attention(run: RunArguments) -> bool:
    """Whether a graph holds attention."""
    return run.is_whole_layer or "attn" in run.cuda_graph_modules


def counts_read(
    run: RunArguments, graph: GraphArguments, environment: Environment
) -> Iterator[Violation]:
    """Some dispatchers read each expert's number of tokens on the CPU, even if it is fixed."""
    dispatcher = run.moe_token_dispatcher_type
    backend = run.moe_flex_dispatcher_backend
    reads = dispatcher == "allgather" or (
        dispatcher == "flex" and backend == "ncclep" and not run.moe_ncclep_static_shape
    )
    if reads and captures_experts(run, graph):
        found = f"--moe-token-dispatcher-type {dispatcher}"
        if dispatcher == "flex":
            found += " --moe-flex-dispatcher-backend ncclep"
        yield Violation(
            "dispatcher-reads-counts",
            f"{found} in MoE layers that are captured with their experts",
            "this dispatcher copies the number of each expert's tokens to the CPU and waits for "
            "it, with drop-and-pad too, which a capture does not allow",
            "type --moe-token-dispatcher-type alltoall, or --cuda-graph-modules attn moe_router",
        )


def _pads_uneven_inputs(run: RunArguments) -> bool:
    return (
        run.moe_token_dispatcher_type == "flex"
        and run.moe_flex_dispatcher_backend == "hybridep"
        and run.moe_hybridep_pad_uneven_dispatch_inputs
    )


def _captures_dispatch(run: RunArguments, graph: GraphArguments) -> bool:
    preprocess = run.is_moe and "moe_preprocess" in run.cuda_graph_modules
    return preprocess or captures_experts(run, graph)


RULES: tuple[Rule, ...] = (
    Refusal(
        "sinkhorn-router",
        lambda run: "sinkhorn" in run.moe_router_load_balancing_type,
        "--moe-router-load-balancing-type sinkhorn with a captured MoE router",
        "its iteration ends when a value on the GPU is small enough, so the CPU waits for that "
        "value in every round, which a capture does not allow",
        f"type --moe-router-load-balancing-type aux_loss, {_WITHOUT_MOE}",
        where=_captures_router,
    ),
    counts_read,
    # HybridEP pads to a number of tokens that all ranks agree on; the host reads that number.
    Refusal(
        "hybridep-uneven-inputs",
        _pads_uneven_inputs,
        "--moe-hybridep-pad-uneven-dispatch-inputs in a captured dispatcher",
        "the largest number of tokens of all ranks is then read on the CPU before each dispatch, "
        "which a capture does not allow",
        "drop --moe-hybridep-pad-uneven-dispatch-inputs, or type --cuda-graph-modules attn "
        "moe_router",
        where=_captures_dispatch,
    ),
    Refusal(
        "routing-trace",
        lambda run: run.moe_routing_trace_path is not None,
        "--moe-routing-trace-path with a captured MoE router",
        "Megatron writes the choices of a router from a hook on it, and a replay runs no hook of a "
        "module inside the graph: nothing would be written",
        f"drop --moe-routing-trace-path, {_WITHOUT_MOE}",
        where=_captures_router,
    ),
    Refusal(
        "largest-attention-logits",
        lambda run: (run.qk_clip or run.log_max_attention_logit) and captures_attention(run),
        "--qk-clip or --log-max-attention-logit with captured attention",
        "Python code of the attention hands the largest logits of a step over to the optimizer "
        "and the log, and a replay does not run it: nothing would be clipped or logged",
        "drop --qk-clip and --log-max-attention-logit (with --bf16, megatron-core 0.19.2 does not "
        "find the layers of a Megatron-FSDP model and ends with an AttributeError, without graphs "
        "too), or, without --bf16, type --cuda-graph-modules with scopes other than attn",
    ),
)
