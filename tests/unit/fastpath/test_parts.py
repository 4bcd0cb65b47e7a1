"""Parts of the fast path: put in and taken out, and what each asks before it takes a short way."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from megatron_cg.errors import UpstreamChangedError
from megatron_cg.fastpath import install
from megatron_cg.fastpath.buckets import BucketViews, FreedBuffers
from megatron_cg.fastpath.part import find_cell, hook_functions
from megatron_cg.fastpath.unshard import CachedParameters, _fetched
from megatron_cg.tools.cpu.training_plan import CpuModelConfig
from megatron_cg.upstream.patch import set_cell
from tests.unit.identity import Same
from tests.unit.trainers import trainer_of

CELLS = (
    "_param_list_for_submodule_unshard",
    "release_module_parameters",
    "_process_post_backward_gradients",
)


def state(fsdp: Any) -> list[Any]:
    """Everything that the parts put something instead of, by identity."""
    store = fsdp.param_and_grad_buffer
    owners = [fsdp, store, *(g.model_weight_buffer for g in store.parameter_groups)]
    functions = list(hook_functions(fsdp))
    return [
        *({name: Same(value) for name, value in vars(owner).items()} for owner in owners),
        *(Same(find_cell(functions, name).cell_contents) for name in CELLS),
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
    from megatron_cg.tools.cpu.cpu_model import transformer_layers

    done: list[nn.Module] = []
    with trainer_of(CpuModelConfig(layers=2), microbatches=2) as trainer:
        with monkeypatch.context() as patch:
            path = install(trainer.model.module)
            assert path.bucketing is not None
            patch.setattr(path.bucketing, "unit_is_done", done.append)
            trainer.step()
        path.close()
        backward = [*reversed(transformer_layers(trainer.model))]
        assert [unit for unit in done if unit in backward] == backward * 2


@pytest.mark.parametrize("cell", CELLS)
def test_a_variable_that_is_gone_is_named_and_nothing_stays_changed(
    fsdp: Any, cell: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = state(fsdp)
    for module in ("bucketing", "unshard"):
        monkeypatch.setattr(f"megatron_cg.fastpath.{module}.find_cell", without(cell))
    with pytest.raises(UpstreamChangedError, match=rf"megatron-core 0\.19\.2: .*{cell}"):
        install(fsdp)
    assert state(fsdp) == before


def without(name: str) -> Any:
    def find(functions: Any, wanted: str) -> Any:
        return find_cell([] if wanted == name else functions, wanted)

    return find


def test_exchanged_parameters_are_megatrons_own(fsdp: Any) -> None:
    def slots() -> list[Same]:
        return [Same(p) for m in fsdp.module.modules() for p in m._parameters.values()]

    exchanges = ("_replace_param_with_raw_if_needed", "_replace_param_with_distributed_if_needed")
    megatrons: list[Any] = []
    ours: list[Any] = []
    for found in (megatrons, ours):
        for name in (*exchanges, *exchanges):
            getattr(fsdp, name)()
            found.append((slots(), fsdp.is_param_fsdp_distributed))
        if found is megatrons:
            install(fsdp)
    assert ours == megatrons and megatrons[0] != megatrons[1]


def test_a_cell_is_set_for_all_that_share_it_and_set_back() -> None:
    value = "old"

    def one() -> str:
        return value

    def two() -> str:
        return value

    undo = set_cell(one.__closure__[0], "new")  # type: ignore[index]
    assert (one(), two()) == ("new", "new")
    undo()
    assert (one(), two()) == ("old", "old")


def test_one_parameter_of_a_bucket_is_shown_and_every_float8_one() -> None:
    parameters = [nn.Parameter(torch.zeros(1)) for _ in range(6)]
    buckets = dict(zip(parameters, (0, 0, 1, 1, 0, 2), strict=True))
    known = CachedParameters(parameters, buckets.__getitem__, lambda p: p is parameters[3])
    first, _, third, fourth, _, sixth = parameters
    assert [id(p) for p in known.parameters()] == [id(p) for p in (first, third, fourth, sixth)]
    assert [id(p) for p in known.others] == [id(parameters[1]), id(parameters[4])]


class Buffer:
    """Three parameters in a bucket that lies where it is told."""

    def __init__(self, allocator: str = "FixedPoolAllocator", sharded: bool = True) -> None:
        self.memory = torch.arange(6.0)
        self.params = [nn.Parameter(torch.zeros(2)) for _ in range(3)]
        self.param_idx = {parameter: index for index, parameter in enumerate(self.params)}
        self.temporary_bucket_allocator = type(allocator, (), {})()
        self.is_data_distributed = sharded
        self.set = 0

    def fetch_bucket(self, dtype: Any, set_param_data: bool, strict: bool) -> Any:
        bucket = SimpleNamespace(data=self.memory[:])
        if set_param_data:
            self.set += 1
            for index, parameter in enumerate(self.params):
                parameter.data = self.get_item_from_bucket(bucket, index)
        return bucket

    def get_item_from_bucket(self, bucket: Any, index: int) -> torch.Tensor:
        piece: torch.Tensor = bucket.data[2 * index : 2 * index + 2]
        return piece


def test_parameters_are_pointed_at_their_bucket_only_when_they_are_elsewhere() -> None:
    buffer = Buffer()
    fetch = _fetched(buffer)
    for _ in range(3):
        fetch(None, set_param_data=True)
    fetch(None)
    assert buffer.set == 1
    buffer.memory = torch.arange(6.0)
    fetch(None, set_param_data=True)
    assert buffer.set == 2 and buffer.params[2].data_ptr() == buffer.memory[4:].data_ptr()
    buffer.params[1].data = torch.zeros(2)
    fetch(None, set_param_data=True)
    assert buffer.set == 3 and buffer.params[1].data_ptr() == buffer.memory[2:].data_ptr()


@pytest.mark.parametrize(
    ("allocator", "sharded", "kept"),
    [
        ("FixedPoolAllocator", True, True),
        ("StorageResizeBased", True, False),
        ("StorageResizeBased", False, True),
    ],
)
def test_views_are_kept_only_where_memory_stays(allocator: str, sharded: bool, kept: bool) -> None:
    buffer = Buffer(allocator, sharded)
    views = BucketViews(buffer)
    one, two = (views.of(buffer.fetch_bucket(None, False, True), buffer.params) for _ in range(2))
    assert [a is b for a, b in zip(one, two, strict=True)] == [kept] * 3
    buffer.memory = torch.arange(6.0) + 1
    (moved,) = views.of(buffer.fetch_bucket(None, False, True), buffer.params[2:])
    assert moved.tolist() == [5.0, 6.0]


def test_float8_weights_are_left_to_megatron_fsdp(
    fsdp: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in ("unshard", "main_weights"):
        monkeypatch.setattr(f"megatron_cg.fastpath.{module}.float8_test", lambda _: lambda _p: True)
    path = install(fsdp)
    assert "FP8" in path.left_out["main-weights"]
    buffers = (g.model_weight_buffer for g in fsdp.param_and_grad_buffer.parameter_groups)
    assert not any("fetch_bucket" in vars(buffer) for buffer in buffers)
    path.close()


def test_a_copy_waits_for_the_last_reduction_that_anybody_freed_a_buffer_of() -> None:
    waited: list[str] = []
    entries = [
        (SimpleNamespace(wait=lambda name=name: waited.append(name)), None, number)
        for number, name in enumerate(("oldest", "older", "newest"))
    ]
    pipeline = SimpleNamespace(grad_reduce_queue=entries)
    own = pipeline.wait_for_previous_grad_reduce = lambda n: entries.__delitem__(slice(n))
    keep = [0, 2, 0, 0, 0, 0, 0]
    pipeline._enforce_double_buffer_limit = lambda _buckets: pipeline.wait_for_previous_grad_reduce(
        keep.pop(0)
    )
    freed = FreedBuffers(pipeline)
    undo = freed.install()
    one, other = 1, 2  # Streams.
    freed.make_room(7, one)
    assert waited == []
    freed.make_room(7, one)
    assert waited == ["older"]
    freed.make_room(7, one)  # This stream has waited for it.
    assert waited == ["older"]
    freed.make_room(7, other)
    assert waited == ["older"] * 2
    pipeline.wait_for_previous_grad_reduce(1)
    freed.make_room(7, one)
    freed.make_room(7, other)
    freed.make_room(7, one)
    assert waited == ["older"] * 2 + ["newest"] * 2
    undo()
    assert pipeline.wait_for_previous_grad_reduce is own
