"""Number formats and shapes that a graph cannot hold, and combinations not supported yet."""

from __future__ import annotations

from collections.abc import Iterator

from megatron_cg.arguments.rule import Refusal, Rule
from megatron_cg.arguments.schema import NATIVE, Environment, GraphArguments, RunArguments
from megatron_cg.errors import Violation

_RECIPES_OF_PRIMARY_WEIGHTS = ("delayed", "tensorwise")


def native_has_no_fp8(
    run: RunArguments, graph: GraphArguments, environment: Environment
) -> Iterator[Violation]:
    """The native backend keeps no scales of FP8 or FP4."""
    if environment.backend != NATIVE:
        return
    for name, value in (("fp8", run.fp8), ("fp4", run.fp4)):
        if value is not None:
            yield Violation(
                "native-backend-fp8",
                f"--{name}-format {value} with --cg-backend native",
                "graphs of the native backend do not update the scales of quantized tensors",
                f"drop --{name}-format, or type --cg-backend te",
            )


RULES: tuple[Rule, ...] = (
    Refusal(
        "fp16",
        lambda run: run.fp16,
        "--fp16 with --use-megatron-fsdp",
        "before it unscales, DistributedOptimizer of megatron-core 0.19.2 reads the gradient of "
        "every parameter, and under Megatron-FSDP some have none, so a run without graphs fails "
        "too: 'NoneType' object has no attribute 'data'",
        "type --bf16 instead, or drop --fp16 and train in fp32",
    ),
    Refusal(
        "fp8-primary-weights",
        lambda run: (
            run.fp8 is not None and run.fp8_param_gather and not run.keep_fp8_transpose_cache
        ),
        "--fp8-param-gather without --keep-fp8-transpose-cache",
        "Megatron-FSDP then throws the weights' transposes away after each use and makes new ones "
        "elsewhere, and a replayed backward reads the old places: the gradient norm is NaN",
        "add --keep-fp8-transpose-cache, or drop --fp8-param-gather and keep --fp8-format",
    ),
    Refusal(
        "fp8-primary-weights-recipe",
        lambda run: (
            run.fp8 is not None
            and run.fp8_param_gather
            and run.fp8_recipe not in _RECIPES_OF_PRIMARY_WEIGHTS
        ),
        "--fp8-param-gather with --fp8-recipe {run.fp8_recipe}",
        "not solved yet: with blockwise weights Megatron-FSDP asks for more buffers than "
        "--fsdp-double-buffer has ('No buffer found for bucket_id'), and other recipes were never "
        "seen to work",
        "type --fp8-recipe delayed or --fp8-recipe tensorwise, or drop --fp8-param-gather",
    ),
    Refusal(
        "hybrid-context-parallel",
        lambda run: run.hybrid_context_parallel,
        "--hybrid-context-parallel",
        "sequences of several lengths are spread over changing groups of ranks, and a graph keeps "
        "the shapes and groups it was captured with",
        "drop --hybrid-context-parallel",
    ),
    native_has_no_fp8,
)
