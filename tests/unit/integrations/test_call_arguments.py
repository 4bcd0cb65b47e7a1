"""Arguments of the Python API that are wrong are named, all at once."""

from typing import Any

import pytest
from torch import nn

from megatron_cg import GraphedLayers, enable, graph_units
from megatron_cg.errors import ArgumentError, CaptureError
from megatron_cg.integrations.call_arguments import backend_of, several
from megatron_cg.tape.tape_backend import TapeBackend
from tests.unit.backends.cuda_double import cuda_double

MODEL = nn.Linear(1, 1)
"""Not looked at: arguments come first."""


def layers(**given: Any) -> Any:
    shape = {"seq_length": 8, "micro_batch_size": 1, "backend": "tape"}
    return GraphedLayers(MODEL, None, **{**shape, **given})


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
    *((make, given) for make in (layers, units, enable) for given in BOTH),
    (layers, {"seq_length": 0}),
    (layers, {"micro_batch_size": "2"}),
    (units, {"warmup_steps": 0}),
    (units, {"recapture": -1}),
    (units, {"separate_inputs": "no"}),
    (enable, {"record": 5}),
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
