"""Which parts of the fast path a run may choose."""

from __future__ import annotations

from collections.abc import Iterator

from megatron_cg.arguments.fast_path_parts import chosen_parts, mistakes
from megatron_cg.arguments.rule import Rule
from megatron_cg.arguments.schema import Environment, GraphArguments, RunArguments
from megatron_cg.errors import Violation

_RULE = "fast-path-parts"


def parts_of(graph: GraphArguments) -> frozenset[str]:
    """The parts of the fast path that a run with these flags installs; empty for none."""
    if graph.cg_no_fsdp_fast_path or graph.cg_fast_path is None:
        return chosen_parts(not graph.cg_no_fsdp_fast_path)
    return chosen_parts(graph.cg_fast_path.split(","))


def fast_path_parts(
    run: RunArguments, graph: GraphArguments, environment: Environment
) -> Iterator[Violation]:
    """``--cg-fast-path`` names known parts, with every part that they need."""
    if graph.cg_fast_path is None:
        return
    if graph.cg_no_fsdp_fast_path:
        yield Violation(
            _RULE,
            f"--cg-fast-path {graph.cg_fast_path} with --cg-no-fsdp-fast-path",
            "the first chooses parts of the fast path, the second turns all of them off",
            "drop one of the two flags",
        )
        return
    for found, reason, remedy in mistakes(graph.cg_fast_path.split(",")):
        yield Violation(_RULE, f"--cg-fast-path: {found}", reason, remedy)


RULES: tuple[Rule, ...] = (fast_path_parts,)
