"""Checks all rules of a run at once. Pure: reads nothing but the arguments."""

from __future__ import annotations

import dataclasses

from megatron_cg.arguments import (
    rules_environment,
    rules_fast_path,
    rules_fsdp,
    rules_layers,
    rules_numerics,
    rules_recompute,
    rules_scopes,
)
from megatron_cg.arguments.rule import Rule
from megatron_cg.arguments.schema import Environment, GraphArguments, RunArguments
from megatron_cg.errors import Violation

RULES: tuple[Rule, ...] = (
    *rules_fsdp.RULES,
    *rules_fast_path.RULES,
    *rules_scopes.RULES,
    *rules_layers.RULES,
    *rules_recompute.RULES,
    *rules_numerics.RULES,
    *rules_environment.RULES,
)
"""The rules of a run that asks for layerwise graphs under Megatron-FSDP."""


def violations(
    run: RunArguments, graph: GraphArguments, environment: Environment
) -> tuple[Violation, ...]:
    """Every broken rule, in the order of :data:`RULES`; empty when the run can be graphed.

    A run that does not ask for layerwise graphs under Megatron-FSDP is not checked, except for
    flags of ours that would have no effect in it.
    """
    if not run.wants_graphs:
        return _flags_without_graphs(run, graph)
    return tuple(found for rule in RULES for found in rule(run, graph, environment))


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


def _flags_without_graphs(run: RunArguments, graph: GraphArguments) -> tuple[Violation, ...]:
    given = []
    for field in dataclasses.fields(graph):
        value = getattr(graph, field.name)
        # A record is useful for any run.
        if value != field.default and field.name not in ("cg_record", "cg_report"):
            words = " ".join(value) if isinstance(value, tuple) else str(value)
            given.append(f"--{field.name.replace('_', '-')} {words}")
    if not given:
        return ()
    fsdp = "with" if run.use_megatron_fsdp else "without"
    return (
        Violation(
            "flags-without-graphs",
            f"{' '.join(given)} with --cuda-graph-impl {run.cuda_graph_impl} {fsdp} "
            "--use-megatron-fsdp",
            "the flag is about layerwise graphs under Megatron-FSDP, which this run does not ask "
            "for, so it would have no effect",
            "add --use-megatron-fsdp --cuda-graph-impl transformer_engine, or drop the flag",
        ),
    )
