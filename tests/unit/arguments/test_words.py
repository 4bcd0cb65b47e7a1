"""What rules say to a caller from Python: real fields of Megatron's configs, and real arguments."""

import ast
import inspect
import re
from collections.abc import Iterator
from dataclasses import fields
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.optimizer import OptimizerConfig
from megatron.core.transformer.transformer_config import TransformerConfig

import megatron_cg
from megatron_cg.arguments.schema import GraphArguments, argument_of
from megatron_cg.arguments.validation import violations
from megatron_cg.arguments.words import (
    PACKING,
    UNITS,
    errors_name_arguments,
    in_python_terms,
    sentences,
)
from megatron_cg.clients.bridge import errors_name_fields
from megatron_cg.errors import CaptureError, Violation
from megatron_cg.upstream.patch import undone_after
from tests.unit.arguments.rule_cases import ALL, LATER, Case

CONFIGS: dict[str, Any] = {
    "cfg.optimizer": OptimizerConfig(),
    "cfg.ddp": DistributedDataParallelConfig(),
    "cfg.model": TransformerConfig(num_layers=1, hidden_size=8, num_attention_heads=1),
    "cfg.dataset": SimpleNamespace(**dict.fromkeys(PACKING.values())),
    "cfg.comm_overlap": None,
    "cfg.mixed_precision": SimpleNamespace(bf16=True, fp16=False, fp8=None, fp4=None),
}
vars(CONFIGS["cfg.model"]).update(dict.fromkeys(LATER, False))
PLACE = re.compile(r"(cfg\.\w+)\.(\w+)")
CALL = re.compile(r"megatron_cg\.enable\((\w+)=")


def test_enable_takes_each_flag_under_its_name() -> None:
    ours = {argument_of(field.name) for field in fields(GraphArguments)}
    assert inspect.signature(megatron_cg.enable).parameters.keys() == {*ours, "full_recompute"}


@pytest.mark.parametrize("case", [c for c in ALL if c.rule != "flags-without-graphs"], ids=str)
def test_every_message_names_what_there_is(case: Case) -> None:
    of_flags = violations(*case.configured())
    for plain, one in zip(
        of_flags, in_python_terms(of_flags, configs=CONFIGS.items()), strict=True
    ):
        commands = partial(re.sub, r"pip install --[a-z-]+", "pip install")
        text = commands(str(one))
        places, calls = PLACE.findall(text), CALL.findall(text)
        assert not re.search(r"--[a-z]|\b(add|type|drop) (cfg|megatron_cg)", text)
        assert all(hasattr(CONFIGS[config], field) for config, field in places)
        assert set(calls) <= inspect.signature(megatron_cg.enable).parameters.keys()
        flags = re.findall(r"--[a-z]", commands(str(plain)))
        # Megatron has an optimizer's flags and fields of experts under the same names.
        assert len(flags) == len(places) + len(calls)


@pytest.mark.parametrize(
    ("typed", "written"),
    [
        ("add --fsdp-double-buffer (x)", "set cfg.ddp.fsdp_double_buffer=True (x)"),
        ("drop --qk-clip and --cg-layers", "set cfg.model.qk_clip=False and call f(layers=[])"),
        ("add --disable-bias-linear", "set cfg.model.add_bias_linear=False"),
        ("type --cuda-graph-modules attn, or", "set cfg.model.cuda_graph_modules=['attn'], or"),
        ("--moe-expert-capacity-factor 1.0 in", "cfg.model.moe_expert_capacity_factor=1.0 in"),
        ("type --bf16 instead", "set cfg.mixed_precision.bf16=True instead"),
        ("--cg-moe-rows -1", "megatron_cg.enable(moe_rows=-1)"),
        ("--cg-layers attn:0,x, or", "f(layers=['attn:0,x']), or"),
        ("drop --cg-moe-rows", "call megatron_cg.enable(moe_rows=None)"),
    ],
)  # fmt: skip
def test_flags_become_assignments(typed: str, written: str) -> None:
    (one,) = in_python_terms([Violation("rule", typed, typed, typed)], "f", CONFIGS.items())
    assert (one.found, one.reason, one.remedy) == (written,) * 3


def test_scopes_are_the_field_that_is_set() -> None:
    configs = {"cfg.model": SimpleNamespace(cuda_graph_modules=None, cuda_graph_scope="full")}
    (one,) = in_python_terms(
        [Violation("rule", "", "", "type --cuda-graph-modules attn")], "f", configs.items()
    )
    assert one.remedy == "set cfg.model.cuda_graph_scope=['attn']"


PACKAGE = Path(megatron_cg.__file__).parent
OF_COMMANDS = ("tools", "telemetry", "experts", "integrations/megatron", "arguments", "__main__.py")
"""What no loop of one's own reaches without megatron-core's configs."""


def texts() -> Iterator[str]:
    """Every string of code that an own loop runs, but docstrings, if it names a flag."""
    for path in PACKAGE.rglob("*.py"):
        if str(path.relative_to(PACKAGE)).startswith(OF_COMMANDS):
            continue
        tree = ast.parse(path.read_text())
        plain = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
        for node in ast.walk(tree):
            text = node.value if isinstance(node, ast.Constant) else None
            if isinstance(text, str) and id(node) not in plain and re.search("--[a-z]", text):
                yield text


@pytest.mark.parametrize("call", [UNITS, "GraphedLayers"])
def test_errors_of_own_loops_name_arguments_and_no_flags(call: str) -> None:
    taken = inspect.signature(getattr(megatron_cg, call)).parameters
    every = list(texts())
    assert len(every) > 10
    for text in every:
        made = sentences(call)(text)
        assert not re.search(r"(?<!align )(?<!doctor )(?<!install )--[a-z]|\bor units", made), made
        assert set(re.findall(rf"{call}\((\w+)=", made)) <= taken.keys(), made


def test_errors_are_said_anew_where_they_leave_a_loop() -> None:
    text = "x. Leave it out of --cg-layers, or type --cg-no-fsdp-fast-path: --cuda-graph-impl none"
    with pytest.raises(CaptureError) as error, errors_name_arguments(UNITS):
        raise CaptureError(text)
    expected = "x. Leave it out of units, or call graph_units(fast_path=False): no graph_units"
    assert str(error.value) == expected
    configs = {name.removeprefix("cfg."): config for name, config in CONFIGS.items()}
    with undone_after(errors_name_fields(SimpleNamespace(**configs))):
        assert "enable(fast_path=False): cfg.model.cuda_graph_impl='none'" in str(
            CaptureError(text)
        )
    assert str(CaptureError(text)) == text
