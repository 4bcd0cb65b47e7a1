"""When the last unit is not kept; that it is, and what comes of it, is in ``test_gather.py``."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from megatron_cg.fastpath.not_applicable import NotApplicableError
from megatron_cg.fastpath.params.last_unit import install_last_unit, reshard_last_unit


class Pipeline:
    """Notes what it frees."""

    def __init__(self) -> None:
        self.freed: list[int] = []
        self.bucket_can_be_released: dict[Any, bool] = {}

    def release_bucket(self, bucket_id: int, bwd: bool, lazy: bool = False) -> None:
        self.freed.append(bucket_id)

    def recycle_unused_buckets(self) -> None:
        """Free what may be freed."""


class Buffers(SimpleNamespace):
    """Megatron-FSDP's, whose module has the table of all double buffers."""


def get_global_memory_buffer() -> Any:
    """A table from which nobody takes a buffer."""
    return SimpleNamespace(get_tensor=lambda *_args, **_kwargs: None)


def a_model(units: tuple[int | None, ...] = (None, 0, 1), **changes: Any) -> Any:
    groups = [SimpleNamespace(fsdp_unit_id=unit, transpose_weight_buffer=None) for unit in units]
    values = {"strategy": "optim_grads_params", "double": [0, 1], **changes}
    if values.get("transposed"):
        groups[-1].transpose_weight_buffer = object()
    return SimpleNamespace(
        data_parallel_sharding_strategy=values["strategy"],
        param_and_grad_buffer=Buffers(
            parameter_groups=groups, double_buf_units=values["double"], weight_alloc=Pipeline()
        ),
        all_gather_pipeline=Pipeline(),
        training=True,
        _root_pre_backward_hook_issued=False,
    )


@pytest.mark.parametrize(
    ("model", "why"),
    [
        (a_model(strategy="optim_grads"), "optim_grads, which frees no weights"),
        (a_model(double=[]), "without double buffers"),
        (a_model(transposed=True), "transposed weights"),
        (a_model((None, 0, 0)), "one unit only"),
    ],
)
def test_it_is_not_applicable_where_it_would_not_help(model: Any, why: str) -> None:
    with pytest.raises(NotApplicableError, match=why):
        install_last_unit(model)
    assert vars(model.all_gather_pipeline).keys() == {"freed", "bucket_can_be_released"}


def passes(model: Any, order: list[int], *, backward: bool = True) -> list[int]:
    """A forward pass, freeing each bucket after it, and a backward pass; what was freed."""
    pipeline = model.all_gather_pipeline
    pipeline.freed.clear()
    for bucket in order:
        pipeline.recycle_unused_buckets()  # as each gather does
        pipeline.release_bucket(bucket, False)
    if backward:
        model._root_pre_backward_hook_issued = True
        for bucket in reversed(order):
            pipeline.recycle_unused_buckets()
            pipeline.release_bucket(bucket, True)
        model._root_pre_backward_hook_issued = False
    return list(pipeline.freed)


def test_the_unit_that_ended_last_is_kept_from_the_second_pass_on() -> None:
    model = a_model()
    undo = install_last_unit(model)
    assert passes(model, [1, 2]) == [1, 2, 2, 1]
    assert passes(model, [1, 2]) == [1, 2, 1]
    # Another unit ends the pass: it is learned from it once more.
    assert passes(model, [2, 1]) == [2, 1, 1, 2]
    assert passes(model, [2, 1]) == [2, 1, 2]
    # No backward pass comes, and the next forward pass frees it first.
    assert passes(model, [2, 1], backward=False) == [2]
    assert passes(model, [2, 1]) == [1, 2, 1, 2]
    model.training = False
    assert passes(model, [2, 1], backward=False) == [2, 1]
    model.training = True
    passes(model, [2, 1], backward=False)
    undo()
    assert model.all_gather_pipeline.freed == [2, 1]
    assert passes(model, [2, 1]) == [2, 1, 1, 2]


def test_it_is_undone_once_before_a_capture_or_by_its_own_undo() -> None:
    model = a_model()
    own = vars(model.all_gather_pipeline).keys() - {"release_bucket", "recycle_unused_buckets"}
    reshard_last_unit(model)
    first = install_last_unit(model)
    passes(model, [1, 2], backward=True)
    passes(model, [1, 2], backward=False)
    reshard_last_unit(model)
    assert vars(model.all_gather_pipeline).keys() == own
    assert model.all_gather_pipeline.freed == [1, 2]
    second = install_last_unit(model)
    # What an earlier one left with an agreement takes nothing of the new one.
    first()
    assert vars(model.all_gather_pipeline).keys() > own
    second()
    assert vars(model.all_gather_pipeline).keys() == own
