"""Every rule: kept by a good run, broken alone by one change, and what it then says.

``python -m tests.unit.arguments.test_rules`` writes ``rule_messages.txt`` anew: read the change.
"""

import dataclasses
import re
from typing import Any

import pytest

from megatron_cg.arguments.rule import Configuration, Rule
from megatron_cg.arguments.rules import RULES, notices, violations
from megatron_cg.arguments.schema import Environment, GraphArguments, flag_of
from megatron_cg.errors import Violation
from tests.unit.arguments.good_configuration import GOOD_ENVIRONMENT, GOOD_RUN, megatron_parser
from tests.unit.arguments.rule_cases import ALL, BROKEN, KEPT, LATER, MESSAGES, Case


def broken_by(case: Case) -> tuple[Violation, ...]:
    return violations(*case.configured())


def messages() -> str:
    said = ((case, [v for v in broken_by(case) if v.rule == case.rule]) for case in ALL)
    return "".join(f"{case}\n" + "".join(f"    {one}\n" for one in found) for case, found in said)


def test_what_the_rules_say() -> None:
    assert MESSAGES.read_text(encoding="utf-8") == messages()


@pytest.mark.parametrize("case", [case for case in BROKEN if len(case.change) < 2], ids=str)
def test_one_change_breaks_no_other_rule(case: Case) -> None:
    assert {v.rule for v in broken_by(case)} == {case.rule}


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.name)
def test_every_rule_has_a_case(rule: Rule) -> None:
    assert any(list(rule(Configuration(*case.configured()))) for case in BROKEN)


@pytest.mark.parametrize("case", BROKEN, ids=str)
def test_a_case_breaks_its_rule_and_every_flag_in_a_message_exists(case: Case) -> None:
    flags = {*megatron_parser()._option_string_actions, *map(flag_of, LATER)}
    flags.add("--no-build-isolation")  # pip's
    found = broken_by(case)
    assert case.rule in {violation.rule for violation in found}
    for violation in found:
        named = set(re.findall(r"--[a-z][a-z0-9-]*", str(violation)))
        assert named <= flags


@pytest.mark.parametrize("case", [case for case in ALL if case.rule == KEPT], ids=str)
def test_runs_that_keep_every_rule(case: Case) -> None:
    """Some are near one that breaks a rule."""
    assert broken_by(case) == ()


def test_torchs_grouped_gemm_is_checked_without_graphs_too() -> None:
    grouped = {"cg_grouped_gemm": "torch", "moe_grouped_gemm": True, "add_bias_linear": True}
    sharded = {"expert_tensor_parallel_size": 2, "cuda_graph_impl": "none"}
    (violation,) = broken_by(Case("", grouped | sharded))
    assert violation.rule == "grouped-gemm"


@pytest.mark.parametrize(
    "change",
    [
        {"use_megatron_fsdp": False},
        {"cuda_graph_impl": "none"},
        {"cuda_graph_impl": "full_iteration"},
    ],
    ids=str,
)
def test_no_rule_looks_at_a_run_without_layerwise_graphs(change: dict[str, Any]) -> None:
    run = dataclasses.replace(GOOD_RUN, fsdp_double_buffer=False, bf16=False, **change)
    assert violations(run, GraphArguments(cg_record="records"), Environment()) == ()
    assert list(notices(run, Environment(versions={"torch": "3.0"}))) == []
    graph = GraphArguments(cg_layers=("attn:0-3",), cg_verify_interval=5)
    (violation,) = violations(run, graph, Environment())
    assert violation.rule == "flags-without-graphs"
    assert "--cg-layers attn:0-3 --cg-verify-interval 5" in violation.found


def test_unseen_versions_and_the_random_tracker_are_noticed() -> None:
    assert list(notices(GOOD_RUN, GOOD_ENVIRONMENT)) == []
    versions = {**GOOD_ENVIRONMENT.versions, "torch": "2.12.0", "megatron-fsdp": "0.7.0"}
    environment = dataclasses.replace(GOOD_ENVIRONMENT, versions=versions)
    run = dataclasses.replace(GOOD_RUN, te_rng_tracker=False)
    lines = notices(run, environment)
    assert [line.split(" ")[0] for line in lines] == ["megatron-fsdp", "torch", "--te-rng-tracker"]


if __name__ == "__main__":
    MESSAGES.write_text(messages(), encoding="utf-8")
