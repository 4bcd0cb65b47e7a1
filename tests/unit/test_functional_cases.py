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
from packaging.version import Version

import megatron_cg
from megatron_cg.align.command import DETERMINISTIC_ENVIRONMENT, arguments
from megatron_cg.errors import ConfigurationError
from megatron_cg.versions import installed_version
from tests.functional import cases, test_failures
from tests.functional.cases import Case
from tests.functional.conftest import plan_of
from tests.functional.tampered import ACTIONS, VARIABLES

TE = "transformer-engine"
REQUIREMENT = Path(__file__, "../../../requirements/contract.txt").resolve().read_text()
TE_VERSION = REQUIREMENT.rpartition(f"{TE}==")[2].strip()
"""The release that the functional tests run with."""

DATA = ("--mock-data", "--tokenizer-type", "NullTokenizer")
LIFE = [
    *cases.LIFE.values(),
    *(cases.resumed(cases.LIFE[n], 6) for n in ("saved", "saved-dropout")),
]
ALL = [*cases.CASES, *LIFE, test_failures.case("failing"), test_failures.mixture("mixture")]
"""Every case that a functional test trains; others differ from one of these in their names."""


@pytest.fixture(autouse=True)
def hopper(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What Megatron's rules ask of the machine, and this package enabled."""
    capability = SimpleNamespace(major=9, minor=0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda *_: capability)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))
    # Set and taken away again, so that what Megatron itself sets is undone too.
    for name in (*DETERMINISTIC_ENVIRONMENT, "CUDA_DEVICE_MAX_CONNECTIONS"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    # Megatron and we read which TE is installed; a run on GPUs has it, this environment need not.
    monkeypatch.setattr("megatron.core.utils._te_version", Version(TE_VERSION))
    monkeypatch.setattr(
        "megatron_cg.arguments.schema.installed_version",
        lambda name: TE_VERSION if name == TE else installed_version(name),
    )
    monkeypatch.setenv("RANK", "0")
    deterministic = torch.are_deterministic_algorithms_enabled()
    megatron_cg.enable()
    yield
    megatron_cg.disable()
    torch.use_deterministic_algorithms(deterministic)


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


def test_what_is_to_be_refused_is_refused_for_that_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ConfigurationError) as error:
        validated(cases.EXPANDABLE_ALONE, tmp_path, monkeypatch, graphs=True)
    assert [violation.rule for violation in error.value.violations] == ["expandable-segments"]


def test_names_of_cases_are_their_own() -> None:
    for group in (cases.CASES, LIFE):
        assert len({case.name for case in group}) == len(group)


def test_scenarios_are_known() -> None:
    given = [value for case in ALL for name, value in case.env if name in VARIABLES]
    assert given and {value.partition("@")[0] for value in given} <= set(ACTIONS)
