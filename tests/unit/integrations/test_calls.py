"""Calls from Python: wrong arguments are named, and messages name fields and arguments."""

import inspect
import re
from dataclasses import fields
from types import SimpleNamespace
from typing import Any

import pytest
from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.optimizer import OptimizerConfig
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import nn

import megatron_cg
from megatron_cg import enable, graph_units
from megatron_cg.arguments.megatron import PACKING
from megatron_cg.arguments.rules import violations
from megatron_cg.arguments.schema import GraphArguments, argument_of
from megatron_cg.clients.bridge import naming_fields
from megatron_cg.errors import ArgumentError, CaptureError, HostSyncError, say, speaking
from megatron_cg.integrations.call_arguments import UNITS, CallVoice, backend_of, several
from megatron_cg.tape.tape_backend import TapeBackend
from tests.unit.arguments.rule_cases import BROKEN, LATER, Case
from tests.unit.backends.cuda_double import cuda_double

MODEL = nn.Linear(1, 1)
"""Not looked at: arguments come first."""


def units(**given: Any) -> Any:
    return graph_units(MODEL, **{"units": ["layers.*"], "backend": "tape", **given})


BOTH: list[dict[str, Any]] = [
    {"on_mismatch": "eagr"},
    {"on_failure": "eagr"},
    {"verify_interval": -1},
    {"verify_interval": 1.5},
    {"verify_interval": True},
    {"backend": "tapes"},
    {"backend": 3},
    {"fast_path": ("unshard",)},
]
WRONG = [
    *((make, given) for make in (units, enable) for given in BOTH),
    (units, {"warmup_steps": 0}),
    (units, {"separate_inputs": "no"}),
    (enable, {"record": 5}),
    (enable, {"packed_samples": 0}),
    (enable, {"moe_rows": True}),
    (enable, {"moe_rows": "2"}),
    (enable, {"grouped_gemm": "torhc"}),
    (enable, {"moe_exchange": "pear"}),
]


@pytest.mark.parametrize(("make", "given"), WRONG)
def test_a_wrong_argument_is_named(make: Any, given: dict[str, Any]) -> None:
    with pytest.raises(ArgumentError) as error:
        make(**given)
    ((name, value),) = given.items()
    assert [violation.found for violation in error.value.violations] == [f"{name}={value!r}"]


def test_all_mistakes_come_at_once() -> None:
    with pytest.raises(ArgumentError, match="units names nothing") as error:
        units(units=[], on_failure="eagr", on_mismatch="eror")
    assert len(error.value.violations) == 3


def test_a_backend_can_be_named(monkeypatch: pytest.MonkeyPatch) -> None:
    from megatron_cg.backends import te_backend as transformer_engine

    monkeypatch.setattr(transformer_engine, "TransformerEngineBackend", lambda: "TE's")
    made: dict[Any, Any] = {name: backend_of(name) for name in ("te", "transformer_engine", None)}
    assert set(made.values()) == {"TE's"} and isinstance(backend_of("tape"), TapeBackend)
    backend: Any = TapeBackend()
    assert backend_of(backend) is backend
    with cuda_double():
        assert backend_of("native").name == "native"
    with pytest.raises(CaptureError, match="torch sees no GPU"):
        backend_of("native")


def test_one_of_several_may_be_given_alone() -> None:
    assert several("layers.*") == ("layers.*",) and several(["a", "b"]) == ("a", "b")
    assert several(nn.Linear) == (nn.Linear,) and several(MODEL) == (MODEL,)
    blocks = nn.ModuleList([nn.Linear(1, 1), nn.Linear(1, 1)])
    assert several(blocks) == tuple(blocks)


CONFIGS: dict[str, Any] = {
    "cfg.train": SimpleNamespace(micro_batch_size=1),
    "cfg.optimizer": OptimizerConfig(),
    "cfg.ddp": DistributedDataParallelConfig(),
    "cfg.model": TransformerConfig(num_layers=1, hidden_size=8, num_attention_heads=1),
    "cfg.dataset": SimpleNamespace(**dict.fromkeys(PACKING.values())),
    "cfg.comm_overlap": None,
    "cfg.mixed_precision": SimpleNamespace(bf16=True, fp16=False, fp8=None, fp4=None),
}
vars(CONFIGS["cfg.model"]).update(dict.fromkeys(LATER, False))


def test_enable_takes_each_flag_under_its_name() -> None:
    ours = {argument_of(field.name) for field in fields(GraphArguments)}
    assert inspect.signature(megatron_cg.enable).parameters.keys() == {*ours, "full_recompute"}


@pytest.mark.parametrize("case", [c for c in BROKEN if c.rule != "flags-without-graphs"], ids=str)
def test_every_message_names_what_there_is(case: Case) -> None:
    of_flags = violations(*case.configured())
    with speaking(CallVoice(configs=CONFIGS.items())):
        of_fields = violations(*case.configured())
    for plain, one in zip(of_flags, of_fields, strict=True):
        text = str(one).replace("pip install --", "")
        places = re.findall(r"(cfg\.\w+)\.(\w+)", text)
        calls = re.findall(r"megatron_cg\.enable\((\w+)=", text)
        assert not re.search(r"--[a-z]|\b(add|type|drop) (cfg|megatron_cg)", text)
        assert all(hasattr(CONFIGS[config], field) for config, field in places)
        assert set(calls) <= inspect.signature(megatron_cg.enable).parameters.keys()
        # Megatron has an optimizer's flags and fields of experts under the same names.
        flags = re.findall(r"--[a-z]", str(plain).replace("pip install --", ""))
        assert len(flags) == len(places) + len(calls)


@pytest.mark.parametrize(
    ("message", "said"),
    [
        ("{add:--fsdp-double-buffer} (x)", "set cfg.ddp.fsdp_double_buffer=True (x)"),
        ("{drop:--qk-clip --cg-layers}", "set cfg.model.qk_clip=False and call f(layers=[])"),
        ("{add:--disable-bias-linear}", "set cfg.model.add_bias_linear=False"),
        ("{type:--cuda-graph-modules attn}", "set cfg.model.cuda_graph_modules=['attn']"),
        ("{flag:--moe-input-jitter-eps -0.5}", "cfg.model.moe_input_jitter_eps=-0.5"),
        ("{type:--bf16 --fp8-format e4m3}", "set cfg.mixed_precision.bf16=True and "
         "cfg.mixed_precision.fp8='e4m3'"),
        ("{flag:--cg-moe-stash 0.5}", "megatron_cg.enable(moe_stash=0.5)"),
        ("{flag:--cg-moe-rows -1}", "megatron_cg.enable(moe_rows=-1)"),
        ("{flag:--cg-layers attn:0,x}", "f(layers=['attn:0,x'])"),
        ("{drop:--cg-moe-rows}", "call megatron_cg.enable(moe_rows=None)"),
        ("{flag:--cg-no-fsdp-fast-path}", "f(fast_path=False)"),
        ("{flag:--cuda-graph-impl none}", "no f"),
    ],
)  # fmt: skip
def test_settings_become_fields_and_arguments(message: str, said: str) -> None:
    assert CallVoice("f", CONFIGS.items()).say(message) == said


def test_scopes_are_the_field_that_is_set() -> None:
    voice = CallVoice(
        configs=[("cfg", SimpleNamespace(cuda_graph_modules=None, cuda_graph_scope=""))]
    )
    assert voice.say("{type:--cuda-graph-modules attn}") == "set cfg.cuda_graph_scope=['attn']"


def test_errors_speak_to_the_caller_that_is_served() -> None:
    message = "{flag:--cg-no-fsdp-fast-path}: {flag:--cuda-graph-impl none}"
    with speaking(CallVoice(UNITS)):
        assert say(message) == "graph_units(fast_path=False): no graph_units"
        assert "Leave this module out of units, or" in str(HostSyncError("x"))
    configs = {name.removeprefix("cfg."): config for name, config in CONFIGS.items()}
    with naming_fields(SimpleNamespace(**configs)):
        assert "enable(fast_path=False): cfg.model.cuda_graph_impl='none'" in say(message)
        assert "out of cfg.model.cuda_graph_modules" in str(HostSyncError("x"))
    assert say(message) == "--cg-no-fsdp-fast-path: --cuda-graph-impl none"
