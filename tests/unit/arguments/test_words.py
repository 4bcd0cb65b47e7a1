"""What rules say to a caller from Python: real fields of Megatron's configs, and real arguments."""

import inspect
import re
from dataclasses import fields
from types import SimpleNamespace
from typing import Any

import pytest
from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.optimizer import OptimizerConfig
from megatron.core.transformer.transformer_config import TransformerConfig

import megatron_cg
from megatron_cg.arguments import GraphArguments, violations
from megatron_cg.arguments.schema import argument_of
from megatron_cg.arguments.words import PACKING, said
from megatron_cg.errors import Violation
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
    for plain, one in zip(of_flags, said(of_flags, configs=CONFIGS.items()), strict=True):
        text = str(one)
        places, calls = PLACE.findall(text), CALL.findall(text)
        assert not re.search(r"--[a-z]|\b(add|type|drop) (cfg|megatron_cg)", text)
        assert all(hasattr(CONFIGS[config], field) for config, field in places)
        assert set(calls) <= inspect.signature(megatron_cg.enable).parameters.keys()
        flags = re.findall(r"--[a-z]", str(plain))
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
    (one,) = said([Violation("rule", typed, typed, typed)], "f", CONFIGS.items())
    assert (one.found, one.reason, one.remedy) == (written,) * 3


def test_scopes_are_the_field_that_is_set() -> None:
    configs = {"cfg.model": SimpleNamespace(cuda_graph_modules=None, cuda_graph_scope="full")}
    (one,) = said(
        [Violation("rule", "", "", "type --cuda-graph-modules attn")], "f", configs.items()
    )
    assert one.remedy == "set cfg.model.cuda_graph_scope=['attn']"
