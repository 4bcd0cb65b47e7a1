"""Megatron-FSDP's own hooks, as its two packages put them on real modules."""

import functools
from collections.abc import Callable
from typing import Any, cast

import pytest
from torch import nn

from megatron_cg.errors import HookError, UnknownFsdpHookError
from megatron_cg.fsdp.roles import FsdpRole, classify, unit_hooks
from megatron_cg.hooks import HookKind, HookRecord, module_hooks
from megatron_cg.replay.unit import Unit
from megatron_cg.upstream.symbols import installed_version


def layers_of(model: nn.Module) -> list[Any]:
    from megatron_cg.tape.cpu_model import transformer_layers

    return list(transformer_layers(model))


def standalone_model() -> Any:
    import megatron_fsdp
    from torch.distributed.device_mesh import init_device_mesh

    mesh = init_device_mesh("cuda", (1, 1), mesh_dim_names=("dp", "tp"))
    model = nn.Sequential(nn.Linear(4, 4), nn.TransformerEncoderLayer(4, 1, 8), nn.Linear(4, 4))
    return megatron_fsdp.fully_shard_model(
        model,
        fsdp_unit_modules=[nn.TransformerEncoderLayer],
        device_mesh=mesh,
        dp_shard_dim="dp",
        tp_dim="tp",
        zero_dp_strategy="optim_grads_params",
    )


@pytest.fixture(params=["megatron-core", "megatron-fsdp"])
def unit(request: pytest.FixtureRequest, one_rank: None) -> Any:
    if request.param == "megatron-core":
        return layers_of(request.getfixturevalue("dense_model"))[0]
    model = standalone_model()
    return next(m for m in model.modules() if isinstance(m, nn.TransformerEncoderLayer))


def record_of(unit: nn.Module, role: FsdpRole) -> HookRecord:
    return next(record for record in module_hooks(unit) if classify(record) is role)


def test_wrappers_are_withheld_and_handlers_change_phase(unit: nn.Module) -> None:
    records = {classify(record): record for record in module_hooks(unit)}
    hooks = unit_hooks(Unit("a unit", unit, ()))
    keys = {name: list(found) for name, found in hooks.capture_time.items()}
    assert keys == {
        "forward_pre_hooks": [records[FsdpRole.UNSHARD].hook_id],
        "forward_hooks": [records[FsdpRole.RESHARD].hook_id],
        "backward_pre_hooks": [records[FsdpRole.WRAPS_PRE_BACKWARD].hook_id],
        "backward_hooks": [records[FsdpRole.WRAPS_POST_BACKWARD].hook_id],
    }


def unknown(module: nn.Module, *_args: object) -> None:
    """A hook that a future Megatron-FSDP might add."""


@pytest.mark.parametrize(
    ("home", "package"),
    [
        ("megatron.core.distributed.fsdp.src.megatron_fsdp.megatron_fsdp", "megatron-core"),
        ("megatron_fsdp.megatron_fsdp", "megatron-fsdp"),
    ],
)
def test_a_hook_of_fsdp_that_is_not_known_is_an_error_that_names_it(
    home: str, package: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(unknown, "__module__", home)
    record = HookRecord(HookKind.FORWARD, 7, functools.partial(unknown))
    with pytest.raises(UnknownFsdpHookError) as error:
        classify(record)
    assert f"{package} {installed_version(package)} put the hook" in str(error.value)
    assert f"{home}.unknown" in str(error.value)


def test_a_known_hook_in_another_registry_is_an_error(unit: nn.Module) -> None:
    record = record_of(unit, FsdpRole.RESHARD)
    moved = HookRecord(HookKind.BACKWARD, record.hook_id, record.fn)
    with pytest.raises(UnknownFsdpHookError, match="_post_forward"):
        classify(moved)


def test_a_wrapper_without_a_handler_is_an_error(
    unit: nn.Module, monkeypatch: pytest.MonkeyPatch
) -> None:
    record = record_of(unit, FsdpRole.WRAPS_POST_BACKWARD)
    empty = HookRecord(record.kind, record.hook_id, functools.partial(cast(Any, record.fn).func))
    monkeypatch.setattr("megatron_cg.fsdp.roles.module_hooks", lambda _module: [empty])
    with pytest.raises(UnknownFsdpHookError, match="handler it wraps cannot be found"):
        unit_hooks(Unit("a unit", unit, ()))


def user_hook(*_args: object) -> None:
    """A hook that a user registered."""


@pytest.mark.parametrize(
    ("register", "words"),
    [
        (lambda unit: unit.register_backward_hook(user_hook), "register_full_backward_hook"),
        (lambda unit: unit.self_attention.register_forward_hook(user_hook), "inside the part"),
    ],
)
def test_user_hooks_that_would_lie_or_fall_silent_are_refused_by_name(
    dense_model: Any, register: Callable[[Any], object], words: str
) -> None:
    unit = layers_of(dense_model)[0]
    register(unit)
    with pytest.raises(HookError, match=words) as error:
        unit_hooks(Unit("layer 0", unit, (unit.self_attention,)))
    assert "layer 0" in str(error.value)
    assert "user_hook" in str(error.value)
    assert "--cg-layers" in str(error.value)


def test_a_user_hook_on_a_module_that_stays_eager_is_left_alone(dense_model: Any) -> None:
    unit = layers_of(dense_model)[0]
    handle = unit.mlp.register_forward_hook(user_hook)
    hooks = unit_hooks(Unit("layer 0", unit, (unit.self_attention,)))
    assert handle.id not in {key for phase in hooks.capture_time.values() for key in phase}
