"""What is kept of Megatron-FSDP v2's buffers: always what v2 would make now."""

import logging
import operator
import random
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.distributed.tensor import DTensor

from megatron_cg.fastpath import install_parts, install_under_v2
from megatron_cg.fastpath.install_parts import keep_layouts, keep_views
from megatron_cg.fully_shard.per_module import lies_in
from megatron_cg.replay.plain import _Identity as Same
from megatron_cg.upstream.symbols import Symbol
from tests.unit.units.sharded import Network, under_v2

PROGRAMS, LENGTH = 60, 40


@pytest.fixture
def groups(one_rank: None) -> Any:
    network: Any = under_v2(mesh=(1,))(Network((16, 24)))
    found = [group for each in (*network.layers, network) for group in each._parameter_groups]
    for group in found:
        group._unsharded_model_weight.reallocate_storage()
    return found


def place(tensor: Any) -> tuple[Any, ...]:
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    storage = local.untyped_storage()._cdata
    spec = tensor.placements if isinstance(tensor, DTensor) else None
    address = (storage, local.storage_offset(), local.data_ptr())
    return (*address, local.shape, local.stride(), local.dtype, tensor.shape, spec)


def check(buffer: Any, method: str, index: int) -> Any:
    """What a buffer returns is as what its class's own method makes."""
    found = getattr(buffer, method)(index)
    assert place(found) == place(getattr(type(buffer), method)(buffer, index))
    return found


def change(drawn: random.Random, group: Any) -> bool:
    """Do to a group's memory what v2, a session or a user may do; whether views stay valid."""
    buffer = drawn.choice((group._unsharded_model_weight, group.main_grad))
    kind = drawn.choice(("nothing", "resized", "moved", "data", "buffers"))
    if kind == "resized":
        buffer.release_storage()
        buffer.reallocate_storage()
    elif kind == "moved":
        buffer.local_buffer = lies_in(
            buffer.local_buffer, torch.empty_like(buffer.local_buffer).untyped_storage()
        )
    elif kind == "data":
        buffer.local_buffer.data = torch.empty_like(buffer.local_buffer)
    elif kind == "buffers":
        like = group.main_grad
        shapes = like.layout.tensor_shapes
        made = type(like)(like.mesh, like.placements, shapes, like.dtype, like.device)
        group.main_grad = made
    return kind in ("nothing", "resized")


def test_views_are_those_of_the_memory_that_a_buffer_has_now(groups: Any) -> None:
    kept = again = 0
    for seed in range(PROGRAMS):
        drawn, undo = random.Random(seed), keep_views(groups)
        for _ in range(LENGTH):
            group = drawn.choice(groups)
            index = drawn.randrange(len(group.main_grad.layout.tensor_shapes))
            pairs = (
                (group._unsharded_model_weight, "get_local_tensor"),
                (group.main_grad, "get_dtensor"),
            )
            before = [check(*pair, index) for pair in pairs]
            if change(drawn, group):
                again += 2
                after = [getattr(*pair)(index) for pair in pairs]
                kept += sum(map(operator.is_, before, after))
            check(group._unsharded_model_weight, "get_local_tensor", index)
            check(group.main_grad, "get_dtensor", index)
        undo()
    assert again > kept > again // 4  # Buffers that were put in keep nothing.
    for group in groups:
        assert not {"get_local_tensor", "get_dtensor"} & {
            *vars(group._unsharded_model_weight),
            *vars(group.main_grad),
        }


def test_gradients_that_get_a_new_buffer_in_each_step_are_not_kept(groups: Any) -> None:
    first, second = groups[:2]
    weights = first._unsharded_model_weight
    later = {"_main_grad_placements": weights.placements}
    later["_accumulation_placements"] = weights.placements
    hybrid = SimpleNamespace(**{**vars(first), **later})
    frozen = SimpleNamespace(**{**vars(second), "main_grad": None})
    undo = keep_views([hybrid, frozen])
    assert not any("get_dtensor" in vars(group.main_grad) for group in (first, second))
    assert "get_local_tensor" in vars(weights)
    undo()


class Group:
    """One that can go: the released v2's own never does, as autograd's hooks hold it."""

    def __init__(self, like: Any) -> None:
        self._unsharded_model_weight = like._unsharded_model_weight


def test_a_model_that_is_dropped_leaves_nothing_on_the_class_of_layouts(groups: Any) -> None:
    kind = type(groups[0].main_grad.layout)
    before, group = Same(vars(kind)["build"]), Group(groups[0])
    keep_layouts(group)
    assert Same(vars(kind)["build"]) != before
    del group
    assert Same(vars(kind)["build"]) == before


@pytest.mark.parametrize(
    ("function", "on"), {"__post_init__": ["views"], "get_dtensor": ["layouts"]}.items()
)
def test_an_unknown_function_turns_its_part_off(
    groups: Any,
    function: str,
    on: list[str],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def unknown_body(symbol: Symbol) -> str | None:
        return "another body" if symbol.path.endswith(f".{function}") else None

    install_parts._warn_once.cache_clear()
    monkeypatch.setattr(Symbol, "unknown_body", unknown_body)
    path = install_under_v2(groups)
    path.close()
    assert path.parts == on and [*path.left_out.values()] == ["another body"]
    warnings = [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]
    assert len(warnings) == 1 and "another body" in warnings[0]
