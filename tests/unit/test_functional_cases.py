"""What the functional tests train is accepted by Megatron's own rules and ours, but where it says.

Both runs of every case, through Megatron's real parser, without a GPU.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron_cg.arguments import validation
from megatron_cg.errors import ConfigurationError
from megatron_cg.tools.align.command import arguments
from megatron_cg.tools.cpu.grouped_linear import in_place_of_te
from megatron_cg.tools.plan.worker import docstrings_read_once
from tests.functional import (
    cases,
    feature_cases,
    life_cases,
    test_failures,
    test_packed,
    test_refusals,
    test_scale,
)
from tests.functional.cases import Case
from tests.functional.conftest import plan_of, pytest_xdist_auto_num_workers
from tests.functional.tampered import ACTIONS, VARIABLES

pytestmark = pytest.mark.usefixtures("hopper", "quick_parser", "te_kernels")
DATA = ("--mock-data", "--tokenizer-type", "NullTokenizer")
LIFE = [
    *life_cases.LIFE.values(),
    *(life_cases.resumed(life_cases.LIFE[n], 6) for n in ("saved", "saved-dropout")),
]
ALL = [
    *cases.CASES,
    *cases.COMPILED,
    *feature_cases.FEATURES,
    *LIFE,
    *test_packed.CASES,
    *test_scale.CASES,
    test_failures.case("failing"),
    test_failures.moe_case("moe_case"),
]
"""Every case that a functional test trains; others differ from one of these in their names."""


@pytest.fixture(scope="module")
def quick_parser() -> Iterator[None]:
    """Megatron's parser reads the sources of its configurations once, not in each test."""
    undo = docstrings_read_once()
    yield
    undo()


@pytest.fixture
def te_kernels(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What rules ask of Transformer Engine: its grouped GEMM and fused permutation are there."""
    from megatron.core.transformer.moe import moe_utils

    for name in vars(moe_utils):
        if name.startswith("fused_") and vars(moe_utils)[name] is None:
            monkeypatch.setattr(moe_utils, name, lambda: None)
    with in_place_of_te():
        yield


def validated(case: Case, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, graphs: bool) -> Any:
    """Megatron's configuration of the model as the run would build it; raises as the run would."""
    from megatron.training import arguments as megatron
    from megatron.training.argument_utils import core_transformer_config_from_args

    script = Path("pretrain_gpt.py")
    plan = plan_of(case, tmp_path, script)
    words = arguments(plan, graphs=graphs, data=DATA, record=tmp_path)
    start = words.index(str(script))
    monkeypatch.setattr("sys.argv", [word for word in words[start:] if word != "--cg-record"][:-1])
    monkeypatch.setenv("WORLD_SIZE", str(case.gpus))
    for name, value in case.env:
        monkeypatch.setenv(name, value)
    args = megatron.parse_args()
    megatron.validate_args(args)
    assert args.train_iters == case.steps
    return core_transformer_config_from_args(args)


@pytest.mark.parametrize("graphs", [False, True], ids=["eager", "graphs"])
@pytest.mark.parametrize("case", ALL, ids=lambda case: case.name)
def test_a_case_is_accepted(
    case: Case, graphs: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = validated(case, tmp_path, monkeypatch, graphs=graphs)
    captured = [module.name for module in config.cuda_graph_modules]
    assert captured == (list(case.scopes) if graphs else [])
    assert (config.cuda_graph_impl == "transformer_engine") is graphs


@pytest.mark.parametrize(
    ("case", "rule"),
    [
        (life_cases.EXPANDABLE_ALONE, "expandable-segments"),
        (life_cases.SINKHORN, "sinkhorn-router"),
        (test_refusals.BLOCK_SCALED, "fp8-primary-weights-recipe"),
    ],
    ids=lambda item: getattr(item, "name", item),
)
def test_what_is_to_be_refused_is_refused_for_that_reason(
    case: Case, rule: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ConfigurationError) as error:
        validated(case, tmp_path, monkeypatch, graphs=True)
    assert [violation.rule for violation in error.value.violations] == [rule]


def test_megatron_itself_accepts_what_fails_in_megatron_fsdp(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = test_refusals.BLOCK_SCALED
    rules = tuple(
        rule
        for rule in validation.RULES
        if getattr(rule, "rule", None) != "fp8-primary-weights-recipe"
    )
    monkeypatch.setattr(validation, "RULES", rules)
    validated(case, tmp_path, monkeypatch, graphs=True)


def test_what_is_refused_only_with_graphs_trains_without(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    validated(life_cases.SINKHORN, tmp_path, monkeypatch, graphs=False)


def test_names_of_cases_are_their_own() -> None:
    for group in ([*cases.CASES, *feature_cases.FEATURES], LIFE):
        assert len({case.name for case in group}) == len(group)


def test_scenarios_are_known() -> None:
    given = [value for case in ALL for name, value in case.env if name in VARIABLES]
    assert given and {value.partition("@")[0] for value in given} <= set(ACTIONS)


@pytest.mark.parametrize(
    ("gib", "expected"),
    [([], 1), ([8], 1), ([139.8, 139.8], 13), ([139.8, 79.6], 7)],
)
def test_as_many_at_once_as_the_smallest_gpu_has_memory_for(
    gib: list[float], expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpus = [SimpleNamespace(total_memory=int(size * 2**30)) for size in gib]
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(gpus))
    monkeypatch.setattr(torch.cuda, "get_device_properties", gpus.__getitem__)
    assert pytest_xdist_auto_num_workers() == expected
