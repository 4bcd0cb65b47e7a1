"""Every rule: kept by a good run, broken alone by one change, and what it then says.

``python -m tests.unit.arguments.test_rules`` writes ``rule_messages.txt`` anew: read the change.
"""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import Any

import pytest

from megatron_cg.arguments import Environment, GraphArguments, RunArguments, notices, violations
from megatron_cg.arguments.rule import Rule
from megatron_cg.arguments.schema import BACKENDS
from megatron_cg.arguments.validation import RULES
from megatron_cg.errors import Violation
from tests.unit.arguments.good_configuration import GOOD_ENVIRONMENT, GOOD_RUN, megatron_parser
from tests.unit.arguments.rule_cases import ALL, DROP_AND_PAD, Case

MESSAGES = Path(__file__).with_name("rule_messages.txt")


def configured(case: Case) -> tuple[RunArguments, GraphArguments, Environment]:
    versions = {
        name: version
        for name, version in {**GOOD_ENVIRONMENT.versions, **case.versions}.items()
        if version is not None
    }
    graph = GraphArguments(cg_layers=case.layers, **case.graph)
    environment = dataclasses.replace(
        GOOD_ENVIRONMENT,
        versions=versions,
        variables=case.variables,
        backend=BACKENDS[graph.cg_backend],
    )
    return dataclasses.replace(GOOD_RUN, **case.change), graph, environment


def broken_by(case: Case) -> tuple[Violation, ...]:
    return violations(*configured(case))


def test_a_good_run_keeps_every_rule() -> None:
    assert violations(GOOD_RUN, GraphArguments(), GOOD_ENVIRONMENT) == ()
    assert notices(GOOD_RUN, GraphArguments(), GOOD_ENVIRONMENT) == ()


def messages() -> str:
    """What each case says of its rule."""
    said = ((case, *(v for v in broken_by(case) if v.rule == case.rule)) for case in ALL)
    return "".join(f"{case}\n    {found}\n" for case, found in said)


def test_what_the_rules_say() -> None:
    assert MESSAGES.read_text(encoding="utf-8") == messages()


@pytest.mark.parametrize("case", [case for case in ALL if len(case.change) < 2], ids=str)
def test_one_change_breaks_no_other_rule(case: Case) -> None:
    assert {v.rule for v in broken_by(case)} == {case.rule}


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.name)
def test_every_rule_has_a_case(rule: Rule) -> None:
    assert any(list(rule(*configured(case))) for case in ALL)


@pytest.mark.parametrize("case", ALL, ids=str)
def test_every_flag_in_a_message_exists(case: Case) -> None:
    flags = set(megatron_parser()._option_string_actions)
    for violation in broken_by(case):
        named = set(re.findall(r"--[a-z][a-z0-9-]*", str(violation)))
        assert named <= flags


WITHOUT_TE = {k: v for k, v in GOOD_ENVIRONMENT.versions.items() if "engine" not in k}
EXPANDABLE = {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}


@pytest.mark.parametrize(
    ("graph", "environment"),
    [
        (GraphArguments(cg_backend="native"), {"versions": WITHOUT_TE, "backend": "native"}),
        (
            GraphArguments(),
            {"versions": WITHOUT_TE, "variables": EXPANDABLE, "backend": "tape"},
        ),
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


DROPLESS = dataclasses.replace(
    GOOD_RUN,
    cuda_graph_modules=("attn", "moe"),
    moe_grouped_gemm=True,
    add_bias_linear=False,
)
TORCH = GraphArguments(cg_grouped_gemm="torch")
ROWS = GraphArguments(cg_grouped_gemm="torch", cg_moe_rows=1.0)


@pytest.mark.parametrize(
    ("change", "graph"),
    [
        ({}, TORCH),
        ({"cuda_graph_modules": ()}, TORCH),
        ({"cuda_graph_modules": ("attn", "moe_router"), "expert_tensor_parallel_size": 2}, TORCH),
        ({**DROP_AND_PAD, "expert_tensor_parallel_size": 2}, TORCH),
        ({"expert_model_parallel_size": 2}, ROWS),
        ({"cuda_graph_modules": (), "expert_model_parallel_size": 2}, ROWS),
    ],
    ids=str,
)
def test_torchs_grouped_gemm_lets_graphs_hold_experts(
    change: dict[str, Any], graph: GraphArguments
) -> None:
    assert violations(dataclasses.replace(DROPLESS, **change), graph, GOOD_ENVIRONMENT) == ()


def test_torchs_grouped_gemm_is_checked_without_graphs_too() -> None:
    eager = dataclasses.replace(DROPLESS, cuda_graph_impl="none")
    assert violations(eager, TORCH, GOOD_ENVIRONMENT) == ()
    biased = dataclasses.replace(eager, add_bias_linear=True, expert_tensor_parallel_size=2)
    (violation,) = violations(biased, TORCH, GOOD_ENVIRONMENT)
    assert violation.rule == "grouped-gemm-bias"


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
    assert notices(run, GraphArguments(), Environment(versions={"torch": "3.0"})) == ()
    graph = GraphArguments(cg_layers=("attn:0-3",), cg_verify_interval=5)
    (violation,) = violations(run, graph, Environment())
    assert violation.rule == "flags-without-graphs"
    assert "--cg-layers attn:0-3 --cg-verify-interval 5" in violation.found


_FP8: dict[str, Any] = {"fp8": "hybrid", "fp8_param_gather": True}
FULL: dict[str, Any] = {
    "recompute_granularity": "full",
    "attention_dropout": 0.0,
    "hidden_dropout": 0.0,
    "cuda_graph_modules": (),
}


@pytest.mark.parametrize(
    "change",
    [
        {"fp8": "hybrid"},
        {"fp8_param_gather": True},
        {**_FP8, "keep_fp8_transpose_cache": True},
        {"recompute_granularity": "selective", "recompute_modules": ("moe_act",)},
        {"recompute_granularity": "selective", "cuda_graph_modules": ("moe_router",)},
        {"cuda_graph_modules": ("attn", "moe_router", "moe_preprocess")},
        {**DROP_AND_PAD, "cuda_graph_modules": ("attn", "moe")},
        {"cuda_graph_modules": ("attn", "mlp"), "num_experts": None},
        {**FULL, "num_experts": None},
        {**FULL, "num_experts": None, "mtp_num_layers": 1},
        {**FULL, "num_experts": None, "custom_layers": True},
        {**FULL, "cuda_graph_modules": ("attn", "mlp"), "num_experts": None},
        {**FULL, **DROP_AND_PAD, "cuda_graph_modules": ("attn", "moe")},
        {**FULL, **DROP_AND_PAD, "cuda_graph_modules": ("attn", "mlp", "moe"), "moe_layer_freq": 2},
        {"cuda_graph_modules": (), "num_experts": None},
        {"cuda_graph_modules": ("mamba", "attn", "mlp"), "hybrid_layer_pattern": "M*|M-"},
        {"cuda_graph_modules": ("attn", "mamba"), "custom_layers": True},
        {"cuda_graph_modules": ("attn", "mlp", "moe_router"), "moe_layer_freq": 2},
    ],
    ids=str,
)
def test_runs_that_are_near_a_rule_and_keep_it(change: dict[str, Any]) -> None:
    run = dataclasses.replace(GOOD_RUN, **change)
    assert violations(run, GraphArguments(), GOOD_ENVIRONMENT) == ()


@pytest.mark.parametrize("change", [{}, FULL], ids=["", "full recompute"])
def test_whole_dense_layers_of_a_mixed_model_can_be_captured(change: dict[str, Any]) -> None:
    run = dataclasses.replace(GOOD_RUN, cuda_graph_modules=(), moe_layer_freq=(0, 1, 0, 1))
    graph = GraphArguments(cg_layers=("layer:0,2",))
    assert violations(dataclasses.replace(run, **change), graph, GOOD_ENVIRONMENT) == ()


def test_unseen_versions_and_the_random_tracker_are_noticed() -> None:
    versions = {**GOOD_ENVIRONMENT.versions, "torch": "2.12.0", "megatron-fsdp": "0.7.0"}
    environment = dataclasses.replace(GOOD_ENVIRONMENT, versions=versions)
    run = dataclasses.replace(GOOD_RUN, te_rng_tracker=False)
    lines = notices(run, GraphArguments(), environment)
    assert [line.split(" ")[0] for line in lines] == ["megatron-fsdp", "torch", "--te-rng-tracker"]


if __name__ == "__main__":
    MESSAGES.write_text(messages(), encoding="utf-8")
