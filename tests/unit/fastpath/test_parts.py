"""Parts of the fast path: put in and taken out, and off where upstream's functions are others."""

import functools
import importlib
import logging
import re
from collections.abc import Callable
from typing import Any

import pytest
from torch import nn

from megatron_cg.errors import UpstreamChangedError
from megatron_cg.fastpath import install_parts
from megatron_cg.fastpath.between_passes import REPLACES_EXCHANGE
from megatron_cg.fastpath.install_parts import install
from megatron_cg.fastpath.optimizer_step import REPLACES_STEP
from megatron_cg.fastpath.part import find_cell, unknown_bodies
from megatron_cg.replay.plain import _Identity as Same
from megatron_cg.tape.tape_backend import TapeBackend
from megatron_cg.tape.training_plan import CpuModelConfig
from megatron_cg.tools.doctor.checks import modules_that_rely
from megatron_cg.tools.record.record import parameter_digests
from megatron_cg.upstream.symbols import Symbol, installed_version
from tests.unit.fastpath.test_fast_path import OF_GRADIENTS
from tests.unit.te_sources import fingerprint_in, source_of_te
from tests.unit.trainers import layers_of, trainer_of

CELLS = (
    "_param_list_for_submodule_unshard",
    "release_module_parameters",
    "_process_post_backward_gradients",
)


def state(fsdp: Any) -> list[Any]:
    """Everything that the parts put something instead of, by identity."""
    store = fsdp.param_and_grad_buffer
    owners = [fsdp, store, *(g.model_weight_buffer for g in store.parameter_groups)]
    return [
        *({name: Same(value) for name, value in vars(owner).items()} for owner in owners),
        *(Same(find_cell(fsdp, name).cell_contents) for name in CELLS),
        *((name, Same(p)) for name, p in fsdp.module.named_parameters()),
    ]


@pytest.fixture(params=[False, True], ids=["raw", "distributed"])
def fsdp(dense_model: Any, request: pytest.FixtureRequest) -> Any:
    """Megatron-FSDP's wrapper with its parameters as in a step, and as between steps."""
    found = dense_model.module
    found._replace_param_with_distributed_if_needed()
    if not request.param:
        found._replace_param_with_raw_if_needed()
    return found


def test_closing_puts_back_all_that_was_replaced(fsdp: Any) -> None:
    before = state(fsdp)
    path = install(fsdp)
    assert state(fsdp) != before
    path.close()
    path.close()
    assert state(fsdp) == before


def test_gradients_wait_no_longer_than_the_backward_pass_of_their_unit(
    one_rank: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else the next graph could overwrite them: Note [How long a gradient may wait]."""
    done: list[nn.Module] = []
    with trainer_of(CpuModelConfig(layers=2), microbatches=2) as trainer:
        with monkeypatch.context() as patch:
            path = install(trainer.model.module)
            assert path.bucketing is not None
            patch.setattr(path.bucketing, "unit_is_done", done.append)
            trainer.step()
        path.close()
        backward = [*reversed(layers_of(trainer))]
        assert [unit for unit in done if unit in backward] == backward * 2


@pytest.mark.parametrize("cell", CELLS)
def test_a_variable_that_is_gone_is_named_and_nothing_stays_changed(
    fsdp: Any, cell: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def find(fsdp: Any, wanted: str) -> Any:
        return find_cell(fsdp, f"{wanted}_of_old" if wanted == cell else wanted)

    before = state(fsdp)
    for module in ("bucketing", "gather"):
        monkeypatch.setattr(f"megatron_cg.fastpath.{module}.find_cell", find)
    core = re.escape(f"megatron-core {installed_version('megatron-core')}: ")
    with pytest.raises(UpstreamChangedError, match=rf"{core}.*{cell}"):
        install(fsdp)
    assert state(fsdp) == before


def test_float8_weights_are_left_to_megatron_fsdp(
    fsdp: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in ("gather", "optimizer_step"):
        monkeypatch.setattr(f"megatron_cg.fastpath.{module}.float8_test", lambda _: lambda _p: True)
    path = install(fsdp)
    assert "FP8" in path.left_out["main-weights"]
    buffers = (g.model_weight_buffer for g in fsdp.param_and_grad_buffer.parameter_groups)
    assert not any("fetch_bucket" in vars(buffer) for buffer in buffers)
    path.close()


def test_gradients_that_are_checked_one_by_one_are_left_to_megatron_fsdp(fsdp: Any) -> None:
    fsdp.report_nan_in_param_grad = True
    path = install(fsdp)
    assert "checked for NaN" in path.left_out["gradients"] and "unshard" in path.parts
    path.close()


ALL = [
    pytest.param(symbol, id=f"{symbol.distribution}:{symbol.path.rpartition('.')[2]}")
    for name in modules_that_rely()
    for symbol in importlib.import_module(name).RELIES_ON
    if symbol.fingerprints and symbol.distribution != "transformer-engine"
]
UNKNOWN = {
    "_bucket_group_gradient_reduce": {"scaled-copies"},
    "reduce_gradients": {"scaled-copies"},
    "get_ready_bucket_group_for_reduction": {"scaled-copies"},
    "_process_post_backward_gradients": OF_GRADIENTS,
    "release_module_parameters": {"unshard", *OF_GRADIENTS},
    "all_gather_params": {"deferred-prefetch"},
    "update_main_grads": {"main-gradients"},
    "copy_main_weights_to_model_weights": {"main-weights"},
}
"""Functions of Megatron-FSDP, and the parts that are off if one has another body."""


@pytest.mark.parametrize("symbol", ALL)
def test_a_fingerprint_is_that_of_the_installed_release(symbol: Symbol) -> None:
    if installed_version(symbol.distribution) is None:
        pytest.skip(f"{symbol.distribution} is not installed")
    assert symbol.unknown_body() is None


class Wrapper:
    """Passes on what it wraps, its class and globals too, as wrapt's do."""

    def __init__(self, wrapped: Any) -> None:
        self.__wrapped__ = wrapped

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__wrapped__, name)

    def __call__(self, *args: Any, **named: Any) -> Any:
        return self.__wrapped__(*args, **named)

    @property  # type: ignore[misc]
    def __class__(self) -> Any:
        return type(self.__wrapped__)


def test_a_users_wrapper_of_a_function_is_not_left_out(
    fsdp: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    symbol: Any = next(s.values[0] for s in ALL if s.id == "megatron-core:update_main_grads")
    owner, name = symbol.place()
    theirs = getattr(owner, name)

    @functools.wraps(theirs)
    def wrapper(*args: Any, **named: Any) -> Any:
        return theirs(*args, **named)

    monkeypatch.setattr(owner, name, wrapper)
    assert __name__ in (symbol.unknown_body() or "")
    path = install(fsdp)
    assert __name__ in path.left_out["main-gradients"]
    path.close()
    monkeypatch.setattr(owner, name, Wrapper(theirs))
    assert __name__ in (symbol.unknown_body() or "")


def own_method(owner: Any, name: str) -> None:
    theirs = getattr(owner, name)

    def method(*args: Any, **named: Any) -> Any:
        return theirs(*args, **named)

    setattr(owner, name, method)


def own_class(owner: Any, name: str) -> None:
    theirs: Any = type(owner)
    own = {name: functools.partial(getattr(theirs, name), owner), "__module__": theirs.__module__}
    owner.__class__ = type(theirs.__name__, (theirs,), own)


@pytest.mark.parametrize("make", [own_method, own_class])
@pytest.mark.parametrize(
    ("owner", "name", "part"),
    [
        ("", "_replace_param_with_raw_if_needed", "parameters"),
        ("", "all_gather_and_wait_parameters_ready", "unshard"),
        ("param_and_grad_buffer", "update_main_grads", "main-gradients"),
        ("grad_reduce_pipeline", "reduce_gradients", "gradients"),
        ("grad_reduce_pipeline", "_bucket_group_gradient_reduce", "scaled-copies"),
        ("param_and_grad_buffer", "copy_main_weights_to_model_weights", "main-weights"),
        ("param_and_grad_buffer.parameter_groups.0.model_weight_buffer", "fetch_bucket", "unshard"),
    ],
)
def test_a_users_method_of_one_object_is_not_left_out(
    fsdp: Any, owner: str, name: str, part: str, make: Callable[[Any, str], None]
) -> None:
    one = fsdp
    for attribute in filter(None, owner.split(".")):
        one = one[int(attribute)] if attribute.isdigit() else getattr(one, attribute)
    make(one, name)
    path = install(fsdp)
    assert f"another {name}" in path.left_out[part]
    path.close()


def test_functions_of_a_users_subclass_are_compared(
    fsdp: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    fsdp.__class__ = type("Theirs", (type(fsdp),), {})
    monkeypatch.setattr(Symbol, "unknown_body", lambda _: "another body")
    assert {*unknown_bodies(REPLACES_EXCHANGE, fsdp)} == {"another body"}


@pytest.mark.parametrize(
    "symbol",
    [*REPLACES_STEP, REPLACES_EXCHANGE[-1]],
    ids=lambda symbol: symbol.path.rpartition(":")[2],
)
def test_a_fingerprint_is_that_of_the_released_transformer_engine(symbol: Symbol) -> None:
    module, _, name = symbol.path.partition(":")
    assert module.startswith("transformer_engine.pytorch.")
    *folders, file = module.split(".")[2:]
    found = source_of_te(*folders, f"{file}.py")
    assert symbol.fingerprints == (fingerprint_in(found.read_text(), name),)


@pytest.fixture(scope="module")
def usual() -> dict[str, Any]:
    return {}


def train(*, graphs: bool) -> tuple[list[Any], list[str]]:
    parts: list[str] = []
    with trainer_of(CpuModelConfig(layers=2), graphs=graphs) as trainer:
        numbers: list[Any] = [trainer.step()]
        if graphs:
            parts = trainer.capture(TapeBackend()).fast_path.parts
        numbers += [trainer.step() for _ in range(3)]
        return [*numbers, parameter_digests(trainer.model)], parts


@pytest.mark.parametrize(("function", "off"), UNKNOWN.items())
def test_an_unknown_function_turns_its_part_off(
    one_rank: None,
    usual: dict[str, Any],
    function: str,
    off: set[str],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    if not usual:
        usual.update(eager=train(graphs=False), graphs=train(graphs=True))

    def unknown_body(symbol: Symbol) -> str | None:
        own = symbol.path.endswith(f".{function}") and symbol.fingerprints
        return f"{function} has another body" if own else None

    install_parts._warn_once.cache_clear()
    monkeypatch.setattr(Symbol, "unknown_body", unknown_body)
    (eager, _), (graphs, whole) = usual["eager"], usual["graphs"]
    numbers, parts = train(graphs=True)
    assert eager == graphs == numbers
    assert parts == [name for name in whole if name not in off]
    with trainer_of(CpuModelConfig(layers=2)) as other:
        install(other.model.module).close()
    warnings = [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]
    warnings = [text for text in warnings if f"{function} has another body" in text]
    assert len(warnings) == 1  # though two models have it
