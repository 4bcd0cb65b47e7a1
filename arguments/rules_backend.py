"""What a capture backend other than Transformer Engine's cannot capture."""

from __future__ import annotations

from collections.abc import Iterator

from megatron_cg.arguments.rule import Rule
from megatron_cg.arguments.schema import NATIVE, Environment, GraphArguments, RunArguments
from megatron_cg.errors import Violation


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


RULES: tuple[Rule, ...] = (native_has_no_fp8,)
