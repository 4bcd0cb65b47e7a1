"""Checks all rules of a run at once. Pure: reads nothing but the arguments."""

import dataclasses

from megatron_cg import extensions
from megatron_cg.arguments import rules_environment, rules_fsdp, rules_scopes
from megatron_cg.arguments.rule import Configuration, Facts, Rule
from megatron_cg.arguments.schema import Environment, GraphArguments, RunArguments, flag_of
from megatron_cg.errors import Violation

ANY_RUN = ("cg_record", "cg_report", "cg_grouped_gemm")
"""Fields of GraphArguments that are useful without graphs."""


def _flags_without_effect(given: Configuration) -> list[Facts]:
    if given.run.wants_graphs:
        return []
    flags = []
    for field in dataclasses.fields(given.graph):
        value = getattr(given.graph, field.name)
        if value != field.default and field.name not in ANY_RUN:
            words = " ".join(value) if isinstance(value, tuple) else str(value)
            flags.append(f"{flag_of(field.name)} {words}")
    fsdp = "with" if given.run.use_megatron_fsdp else "without"
    return [{"flags": " ".join(flags), "fsdp": fsdp}] if flags else []


def _without_their_extension(given: Configuration) -> list[Facts]:
    settings = vars(given.run) if given.run.wants_graphs else {}
    asked = extensions.asked_of(given.environment.without, settings | vars(given.graph))
    return [
        {"folder": folder, "setting": flag_of(field), "value": value}
        for folder, field, value in asked
    ]


extension_missing = Rule(
    "extension-missing",
    _without_their_extension,
    "{flag:{setting} {value}}",
    "it needs the extension megatron_cg/{folder}, which is not installed",
    "install the whole package again with pip, or {drop:{setting}}",
    without_graphs=True,
)

RULES: tuple[Rule, ...] = (
    extension_missing,
    Rule(
        "flags-without-graphs",
        _flags_without_effect,
        "{flag:{flags}} with {flag:--cuda-graph-impl {run.cuda_graph_impl}} {fsdp} "
        "{flag:--use-megatron-fsdp}",
        "the flag only affects layerwise graphs under Megatron-FSDP, which this run does not "
        "request, so it would have no effect",
        "{add:--use-megatron-fsdp --cuda-graph-impl transformer_engine}, or drop the flag",
        without_graphs=True,
    ),
    *rules_fsdp.RULES,
    *rules_scopes.RULES,
    *extensions.rules(),
    *rules_environment.RULES,
)


def violations(
    run: RunArguments, graph: GraphArguments, environment: Environment
) -> tuple[Violation, ...]:
    """Every broken rule, in the order of :data:`RULES`; empty when the run can be graphed.

    In a run without layerwise graphs under Megatron-FSDP only the rules ``without_graphs`` apply:
    flags of ours that would have no effect, and the grouped GEMM.
    """
    given = Configuration(run, graph, environment)
    return tuple(
        violation
        for rule in RULES
        if run.wants_graphs or rule.without_graphs
        for violation in rule(given)
    )


def notices(run: RunArguments, environment: Environment) -> tuple[str, ...]:
    if not run.wants_graphs:
        return ()
    lines = list(rules_environment.unseen_versions(environment))
    if not run.te_rng_tracker:
        lines.append(
            "--te-rng-tracker was not given and Megatron turns it on for graphs. An eager run "
            "draws the same weights and dropout masks only with --te-rng-tracker."
        )
    return tuple(lines)
