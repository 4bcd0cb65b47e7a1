"""Main gradients and weights from tables, and what is kept of Megatron-FSDP v2's buffers."""

import logging
import operator
import random
from types import SimpleNamespace
from typing import Any
from weakref import ref

import pytest
import torch
from torch.distributed.tensor import DTensor

from megatron_cg.fastpath import install_parts, install_under_v2
from megatron_cg.fastpath.install_parts import keep_layouts, keep_views
from megatron_cg.fastpath.optimizer_step import install_main_gradients, install_main_weights
from megatron_cg.fully_shard.per_module import lies_in
from megatron_cg.replay.plain import _Identity as Same
from megatron_cg.tape.training_plan import CpuModelConfig
from megatron_cg.upstream.symbols import Symbol
from tests.unit.ranks import on_ranks
from tests.unit.units.sharded import Network, under_v2


class Scratch:
    """Memory that a replay overwrites, of which two pieces have another use too."""

    def __init__(self) -> None:
        self.pieces = 0
        self.given: list[ref[torch.Tensor]] = []
        self.ended = False

    @property
    def borrowed_bytes(self) -> int:
        return int(not self.ended)

    def still_held(self) -> int:
        return 2

    def stop_borrowing(self) -> None:
        self.ended = True

    def alive(self) -> list[torch.Tensor]:
        return [tensor for one in self.given if (tensor := one()) is not None]

    def empty(self, _caller: Any, like: list[Any], dtype: torch.dtype) -> list[torch.Tensor]:
        # Copies of gradients that are scaled after their reduction have the same memory.
        assert not self.alive()
        made = [torch.full(one.shape, torch.nan, dtype=dtype) for one in like]
        self.pieces, self.given = self.pieces + len(like), [ref(tensor) for tensor in made]
        return made


@pytest.mark.parametrize("training", [True, False])
def test_copies_that_somebody_still_holds_are_moved_before_a_training_pass(
    training: bool, dense_model: Any, caplog: pytest.LogCaptureFixture
) -> None:
    scratch: Any = Scratch()
    fsdp: Any = dense_model.module.train(training)
    store = fsdp.param_and_grad_buffer
    store.update_main_grads()  # Megatron-FSDP makes its DTensors.
    fsdp.forward = forward = lambda: [tensor.fill_(torch.nan) for tensor in scratch.alive()]
    undo = install_main_gradients(fsdp, scratch)
    for group in store.parameter_groups:
        group.main_grad_buffer.data.fill_(3)
    for _ in range(2):
        store.update_main_grads()
    assert len(scratch.alive()) > 5
    fsdp.forward()
    held = [gradient._local_tensor for gradient in store.dist_main_grad.values()]
    # An evaluation replays nothing, so nothing is moved for it.
    assert all((tensor.eq(3) if training else tensor.isnan()).all() for tensor in held)
    # Whatever else is held in that memory is lost, and said to be.
    assert scratch.ended is ("at least 2 tensors still share" in caplog.text) is training
    undo()
    assert fsdp.forward is forward


OPTIONS: dict[str, dict[str, Any]] = {
    "cast": {},
    "experts": {"experts": 8},
    "in place": {"bf16": False},
    "ZeRO-1": {"fsdp_options": {"data_parallel_sharding_strategy": "optim"}},
    "no shards": {"fsdp_options": {"data_parallel_sharding_strategy": "no_shard"}},
}


def attached(store: Any, decoupled: bool) -> dict[str, Any]:
    """What the optimizer is given after gradients are reduced, and again after they are scaled.

    Buffers are other tensors by then.
    """
    store.use_decoupled_grad = decoupled
    store.update_main_grads()
    for group in store.parameter_groups:
        left = group.main_grad_buffer.data
        group.main_grad_buffer.data = left.clone()
        left.zero_()
    generator = torch.Generator().manual_seed(3)
    for group in store.parameter_groups:
        data = group.main_grad_buffer.data
        data.copy_(torch.randn(data.shape, generator=generator))
    store.update_main_grads()
    store.scale_gradients(0.3)
    found: dict[str, Any] = {}
    for name, parameter in store.optimizer_named_parameters:
        gradient = getattr(parameter, "decoupled_grad" if decoupled else "grad")
        found[name] = gradient
        if gradient is not None:
            local = gradient._local_tensor
            found[name] = (str(local.dtype), tuple(gradient.shape), local.tolist())
    return found


def installed(store: Any) -> list[Any]:
    """Model weights after each copy from main weights, also into and from other buffers."""
    found = []
    groups = [g for g in store.parameter_groups if g.main_weight_buffer and g.model_weight_buffer]
    for number, moved in enumerate(("", "", "model_weight_buffer", "main_weight_buffer", "")):
        for group in groups:
            buffer = getattr(group, moved, None)
            if buffer is not None:
                left, buffer.data = buffer.data, buffer.data.clone()
                left.zero_()
            group.main_weight_buffer.data.normal_(generator=torch.Generator().manual_seed(number))
        store.copy_main_weights_to_model_weights()
        found.append(
            [group.model_weight_buffer.data.view(torch.uint8).tolist() for group in groups]
        )
    return found


def compare_attached() -> dict[str, Any]:
    from megatron.core import parallel_state

    from megatron_cg.tape.cpu_model import build

    runs: dict[str, Any] = {}
    for name, options in OPTIONS.items():
        for decoupled in (False, True):
            fsdp: Any = build(CpuModelConfig(layers=1, hidden_size=16, **options)).module
            store = fsdp.param_and_grad_buffer
            megatrons, weights = attached(store, decoupled), installed(store)
            empty = sum(gradient is None for gradient in megatrons.values())
            found: dict[str, Any] = {"number": len(megatrons), "empty": empty}
            found |= {"pieces": [], "equal": [], "restored": []}
            # Once with DTensors that Megatron-FSDP has made before, once without.
            for _ in range(2):
                scratch: Any = Scratch()
                undo = [install_main_gradients(fsdp, scratch)]
                if name != "no shards":
                    undo.append(install_main_weights(fsdp))
                same = attached(store, decoupled) == megatrons and installed(store) == weights
                found["equal"].append(same)
                found["pieces"].append(scratch.pieces)
                for one in undo:
                    one()
                left = [vars(p).get("decoupled_grad") for _, p in store.optimizer_named_parameters]
                found["restored"].append(decoupled or left == [None] * len(left))
                store.dist_main_grad.clear()
            runs[f"{name}, {decoupled}"] = found
            parallel_state.destroy_model_parallel()
    return runs


def test_attached_gradients_are_those_of_megatron_fsdp() -> None:
    empty_shards = 0
    for runs in on_ranks(compare_attached):
        for name, run in runs.items():
            assert run["equal"] == run["restored"] == [True, True] and run["number"] > 5, name
            empty_shards += run["empty"]
            cast = "in place" not in name and "True" not in name
            copied = run["number"] - run["empty"] if cast else 0
            # Three calls; the first one of the second time is Megatron-FSDP's own.
            assert run["pieces"] == [3 * copied, 2 * copied], name
    assert empty_shards > 0


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
