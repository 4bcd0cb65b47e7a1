"""What nothing looked at in hooks and their sorting, found by ``python -m tools.mutate``."""

from __future__ import annotations

import functools
from typing import Any

import pytest
from torch import nn

from megatron_cg.errors import HookError, UnknownFsdpHookError
from megatron_cg.fsdp import FsdpRole, classify, transform
from megatron_cg.fsdp.megatron_fsdp import unit_hooks
from megatron_cg.fsdp.roles import (
    BACKWARD_HANDLER,
    BACKWARD_PRE_HANDLER,
    is_root_handler,
    wrapped_handler,
)
from megatron_cg.hooks import HookKind, HookRecord, HookSnapshot
from megatron_cg.hooks import module_hooks as hooks_of
from megatron_cg.replay.unit import Unit


def plain(*_args: object) -> None:
    """A hook that does nothing."""


def test_a_cleared_module_takes_backward_hooks_of_either_kind() -> None:
    linear = nn.Linear(2, 2)
    linear.register_full_backward_hook(plain)
    snapshot = HookSnapshot(linear)
    snapshot.clear()
    linear.register_backward_hook(plain)  # torch refuses it on a module with the other kind
    snapshot.restore()
    assert linear._is_full_backward_hook is True and len(linear._backward_hooks) == 1


@pytest.mark.parametrize(
    ("tag", "kind", "role"),
    [
        (BACKWARD_HANDLER, HookKind.FORWARD_PRE, FsdpRole.WRAPS_POST_BACKWARD),
        (BACKWARD_PRE_HANDLER, HookKind.FORWARD, FsdpRole.WRAPS_PRE_BACKWARD),
        (BACKWARD_HANDLER, HookKind.FORWARD, None),
        (BACKWARD_PRE_HANDLER, HookKind.FORWARD_PRE, None),
    ],
)
def test_a_tag_counts_in_the_registry_of_its_phase_alone(
    tag: str, kind: HookKind, role: FsdpRole | None
) -> None:
    fn = functools.partial(plain)
    setattr(fn, tag, plain)
    assert classify(HookRecord(kind, 1, fn)) is role


def test_a_wrapper_without_its_handler_is_named_with_who_made_it(dense_model: Any) -> None:
    layer = dense_model.module.module.module.decoder.layers[0]
    record = next(r for r in hooks_of(layer) if classify(r) is FsdpRole.WRAPS_POST_BACKWARD)
    empty = functools.partial(record.fn.func)  # type: ignore[attr-defined]
    with pytest.raises(UnknownFsdpHookError, match=r"megatron-core .* put the hook"):
        wrapped_handler(HookRecord(record.kind, 1, empty), FsdpRole.WRAPS_POST_BACKWARD)
    with pytest.raises(UnknownFsdpHookError, match="a package that tags its hooks"):
        wrapped_handler(HookRecord(record.kind, 1, plain), FsdpRole.WRAPS_POST_BACKWARD)


def test_the_roots_handler_is_known_and_never_part_of_a_capture(dense_model: Any) -> None:
    found: dict[str, set[bool]] = {}
    for module in dense_model.modules():
        for record in hooks_of(module):
            role = classify(record)
            if role is not FsdpRole.WRAPS_PRE_BACKWARD:
                continue
            handler = wrapped_handler(record, role)
            found.setdefault(handler.__name__, set()).add(is_root_handler(handler))
            phases = transform(module, [record], {}, ()).capture_time
            assert bool(phases["backward_pre_hooks"]) is not is_root_handler(handler)
    assert found == {"_root_pre_backward": {True}, "_pre_backward_param_unshard": {False}}


def test_fp8_transposes_are_released_after_the_forward_pass(dense_model: Any) -> None:
    module, record = next(
        (module, record)
        for module in dense_model.modules()
        for record in hooks_of(module)
        if classify(record) is FsdpRole.RELEASE_TRANSPOSE
    )
    phases = transform(module, [record], {}, ()).capture_time
    assert {key: list(found) for key, found in phases.items() if found} == {
        "forward_hooks": [record.hook_id]
    }
    phases["forward_hooks"][record.hook_id](module)


def test_of_modules_inside_only_those_in_the_graph_are_gathered_for_it(one_rank: None) -> None:
    """Under ZeRO-1 each module has a hook of its own, and a layer none."""
    from megatron_cg.tools.cpu.cpu_model import build, transformer_layers
    from megatron_cg.tools.cpu.training_plan import CpuModelConfig

    options = {"data_parallel_sharding_strategy": "optim"}
    layer = transformer_layers(build(CpuModelConfig(layers=1, fsdp_options=options)))[0]
    attention = layer.self_attention
    inside = {r.hook_id for m in attention.modules() for r in hooks_of(m)}
    below = {r.hook_id for m in layer.modules() if m is not layer for r in hooks_of(m)}
    own = {record.hook_id for record in hooks_of(layer)}
    assert inside and inside < below
    hooks = unit_hooks(Unit("layer 0", layer, tuple(attention.modules())))
    assert set(hooks.capture_time["forward_pre_hooks"]) == inside | own
    gathered = [arguments for _, arguments in hooks.before_replay]
    assert gathered == [(module,) for module in attention.modules() if list(hooks_of(module))]


def test_a_users_hook_inside_the_graph_is_refused_and_beside_it_is_not() -> None:
    layer = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    record = HookRecord(HookKind.FORWARD, 1, plain)
    hooks = transform(layer, [], {layer[0]: [record]}, [layer[1]])
    assert not any(hooks.capture_time.values())
    with pytest.raises(HookError, match="inside the part"):
        transform(layer, [], {layer[0]: [record]}, [layer[0]])
