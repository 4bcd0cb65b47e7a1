"""Every rule: kept by a good run, broken alone by one change, and what it then says.

``python -m tests.unit.arguments.test_rules`` writes ``rule_messages.txt`` anew: read the change.
"""

import dataclasses
import re
from pathlib import Path
from typing import Any

import pytest

from megatron_cg.arguments.rule import Configuration, Rule
from megatron_cg.arguments.schema import Environment, GraphArguments, flag_of
from megatron_cg.arguments.validation import RULES, notices, violations
from megatron_cg.errors import Violation
from tests.unit.arguments.good_configuration import GOOD_ENVIRONMENT, GOOD_RUN, megatron_parser
from tests.unit.arguments.rule_cases import (
    ALL,
    CUBLAS,
    DELAYED,
    DENSE,
    DROP_AND_PAD,
    DROPLESS,
    EXPERTS,
    FULL,
    LATER,
    PEER,
    REPEATED,
    UNDER_V2,
    WHOLE,
    Case,
    case,
)

MESSAGES = Path(__file__).with_name("rule_messages.txt")


def broken_by(case: Case) -> tuple[Violation, ...]:
    return violations(*case.configured())


def test_a_good_run_keeps_every_rule() -> None:
    under_v2 = dataclasses.replace(GOOD_RUN, **UNDER_V2)
    for run in (GOOD_RUN, under_v2):
        assert violations(run, GraphArguments(), GOOD_ENVIRONMENT) == ()
    assert notices(GOOD_RUN, GOOD_ENVIRONMENT) == ()


def messages() -> str:
    said = ((case, [v for v in broken_by(case) if v.rule == case.rule]) for case in ALL)
    return "".join(f"{case}\n" + "".join(f"    {one}\n" for one in found) for case, found in said)


def test_what_the_rules_say() -> None:
    assert MESSAGES.read_text(encoding="utf-8") == messages()


@pytest.mark.parametrize("case", [case for case in ALL if len(case.change) < 2], ids=str)
def test_one_change_breaks_no_other_rule(case: Case) -> None:
    assert {v.rule for v in broken_by(case)} == {case.rule}


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.name)
def test_every_rule_has_a_case(rule: Rule) -> None:
    assert any(list(rule(Configuration(*case.configured()))) for case in ALL)


@pytest.mark.parametrize("case", ALL, ids=str)
def test_every_flag_in_a_message_exists(case: Case) -> None:
    flags = {*megatron_parser()._option_string_actions, *map(flag_of, LATER)}
    flags.add("--no-build-isolation")  # pip's
    for violation in broken_by(case):
        named = set(re.findall(r"--[a-z][a-z0-9-]*", str(violation)))
        assert named <= flags


WITHOUT_TE = {k: v for k, v in GOOD_ENVIRONMENT.versions.items() if "engine" not in k}
EXPANDABLE = {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}


@pytest.mark.parametrize(
    ("graph", "environment"),
    [
        (GraphArguments(cg_backend="native"), {"versions": WITHOUT_TE, "backend": "native"}),
        (GraphArguments(), {"versions": WITHOUT_TE, "variables": EXPANDABLE, "backend": "tape"}),
        (GraphArguments(), {"variables": {**EXPANDABLE, "NCCL_GRAPH_REGISTER": "0"}}),
        *(
            (GraphArguments(), {"versions": {**WITHOUT_TE, "transformer-engine": version}})
            for version in ("2.19", "2.19.0.dev0+abc", "3.0", "odd")
        ),
    ],
    ids=str,
)
def test_environments_that_keep_every_rule(
    graph: GraphArguments, environment: dict[str, Any]
) -> None:
    assert violations(GOOD_RUN, graph, dataclasses.replace(GOOD_ENVIRONMENT, **environment)) == ()


RAN = ("attn", "moe_router")


@pytest.mark.parametrize(
    ("kernel", "change"),
    [
        (DROPLESS, {}),
        (DROPLESS, WHOLE),
        (DROPLESS, {"cuda_graph_modules": RAN, "expert_tensor_parallel_size": 2}),
        (DROPLESS, {**DROP_AND_PAD, "expert_tensor_parallel_size": 2}),
        (DROPLESS, {"expert_model_parallel_size": 2, "cg_moe_rows": 1.0}),
        (DROPLESS, {**WHOLE, "expert_model_parallel_size": 2, "cg_moe_rows": 1.0, **PEER}),
        (CUBLAS, {}),
        (CUBLAS, {"fp8": "hybrid", "fp8_recipe": "tensorwise"}),
        (
            CUBLAS,
            {"fp8": "e4m3", "fp8_recipe": "blockwise", "expert_model_parallel_size": 2, **PEER},
        ),
        (CUBLAS, {"num_experts": 64}),
        (CUBLAS, {**WHOLE, "expert_model_parallel_size": 2, "cg_moe_rows": 1.0}),
        (CUBLAS, {"cuda_graph_modules": RAN}),
    ],
    ids=str,
)
def test_one_grouped_gemm_lets_graphs_hold_experts(
    kernel: dict[str, Any], change: dict[str, Any]
) -> None:
    assert broken_by(case("", kernel, change)) == ()


def test_torchs_grouped_gemm_is_checked_without_graphs_too() -> None:
    assert broken_by(case("", DROPLESS, cuda_graph_impl="none")) == ()
    biased = {"add_bias_linear": True, "expert_tensor_parallel_size": 2}
    (violation,) = broken_by(case("", DROPLESS, biased, cuda_graph_impl="none"))
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
    assert notices(run, Environment(versions={"torch": "3.0"})) == ()
    graph = GraphArguments(cg_layers=("attn:0-3",), cg_verify_interval=5)
    (violation,) = violations(run, graph, Environment())
    assert violation.rule == "flags-without-graphs"
    assert "--cg-layers attn:0-3 --cg-verify-interval 5" in violation.found


NEAR: list[dict[str, Any]] = [
    {"fp8": "hybrid"},
    {"fp8_param_gather": True},
    {"fp8": "hybrid", "fp8_param_gather": True, "keep_fp8_transpose_cache": True},
    {"recompute_granularity": "selective"},
    {"recompute_modules": ("mhc",)},
    {"moe_use_grouped_tensor": True, "moe_grouped_gemm": True},
    {"cuda_graph_modules": ("attn", "moe_router", "moe_preprocess")},
    {**DROP_AND_PAD, **EXPERTS},
    {**DROP_AND_PAD, **EXPERTS, "moe_token_dispatcher_type": "flex"},
    DENSE,
    {**FULL, **WHOLE, "num_experts": None},
    {**FULL, **WHOLE, "num_experts": None, "custom_layers": True},
    {**FULL, **DENSE, "mtp_num_layers": 1, "recompute_method": "uniform"},
    {**FULL, **DENSE, **REPEATED, "recompute_method": "block"},
    {**FULL, **DROP_AND_PAD, **EXPERTS},
    {**FULL, **DROP_AND_PAD, "cuda_graph_modules": ("attn", "mlp", "moe"), "moe_layer_freq": 2},
    {**WHOLE, "num_experts": None},
    {**WHOLE, "moe_layer_freq": (0, 1, 0, 1), "cg_layers": ("layer:0,2",)},
    {**FULL, **WHOLE, "moe_layer_freq": (0, 1, 0, 1), "cg_layers": ("layer:0,2",)},
    {"cuda_graph_modules": ("mamba", "attn", "mlp"), "hybrid_layer_pattern": "M*|M-"},
    {"cuda_graph_modules": ("mamba",), "custom_layers": True},
    {"cuda_graph_modules": ("attn", "mlp", "moe_router"), "moe_layer_freq": 2},
    {"cuda_graph_modules": ("moe_router",), "packs_sequences": True, "qk_clip": True},
    {"cuda_graph_modules": ("attn",), "moe_router_load_balancing_type": ("sinkhorn",)},
    DELAYED,
]


@pytest.mark.parametrize("change", NEAR, ids=str)
def test_runs_that_are_near_a_rule_and_keep_it(change: dict[str, Any]) -> None:
    assert broken_by(case("", change)) == ()


def test_unseen_versions_and_the_random_tracker_are_noticed() -> None:
    versions = {**GOOD_ENVIRONMENT.versions, "torch": "2.12.0", "megatron-fsdp": "0.7.0"}
    environment = dataclasses.replace(GOOD_ENVIRONMENT, versions=versions)
    run = dataclasses.replace(GOOD_RUN, te_rng_tracker=False)
    lines = notices(run, environment)
    assert [line.split(" ")[0] for line in lines] == ["megatron-fsdp", "torch", "--te-rng-tracker"]


if __name__ == "__main__":
    MESSAGES.write_text(messages(), encoding="utf-8")
