"""What ``--cg-grouped-gemm torch`` needs, and what dropless experts in a graph need."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial

from megatron_cg.arguments.rule import Configuration, Facts, Rule
from megatron_cg.errors import Violation

_OR_TE = "or drop --cg-grouped-gemm"
_ROUTER = "type --cuda-graph-modules attn moe_router"
_BALANCING = ("aux_loss", "seq_aux_loss", "global_aux_loss", "none")
_NO_DROPLESS = "in a run whose graphs hold no dropless experts"
_ADD_DROPLESS = (
    "add --cg-grouped-gemm torch and --cuda-graph-modules attn moe, without drop and pad"
)


def _unknown_balancing(kinds: Iterable[str]) -> list[Facts]:
    others = [kind for kind in kinds if kind not in _BALANCING]
    return [{"others": " ".join(others)}] if others else []


_ROUTER_RULE = Rule(
    "experts-router",
    lambda c: (
        c.captures_dropless_experts and _unknown_balancing(c.run.moe_router_load_balancing_type)
    ),
    "dropless experts in a graph with --moe-router-load-balancing-type {others}",
    "megatron-core 0.19.2 takes whole MoE layers in graphs only as drop and pad, and that only "
    f"with {', '.join(_BALANCING)}",
    f"type --moe-router-load-balancing-type aux_loss, or {_ROUTER}",
)


def router_violation(balancing: Iterable[str]) -> Violation | None:
    """Why experts with these kinds of load balancing cannot be in a graph; None if they can."""
    rule = _ROUTER_RULE
    for facts in _unknown_balancing(balancing):
        return Violation(rule.name, rule.found.format(**facts), rule.reason, rule.remedy)
    return None


def _counts_vary(c: Configuration) -> bool:
    run = c.run
    return c.captures_torch_experts and (
        run.moe_expert_capacity_factor is not None
        or run.moe_router_padding_for_fp8
        or run.moe_router_padding_for_quantization
    )


def _delays_gradients(c: Configuration) -> list[Facts]:
    captured = c.run.wants_graphs and c.captures_experts
    if not c.run.overlap_dispatch_backward_with_experts_wgrad:
        return []
    if captured:
        return [{"where": "experts in a graph"}]
    return [{"where": "--cg-grouped-gemm torch"}] if c.has_torch_experts else []


def _bounds_rows(c: Configuration) -> bool:
    return c.graph.cg_moe_rows is not None and c.run.wants_graphs


def _exchanges_by_peers(c: Configuration) -> bool:
    return c.graph.cg_moe_exchange == "peer" and c.run.wants_graphs


def _with_all_experts(c: Configuration) -> bool:
    return c.captures_torch_experts and c.run.expert_model_parallel_size == 1


_rule = partial(Rule, without_graphs=True)

RULES = (
    _rule(
        "grouped-gemm-without-experts",
        lambda c: c.has_torch_experts and not (c.run.is_moe and c.run.moe_grouped_gemm),
        "--cg-grouped-gemm torch in a model without grouped experts",
        "it replaces the grouped GEMM of Megatron's grouped experts, and this model has none",
        f"add --moe-grouped-gemm in a MoE model, {_OR_TE}",
    ),
    _rule(
        "grouped-gemm-dtype",
        lambda c: c.has_torch_experts and not c.run.bf16,
        "--cg-grouped-gemm torch without --bf16",
        "torch's grouped GEMM runs on the GPU only in bfloat16",
        f"add --bf16, {_OR_TE}",
    ),
    _rule(
        "grouped-gemm-low-precision",
        lambda c: c.has_torch_experts and (c.run.fp8 is not None or c.run.fp4 is not None),
        "--cg-grouped-gemm torch with FP8 or FP4",
        "torch's grouped GEMM computes the experts in bfloat16, so their numbers would differ",
        f"drop --fp8-format and --fp4-format, {_OR_TE}",
    ),
    _rule(
        "grouped-gemm-bias",
        lambda c: c.has_torch_experts and c.run.add_bias_linear,
        "--cg-grouped-gemm torch in a model whose linear layers have biases",
        "torch's grouped GEMM adds no bias",
        f"add --disable-bias-linear, {_OR_TE}",
    ),
    _rule(
        "grouped-gemm-op-fuser",
        lambda c: c.has_torch_experts and c.run.use_transformer_engine_op_fuser,
        "--cg-grouped-gemm torch with --use-transformer-engine-op-fuser",
        "Transformer Engine's fused experts do not call the grouped GEMM that is replaced",
        f"drop --use-transformer-engine-op-fuser, {_OR_TE}",
    ),
    _rule(
        "experts-delayed-gradients",
        _delays_gradients,
        "--overlap-dispatch-backward-with-experts-wgrad with {where}",
        "torch's grouped GEMM computes weight gradients at once, and Python code that reduces "
        "delayed ones does not run in a replay",
        "drop --overlap-dispatch-backward-with-experts-wgrad",
    ),
    Rule(
        "experts-dispatcher",
        lambda c: c.captures_torch_experts and c.run.moe_token_dispatcher_type == "flex",
        "dropless experts in a graph with --moe-token-dispatcher-type flex",
        "only the dispatcher alltoall is known to keep each expert's number of tokens on the GPU",
        "type --moe-token-dispatcher-type alltoall",
    ),
    Rule(
        "experts-tensor-parallel",
        lambda c: c.captures_torch_experts and c.run.expert_tensor_parallel_size > 1,
        "dropless experts in a graph that are split over several tensor-parallel ranks",
        "the ranks of an expert then exchange rows by numbers that Megatron reads on the CPU",
        f"add --expert-tensor-parallel-size 1, or {_ROUTER}",
    ),
    Rule(
        "experts-uneven",
        _counts_vary,
        "experts in a graph with a capacity factor without padding, or with router padding",
        "how many rows a rank sends then differs from step to step, and a graph's shapes do not",
        "drop the option, or add --moe-expert-capacity-factor 1.0 "
        "--moe-pad-expert-input-to-capacity",
    ),
    _ROUTER_RULE,
    Rule(
        "rows-below-average",
        lambda c: _bounds_rows(c) and not (c.graph.cg_moe_rows or 0) >= 1,
        "--cg-moe-rows {graph.cg_moe_rows:g}",
        "it is a multiple of the rows that a rank receives on average, so with less than 1 every "
        "step would be repeated",
        "type --cg-moe-rows 1.25, or more",
    ),
    Rule(
        "rows-without-experts",
        lambda c: _bounds_rows(c) and not c.captures_torch_experts,
        f"--cg-moe-rows {{graph.cg_moe_rows:g}} {_NO_DROPLESS}",
        "it bounds the rows for which such graphs have room",
        f"{_ADD_DROPLESS}, or drop --cg-moe-rows",
    ),
    Rule(
        "rows-without-expert-parallel",
        lambda c: _bounds_rows(c) and _with_all_experts(c),
        "--cg-moe-rows {graph.cg_moe_rows:g} with --expert-model-parallel-size 1",
        "a rank with all experts always receives tokens x top-k rows, and its graphs have room "
        "for exactly these",
        "drop --cg-moe-rows",
    ),
    Rule(
        "exchange-without-experts",
        lambda c: _exchanges_by_peers(c) and not c.captures_torch_experts,
        f"--cg-moe-exchange peer {_NO_DROPLESS}",
        "it is how such graphs exchange tokens; all others exchange them as Megatron does",
        f"{_ADD_DROPLESS}, or drop --cg-moe-exchange",
    ),
    Rule(
        "exchange-without-expert-parallel",
        lambda c: _exchanges_by_peers(c) and _with_all_experts(c),
        "--cg-moe-exchange peer with --expert-model-parallel-size 1",
        "a rank with all experts exchanges no tokens",
        "drop --cg-moe-exchange",
    ),
)
