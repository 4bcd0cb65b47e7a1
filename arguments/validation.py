"""Checks all rules of a run at once. Pure: reads nothing but the arguments."""

from __future__ import annotations

import dataclasses

from megatron_cg.arguments import (
    rules_environment,
    rules_experts,
    rules_fsdp,
    rules_layers,
    rules_numerics,
    rules_packs,
    rules_recompute,
    rules_scopes,
)
from megatron_cg.arguments.rule import Rule
from megatron_cg.arguments.schema import Environment, GraphArguments, RunArguments, flag_of
from megatron_cg.errors import Violation

ANY_RUN = (
    "cg_record",
    "cg_report",
    "cg_grouped_gemm",
    "cg_pack_sequences",
)
"""Fields of GraphArguments that are useful without graphs."""
RULES: tuple[Rule, ...] = (
    *rules_fsdp.RULES,
    *rules_scopes.RULES,
    *rules_layers.RULES,
    *rules_experts.RULES,
    *rules_recompute.RULES,
    *rules_numerics.RULES,
    *rules_packs.RULES,
    *rules_environment.RULES,
)
"""The rules of a run that asks for layerwise graphs under Megatron-FSDP."""


def violations(
    run: RunArguments, graph: GraphArguments, environment: Environment
) -> tuple[Violation, ...]:
    """Every broken rule, in the order of :data:`RULES`; empty when the run can be graphed.

    A run that does not ask for layerwise graphs under Megatron-FSDP is not checked, except for
    flags of ours that would have no effect in it, for the grouped GEMM, and for the form of packs.
    """
    of_any = (_unused_flags, *rules_experts.RULES, rules_packs.at_least_one)
    rules: tuple[Rule, ...] = RULES if run.wants_graphs else of_any
    return tuple(found for rule in rules for found in rule(run, graph, environment))


def notices(run: RunArguments, graph: GraphArguments, environment: Environment) -> tuple[str, ...]:
    """Facts that do not stop a run with graphs but belong in its log."""
    if not run.wants_graphs:
        return ()
    lines = list(rules_environment.unseen_versions(environment))
    if not run.te_rng_tracker:
        lines.append(
            "--te-rng-tracker was not given and Megatron turns it on for graphs. An eager run "
            "draws the same weights and dropout masks only with --te-rng-tracker."
        )
    return tuple(lines)


def _unused_flags(
    run: RunArguments, graph: GraphArguments, environment: Environment
) -> tuple[Violation, ...]:
    given = []
    for field in dataclasses.fields(graph):
        value = getattr(graph, field.name)
        if value != field.default and field.name not in ANY_RUN:
            words = " ".join(value) if isinstance(value, tuple) else str(value)
            given.append(f"{flag_of(field.name)} {words}")
    if not given:
        return ()
    fsdp = "with" if run.use_megatron_fsdp else "without"
    return (
        Violation(
            "flags-without-graphs",
            f"{' '.join(given)} with --cuda-graph-impl {run.cuda_graph_impl} {fsdp} "
            "--use-megatron-fsdp",
            "the flag only affects layerwise graphs under Megatron-FSDP, which this run does not "
            "request, so it would have no effect",
            "add --use-megatron-fsdp --cuda-graph-impl transformer_engine, or drop the flag",
        ),
    )
