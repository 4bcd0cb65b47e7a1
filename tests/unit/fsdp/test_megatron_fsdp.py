"""Megatron-FSDP's model and hooks: found, gathered alone, put back as they were.

Gradient-accumulation fusion is refused: Megatron's own linear layers write weight gradients as
Transformer Engine's do, into ``get_main_grad()``, with a mark that is set from Python.
"""

import functools
import warnings
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any, cast
from unittest.mock import patch

import pytest
import torch
from megatron.core.tensor_parallel import layers as linear
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from megatron_cg.consensus.exchange import Agreement
from megatron_cg.errors import CaptureError, HookError, UnknownFsdpHookError, UpstreamChangedError
from megatron_cg.fsdp.roles import FsdpRole, classify, unit_hooks
from megatron_cg.fsdp.sharding import find_megatron_fsdp, gather_alone, raw_parameters
from megatron_cg.hooks import HookKind, HookRecord, module_hooks
from megatron_cg.replay.unit import Unit
from megatron_cg.tape.tape_backend import TapeBackend
from megatron_cg.tape.train import transformer_layers
from megatron_cg.tape.training_plan import CpuModelConfig
from megatron_cg.upstream.symbols import installed_version
from tests.unit.ranks import on_ranks
from tests.unit.trainers import trainer_of


def test_units_are_gathered_ahead_only_where_all_that_share_buffers_are_captured(
    dense_model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    ahead: list[bool] = []
    pipeline = dense_model.module.all_gather_pipeline
    monkeypatch.setattr(pipeline, "all_gather_params", lambda _, prefetch: ahead.append(prefetch))
    groups = [group for group in pipeline.buffer.parameter_groups if group.fsdp_unit_id is not None]
    for captured in (groups, groups[:1]):
        undo = gather_alone(dense_model.module, [one for g in captured for one in g.params])
        pipeline.all_gather_params([], prefetch=True)
        undo()
    pipeline.all_gather_params([], prefetch=True)
    assert ahead == [True, False, True]


@pytest.mark.parametrize("sharded", [True, False])
def test_parameters_are_sharded_or_raw_after_a_capture_as_before(
    dense_model: Any, sharded: bool
) -> None:
    fsdp = dense_model.module
    fsdp._replace_param_with_distributed_if_needed()
    if not sharded:
        fsdp._replace_param_with_raw_if_needed()
    with raw_parameters(fsdp):
        assert not fsdp.is_param_fsdp_distributed
    assert fsdp.is_param_fsdp_distributed == sharded


def test_what_a_capture_has_prefetched_is_over_without_a_warning(dense_model: Any) -> None:
    fsdp = dense_model.module
    pipeline = fsdp.all_gather_pipeline
    with warnings.catch_warnings(), raw_parameters(fsdp):
        warnings.simplefilter("error")
        pipeline.async_bucket_gather(0, False)
        assert pipeline.param_gather_event_map
    assert not pipeline.param_gather_event_map


def test_a_member_of_megatron_fsdp_that_is_gone_is_named(
    dense_model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert find_megatron_fsdp(dense_model) is dense_model.module
    monkeypatch.setattr("megatron_cg.fsdp.sharding._NEEDED", ("gone",))
    with pytest.raises(UpstreamChangedError, match=r"MegatronFSDP\.gone"):
        find_megatron_fsdp(dense_model)


def train(graphs: bool) -> dict[str, Any]:
    with ExitStack() as undo:
        # Apex, without which Megatron makes no such layer; under Megatron-FSDP it is not called.
        undo.enter_context(patch.object(linear, "_grad_accum_fusion_available", True))
        # A placeholder of zeros instead of memory as it was, so that the result is always the same.
        zero = patch.object(torch.nn.Parameter, "zero_out_wgrad", True, create=True)
        undo.enter_context(zero)
        options = {"gradient_accumulation_fusion": True}
        shape = CpuModelConfig(layers=2, options=options, graph_modules=("attn", "mlp"), bf16=False)
        trainer = undo.enter_context(trainer_of(shape, graphs=graphs, microbatches=2))
        steps, error = [trainer.step()], ""
        if graphs:
            with pytest.raises(CaptureError) as caught:
                trainer.capture(TapeBackend(), Agreement())
            error = str(caught.value)
        steps += [trainer.step() for _ in range(2)]
        return {"steps": [[number.hex() for number in step] for step in steps], "error": error}


def train_both() -> list[dict[str, Any]]:
    return [train(graphs) for graphs in (False, True)]


@pytest.mark.refuses("gradient-accumulation-fusion")
def test_a_layer_that_writes_its_gradient_by_itself_is_not_captured() -> None:
    """A replay would hand over the placeholder that the layer returns."""
    for eager, refused in on_ranks(train_both):
        assert refused["steps"] == eager["steps"]
        assert "linear_proj.weight into main_grad by itself" in refused["error"]
        assert "4 such weights" in refused["error"]


def standalone_model() -> Any:
    import megatron_fsdp

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
        return transformer_layers(request.getfixturevalue("dense_model"))[0]
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
    unit = transformer_layers(dense_model)[0]
    register(unit)
    with pytest.raises(HookError, match=words) as error:
        unit_hooks(Unit("layer 0", unit, (unit.self_attention,)))
    assert "layer 0" in str(error.value)
    assert "user_hook" in str(error.value)
    assert "--cg-layers" in str(error.value)


def test_a_user_hook_on_a_module_that_stays_eager_is_left_alone(dense_model: Any) -> None:
    unit = transformer_layers(dense_model)[0]
    handle = unit.mlp.register_forward_hook(user_hook)
    hooks = unit_hooks(Unit("layer 0", unit, (unit.self_attention,)))
    assert handle.id not in {key for phase in hooks.capture_time.values() for key in phase}
