"""Arguments of the Python API that are wrong are named, all at once, with what was meant."""

from __future__ import annotations

import sys
from typing import Any

import pytest
from torch import nn

from megatron_cg import GraphedLayers, graph_units
from megatron_cg.backends.tape.tape_backend import TapeBackend
from megatron_cg.errors import (
    ArgumentError,
    CaptureError,
    ConfigurationError,
    UpstreamChangedError,
)
from megatron_cg.integrations import call_arguments
from megatron_cg.integrations.call_arguments import backend_of, several
from tests.unit.backends.cuda_double import cuda_double

MODEL = nn.Linear(1, 1)
"""Not looked at: arguments come first."""
GOOD: dict[str, Any] = {"backend": "tape"}
WRONG = [
    ({"on_mismatch": "recaptur"}, "on_mismatch='recaptur'", "did you mean 'recapture'?"),
    ({"on_mismatch": "never"}, "on_mismatch='never'", "it is one of 'eager', 'recapture', 'error'"),
    ({"on_failure": "eagr"}, "on_failure='eagr'", "did you mean 'eager'?"),
    ({"verify_interval": -1}, "verify_interval=-1", "a whole number from 0 on"),
    ({"verify_interval": 1.5}, "verify_interval=1.5", "a whole number from 0 on"),
    ({"verify_interval": True}, "verify_interval=True", "a whole number from 0 on"),
    ({"backend": "tapes"}, "backend='tapes'", "did you mean 'tape'?"),
    ({"fast_path": "no"}, "fast_path='no'", "it is True or False"),
    ({"fast_path": ("unshard",)}, "fast_path=('unshard',)", "it is True or False"),
    ({"backend": 3}, "backend=3", "an object with the method capture"),
]


def layers(**given: Any) -> Any:
    return GraphedLayers(MODEL, None, **{"seq_length": 8, "micro_batch_size": 1, **GOOD, **given})


def units(**given: Any) -> Any:
    return graph_units(MODEL, **{"units": ["layers.*"], **GOOD, **given})


@pytest.mark.parametrize("make", [layers, units])
@pytest.mark.parametrize(("given", "found", "reason"), WRONG, ids=[found for _, found, _ in WRONG])
def test_a_wrong_argument_is_named(make: Any, given: Any, found: str, reason: str) -> None:
    with pytest.raises(ArgumentError) as error:
        make(**given)
    (violation,) = error.value.violations
    assert violation.found == found and reason in violation.reason
    assert isinstance(error.value, ValueError) and isinstance(error.value, ConfigurationError)


@pytest.mark.parametrize(
    ("make", "given", "found"),
    [
        (layers, {"seq_length": 0}, "seq_length=0"),
        (layers, {"micro_batch_size": "2"}, "micro_batch_size='2'"),
        (units, {"warmup_steps": 0}, "warmup_steps=0"),
        (units, {"units": []}, "units names nothing"),
    ],
)
def test_what_one_of_the_two_has_is_checked_too(make: Any, given: Any, found: str) -> None:
    with pytest.raises(ArgumentError) as error:
        make(**given)
    assert [violation.found for violation in error.value.violations] == [found]


def test_all_mistakes_come_at_once() -> None:
    with pytest.raises(ArgumentError, match="3 reasons") as error:
        units(units=[], on_failure="eagr", on_mismatch="recaptur")
    assert str(error.value).count("did you mean") == 2


@pytest.mark.parametrize("name", ["tape", "te", "transformer_engine"])
def test_a_backend_can_be_named(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from megatron_cg.backends.te import te_backend as transformer_engine

    monkeypatch.setattr(transformer_engine, "TransformerEngineBackend", lambda: "TE's")
    made: Any = backend_of(name)  # type: ignore[arg-type]
    assert isinstance(made, TapeBackend) if name == "tape" else made == "TE's"
    backend: Any = TapeBackend()
    default: Any = backend_of(None)
    assert backend_of(backend) is backend and default == "TE's"


def test_the_native_backend_can_be_named_and_needs_a_gpu() -> None:
    with cuda_double():
        assert backend_of("native").name == "native"
    with pytest.raises(CaptureError, match="torch sees no GPU"):
        backend_of("native")


def test_without_te_the_default_names_the_native_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    names = "transformer_engine", "transformer_engine.pytorch.graph"
    for name in names:
        monkeypatch.setitem(sys.modules, name, None)
    found: dict[str, str | None] = {"transformer-engine": None}
    monkeypatch.setattr(call_arguments, "installed_version", found.__getitem__)
    with pytest.raises(ConfigurationError, match=r"is not installed.*backend=\"native\""):
        backend_of(None)
    found["transformer-engine"] = "2.20.2"
    with pytest.raises(UpstreamChangedError, match="make_graphed_callables"):
        backend_of("te")


def test_one_of_several_may_be_given_alone() -> None:
    assert several("layers.*") == ("layers.*",) and several(["a", "b"]) == ("a", "b")
    assert several(nn.Linear) == (nn.Linear,) and several(MODEL) == (MODEL,)
    blocks = nn.ModuleList([nn.Linear(1, 1), nn.Linear(1, 1)])
    assert several(blocks) == tuple(blocks)
