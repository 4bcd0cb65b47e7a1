"""What ``--cg-grouped-gemm torch`` needs, and what dropless experts in a graph need."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import partial

from megatron_cg.arguments.rule import Refusal, Rule
from megatron_cg.arguments.rules_layers import captures_experts
from megatron_cg.arguments.rules_scopes import drops_and_pads
from megatron_cg.arguments.schema import Environment, GraphArguments, RunArguments
from megatron_cg.errors import Violation

_OR_TE = "or drop --cg-grouped-gemm"
_ROUTER = "type --cuda-graph-modules attn moe_router"
_BALANCING = ("aux_loss", "seq_aux_loss", "global_aux_loss", "none")


def _dropless_in_graph(run: RunArguments, graph: GraphArguments) -> bool:
    return run.wants_graphs and captures_experts(run, graph) and not drops_and_pads(run)


def _dropless_by_torch(run: RunArguments, graph: GraphArguments) -> bool:
    return graph.cg_grouped_gemm == "torch" and _dropless_in_graph(run, graph)


_with_gemm = partial(Refusal, where=lambda _run, graph: graph.cg_grouped_gemm == "torch")
"""A rule of runs whose experts compute by torch's grouped GEMM."""

_in_graph = partial(Refusal, where=_dropless_by_torch)
"""A rule of those whose graphs hold dropless experts."""


def _counts_vary(run: RunArguments) -> bool:
    return (
        run.moe_expert_capacity_factor is not None
        or run.moe_router_padding_for_fp8
        or run.moe_router_padding_for_quantization
    )


def router_violation(balancing: Iterable[str]) -> Violation | None:
    """Why experts with these kinds of load balancing cannot be in a graph; None if they can."""
    others = [kind for kind in balancing if kind not in _BALANCING]
    if not others:
        return None
    return Violation(
        "experts-router",
        f"dropless experts in a graph with --moe-router-load-balancing-type {' '.join(others)}",
        "megatron-core 0.19.2 takes whole MoE layers in graphs only as drop and pad, and that only "
        f"with {', '.join(_BALANCING)}",
        f"type --moe-router-load-balancing-type aux_loss, or {_ROUTER}",
    )


def _router(
    run: RunArguments, graph: GraphArguments, environment: Environment
) -> Iterator[Violation]:
    """Dropless experts in a graph need a router that is known to run without the host."""
    found = router_violation(run.moe_router_load_balancing_type)
    if found is not None and _dropless_in_graph(run, graph):
        yield found


def _delayed_gradients(
    run: RunArguments, graph: GraphArguments, environment: Environment
) -> Iterator[Violation]:
    """Weight gradients of experts in a graph cannot be delayed past the backward pass."""
    captured = run.wants_graphs and captures_experts(run, graph)
    if run.overlap_dispatch_backward_with_experts_wgrad and (
        graph.cg_grouped_gemm == "torch" or captured
    ):
        yield Violation(
            "experts-delayed-gradients",
            "--overlap-dispatch-backward-with-experts-wgrad with "
            + ("experts in a graph" if captured else "--cg-grouped-gemm torch"),
            "torch's grouped GEMM computes weight gradients at once, and Python code that reduces "
            "delayed ones does not run in a replay",
            "drop --overlap-dispatch-backward-with-experts-wgrad",
        )


def peer_exchange(
    run: RunArguments, graph: GraphArguments, environment: Environment
) -> Iterator[Violation]:
    """Peer memory needs graphs that exchange tokens."""
    if graph.cg_moe_exchange != "peer" or not run.wants_graphs:
        return
    if not _dropless_by_torch(run, graph):
        yield Violation(
            "exchange-without-experts",
            "--cg-moe-exchange peer in a run whose graphs hold no dropless experts",
            "it is how such graphs exchange tokens; all others exchange them as Megatron does",
            "add --cg-grouped-gemm torch and --cuda-graph-modules attn moe, without drop and pad, "
            "or drop --cg-moe-exchange",
        )
    elif run.expert_model_parallel_size == 1:
        yield Violation(
            "exchange-without-expert-parallel",
            "--cg-moe-exchange peer with --expert-model-parallel-size 1",
            "a rank with all experts exchanges no tokens",
            "drop --cg-moe-exchange",
        )


def row_bound(
    run: RunArguments, graph: GraphArguments, environment: Environment
) -> Iterator[Violation]:
    """A bound of rows needs rows that vary, and steps that can be repeated."""
    if graph.cg_moe_rows is None or not run.wants_graphs:
        return
    given = f"--cg-moe-rows {graph.cg_moe_rows:g}"
    if not graph.cg_moe_rows >= 1:
        yield Violation(
            "rows-below-average",
            given,
            "it is a multiple of the rows that a rank receives on average, so with less than 1 "
            "every step would be repeated",
            "type --cg-moe-rows 1.25, or more",
        )
    if not _dropless_by_torch(run, graph):
        yield Violation(
            "rows-without-experts",
            f"{given} in a run whose graphs hold no dropless experts",
            "it bounds the rows for which such graphs have room",
            "add --cg-grouped-gemm torch and --cuda-graph-modules attn moe, without drop and pad, "
            "or drop --cg-moe-rows",
        )
    elif run.expert_model_parallel_size == 1:
        yield Violation(
            "rows-without-expert-parallel",
            f"{given} with --expert-model-parallel-size 1",
            "a rank with all experts always receives tokens x top-k rows, and its graphs have room "
            "for exactly these",
            "drop --cg-moe-rows",
        )


RULES: tuple[Rule, ...] = (
    _with_gemm(
        "grouped-gemm-without-experts",
        lambda run: not (run.is_moe and run.moe_grouped_gemm),
        "--cg-grouped-gemm torch in a model without grouped experts",
        "it replaces the grouped GEMM of Megatron's grouped experts, and this model has none",
        f"add --moe-grouped-gemm in a MoE model, {_OR_TE}",
    ),
    _with_gemm(
        "grouped-gemm-dtype",
        lambda run: not run.bf16,
        "--cg-grouped-gemm torch without --bf16",
        "torch's grouped GEMM runs on the GPU only in bfloat16",
        f"add --bf16, {_OR_TE}",
    ),
    _with_gemm(
        "grouped-gemm-low-precision",
        lambda run: run.fp8 is not None or run.fp4 is not None,
        "--cg-grouped-gemm torch with FP8 or FP4",
        "torch's grouped GEMM computes the experts in bfloat16, so their numbers would differ",
        f"drop --fp8-format and --fp4-format, {_OR_TE}",
    ),
    _with_gemm(
        "grouped-gemm-bias",
        lambda run: run.add_bias_linear,
        "--cg-grouped-gemm torch in a model whose linear layers have biases",
        "torch's grouped GEMM adds no bias",
        f"add --disable-bias-linear, {_OR_TE}",
    ),
    _with_gemm(
        "grouped-gemm-op-fuser",
        lambda run: run.use_transformer_engine_op_fuser,
        "--cg-grouped-gemm torch with --use-transformer-engine-op-fuser",
        "Transformer Engine's fused experts do not call the grouped GEMM that is replaced",
        f"drop --use-transformer-engine-op-fuser, {_OR_TE}",
    ),
    _in_graph(
        "experts-dispatcher",
        lambda run: run.moe_token_dispatcher_type == "flex",
        "dropless experts in a graph with --moe-token-dispatcher-type flex",
        "only the dispatcher alltoall is known to keep each expert's number of tokens on the GPU",
        "type --moe-token-dispatcher-type alltoall",
    ),
    _in_graph(
        "experts-tensor-parallel",
        lambda run: run.expert_tensor_parallel_size > 1,
        "dropless experts in a graph that are split over several tensor-parallel ranks",
        "the ranks of an expert then exchange rows by numbers that Megatron reads on the CPU",
        f"add --expert-tensor-parallel-size 1, or {_ROUTER}",
    ),
    _in_graph(
        "experts-uneven",
        _counts_vary,
        "experts in a graph with a capacity factor without padding, or with router padding",
        "how many rows a rank sends then differs from step to step, and a graph's shapes do not",
        "drop the option, or add --moe-expert-capacity-factor 1.0 "
        "--moe-pad-expert-input-to-capacity",
    ),
    _with_gemm(
        "grouped-gemm-delayed-gradients",
        lambda run: run.delay_wgrad_compute,
        "--cg-grouped-gemm torch with --delay-wgrad-compute",
        "torch's grouped GEMM computes weight gradients at once",
        f"drop --delay-wgrad-compute, {_OR_TE}",
    ),
    _delayed_gradients,
    _router,
    row_bound,
    peer_exchange,
)
