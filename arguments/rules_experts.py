"""What ``--cg-grouped-gemm torch`` needs, and what dropless experts in a graph need."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from megatron_cg.arguments.rule import Rule
from megatron_cg.arguments.rules_layers import captures_experts
from megatron_cg.arguments.rules_scopes import drops_and_pads
from megatron_cg.arguments.schema import Environment, GraphArguments, RunArguments
from megatron_cg.errors import Violation

_FLAG = "--cg-grouped-gemm torch"
_OR_TE = "or drop --cg-grouped-gemm"


def _with_gemm(
    rule: str, broken: Callable[[RunArguments], bool], found: str, reason: str, remedy: str
) -> Rule:
    """A rule of runs whose experts compute by torch's grouped GEMM."""

    def check(
        run: RunArguments, graph: GraphArguments, environment: Environment
    ) -> Iterator[Violation]:
        if graph.cg_grouped_gemm == "torch" and broken(run):
            yield Violation(rule, f"{_FLAG} {found}", reason, f"{remedy}, {_OR_TE}")

    return check


def _in_graph(
    rule: str, broken: Callable[[RunArguments], bool], found: str, reason: str, remedy: str
) -> Rule:
    """A rule of runs whose graphs hold dropless experts."""

    def check(
        run: RunArguments, graph: GraphArguments, environment: Environment
    ) -> Iterator[Violation]:
        dropless = captures_experts(run, graph) and not drops_and_pads(run)
        if graph.cg_grouped_gemm == "torch" and run.wants_graphs and dropless and broken(run):
            yield Violation(rule, f"dropless experts in a graph {found}", reason, remedy)

    return check


def _shares_experts(run: RunArguments) -> bool:
    return (run.expert_tensor_parallel_size or run.tensor_model_parallel_size) > 1


def _counts_vary(run: RunArguments) -> bool:
    return (
        run.moe_expert_capacity_factor is not None
        or run.moe_router_padding_for_fp8
        or run.moe_router_padding_for_quantization
    )


_ROUTER = "type --cuda-graph-modules attn moe_router"

RULES: tuple[Rule, ...] = (
    _with_gemm(
        "grouped-gemm-without-experts",
        lambda run: not (run.is_moe and run.moe_grouped_gemm),
        "in a model without grouped experts",
        "it replaces the grouped GEMM of Megatron's grouped experts, and this model has none",
        "add --moe-grouped-gemm in a MoE model",
    ),
    _with_gemm(
        "grouped-gemm-dtype",
        lambda run: not run.bf16,
        "without --bf16",
        "torch's grouped GEMM runs on the GPU in bfloat16 alone",
        "add --bf16",
    ),
    _with_gemm(
        "grouped-gemm-low-precision",
        lambda run: run.fp8 is not None or run.fp4 is not None,
        "with FP8 or FP4",
        "torch's grouped GEMM computes the experts in bfloat16, so their numbers would differ",
        "drop --fp8-format and --fp4-format",
    ),
    _with_gemm(
        "grouped-gemm-bias",
        lambda run: run.add_bias_linear,
        "in a model whose linear layers have biases",
        "torch's grouped GEMM adds no bias",
        "add --disable-bias-linear",
    ),
    _with_gemm(
        "grouped-gemm-op-fuser",
        lambda run: run.use_transformer_engine_op_fuser,
        "with --use-transformer-engine-op-fuser",
        "Transformer Engine's fused experts do not call the grouped GEMM that is replaced",
        "drop --use-transformer-engine-op-fuser",
    ),
    _in_graph(
        "experts-dispatcher",
        lambda run: run.moe_token_dispatcher_type == "flex",
        "with --moe-token-dispatcher-type flex",
        "only the dispatcher alltoall is known to keep each expert's number of tokens on the GPU",
        "type --moe-token-dispatcher-type alltoall",
    ),
    _in_graph(
        "experts-tensor-parallel",
        _shares_experts,
        "that are split over several tensor-parallel ranks",
        "the ranks of an expert then exchange rows by numbers that Megatron reads on the CPU",
        f"add --expert-tensor-parallel-size 1, or {_ROUTER}",
    ),
    _in_graph(
        "experts-uneven",
        _counts_vary,
        "with a capacity factor without padding, or with router padding",
        "how many rows a rank sends then differs from step to step, and a graph's shapes do not",
        "drop the option, or add --moe-expert-capacity-factor 1.0 "
        "--moe-pad-expert-input-to-capacity",
    ),
)
