"""Gradients on their way to a bucket in unusual orders; ``test_detached.py`` has the usual ones."""

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from megatron_cg.errors import FastPathError
from megatron_cg.fastpath.bucketing import GradientBucketing

SIZE = 2
Gradients = list[torch.Tensor | None]


class Buffer:
    """Parameters' gradients, side by side in memory that stays in place."""

    def __init__(self, parameters: list[Any], sharded: bool) -> None:
        self.params, self.is_data_distributed = parameters, sharded
        self.temporary_bucket_allocator = type("FixedPoolAllocator", (), {})()
        self.param_idx = {parameter: place for place, parameter in enumerate(parameters)}
        self.data = torch.zeros(SIZE * len(parameters))
        self.reduced = 0

    def fetch_bucket(self, dtype: torch.dtype | None) -> Any:
        # What is sharded is sent, in the dtype for that; the sum of a step is not.
        assert (dtype is torch.float32) == self.is_data_distributed
        return self

    def get_item_from_bucket(self, bucket: Any, place: int) -> torch.Tensor:
        piece: torch.Tensor = bucket.data[SIZE * place : SIZE * (place + 1)]
        return piece


class Megatron:
    """The part of Megatron-FSDP that takes gradients, for buckets of these many parameters."""

    def __init__(self, *sizes: int, sharded: bool = True) -> None:
        self.buffers, groups = [], []
        for size in sizes:
            parameters: list[Any] = [nn.Parameter(torch.zeros(SIZE)) for _ in range(size)]
            self.buffers.append(Buffer(parameters, sharded))
            groups.append(
                SimpleNamespace(
                    hfsdp_helper_gbuf=None,
                    main_grad_buffer=self.buffers[-1],
                    fsdp_unit_id=0,
                    requires_grad=True,
                    params=parameters,
                )
            )
        policy = SimpleNamespace(grad_comm_dtype=torch.float32)
        self.param_and_grad_buffer = SimpleNamespace(parameter_groups=groups, mp_policy=policy)
        self.grad_reduce_pipeline = SimpleNamespace(
            bucket_grad_ready_params=[set() for _ in sizes],
            grad_reduce_queue=[],
            _enforce_double_buffer_limit=lambda _buckets: None,
        )
        self.told: list[int] = []
        """Places of what its own function was called with."""
        self.parameters = [p for buffer in self.buffers for p in buffer.params]
        self.places = {parameter: place for place, parameter in enumerate(self.parameters)}
        self.unit = nn.ParameterList(self.parameters)
        self.begin()

    def begin(self) -> None:
        for ready in self.grad_reduce_pipeline.bucket_grad_ready_params:
            ready.clear()
        self._params_require_handle_grad = set(self.parameters)
        # Until the root hook after the pass takes it back.
        self._root_pre_backward_hook_issued = True
        for parameter in self.parameters:
            parameter.grad_added_to_main_grad = False

    def take(self, parameters: list[Any]) -> None:
        """What ``_process_post_backward_gradients`` does."""
        (parameter,) = parameters
        self.told.append(self.places[parameter])
        number, buffer = next(
            (n, b) for n, b in enumerate(self.buffers) if parameter in b.param_idx
        )
        piece = buffer.get_item_from_bucket(buffer, buffer.param_idx[parameter])
        if not parameter.grad_added_to_main_grad:
            if buffer.is_data_distributed:
                piece.zero_()
            if parameter.grad is not None:
                piece.add_(parameter.grad)
        parameter.grad, parameter.grad_added_to_main_grad = None, False
        ready = self.grad_reduce_pipeline.bucket_grad_ready_params[number]
        ready.add(parameter)
        buffer.reduced += len(ready) == len(buffer.params)
        self._params_require_handle_grad.discard(parameter)

    def has(self, gradients: Gradients) -> bool:
        """Whether these are what lies in the buckets, and nothing is left to do."""
        there = [
            buffer.get_item_from_bucket(buffer, buffer.param_idx[parameter])
            for buffer in self.buffers
            for parameter in buffer.params
        ]
        wanted = [torch.zeros(SIZE) if g is None else g for g in gradients]
        idle = not self._params_require_handle_grad
        return torch.equal(torch.cat(there), torch.cat(wanted)) and idle

    def left(self) -> list[int]:
        return sorted(self.places[parameter] for parameter in self._params_require_handle_grad)


class Case:
    def __init__(self, *sizes: int, detached: int = 4, sharded: bool = True) -> None:
        self.megatron = Megatron(*sizes, sharded=sharded)
        self.bucketing = GradientBucketing(self.megatron, self.megatron.take)
        self.weights = self.megatron.parameters[:detached]
        self.rest = self.megatron.parameters[detached:]
        self.comes_still = False
        if detached:
            self.together = self.bucketing.detach(self.weights, lambda: self.comes_still)
        self.gradients: Gradients = list(
            torch.arange(1.0, 1 + SIZE * len(self.megatron.parameters)).split(SIZE)
        )

    def take(self, used: Sequence[int] = ()) -> None:
        also = [place in used for place in range(len(self.weights))]
        self.bucketing.take_detached(self.together, self.gradients[: len(self.weights)], also)

    def hook(self, parameter: Any, gradient: torch.Tensor) -> None:
        """Autograd has a gradient for a parameter: it is added up, and the hook runs."""
        before = parameter.grad
        parameter.grad = gradient.clone() if before is None else before + gradient
        self.bucketing([parameter])

    def rest_comes(self) -> None:
        own = self.gradients[len(self.weights) :]
        for parameter, gradient in zip(self.rest, own, strict=True):
            assert gradient is not None
            self.hook(parameter, gradient)


def test_a_pass_that_comes_to_the_experts_alone_leaves_the_rest_to_the_root_hook() -> None:
    case = Case(6)
    for _ in range(2):
        case.megatron.begin()
        case.take()
        case.bucketing.unit_is_done(case.megatron.unit)
        assert case.megatron.left() == [4, 5] and case.megatron.told == []
        for parameter in case.rest:
            parameter.grad = torch.ones(SIZE)
        case.bucketing(case.rest[:1])
    # The one that waits is of the second pass; what waited in the first is forgotten.
    assert len(case.bucketing._buckets[0].waiting) == 1


def test_a_gradient_that_is_written_already_goes_megatron_s_way() -> None:
    case = Case(4)
    case.weights[2].grad_added_to_main_grad = True
    case.megatron.buffers[0].data[2 * SIZE : 3 * SIZE] = -1.0
    case.take()
    # The last one of those that are copied is told in any case.
    assert case.megatron.told == [2, 3] and case.megatron.buffers[0].reduced == 1
    case.gradients[2] = torch.full((SIZE,), -1.0)
    assert case.megatron.has(case.gradients)
    assert all(weight.grad is None for weight in case.weights)


def test_a_second_gradient_of_a_complete_bucket_is_reduced_again_or_an_error() -> None:
    case = Case(4)
    case.take()
    with pytest.raises(FastPathError, match="twice in one backward pass"):
        case.take()
    case = Case(3, detached=0)
    for number in (1, 2):
        case.rest_comes()
        assert case.megatron.told == [2, 0, 1, 2][: 1 if number == 1 else 4]
    assert case.megatron.buffers[0].reduced == 4
    case.megatron.begin()
    case.rest_comes()
    assert case.megatron.told[4:] == [2] and case.megatron.has(case.gradients)


def test_a_second_gradient_that_was_added_to_one_that_waits_is_an_error() -> None:
    case = Case(3, detached=0)
    for _ in range(2):
        case.hook(case.rest[0], torch.ones(SIZE))
    with pytest.raises(FastPathError, match="twice in one backward pass"):
        case.bucketing.unit_is_done(case.megatron.unit)


@pytest.mark.parametrize("first", ["operation", "hook"])
def test_parts_that_wait_alone_are_refused(first: str) -> None:
    case = Case(4)
    case.comes_still = True
    if first == "operation":
        case.take(used=range(4))
    else:
        case.hook(case.weights[1], torch.ones(SIZE))
    assert not case.bucketing._buckets[0].waiting and case.megatron.told == []
    with pytest.raises(FastPathError):
        case.bucketing.refuse_what_is_left()
    case.megatron._root_pre_backward_hook_issued = False
    case.bucketing.refuse_what_is_left()


def test_a_part_that_comes_too_late_is_an_error() -> None:
    case = Case(5)
    case.take()
    with pytest.raises(FastPathError, match="the sum would be incomplete"):
        case.hook(case.weights[1], torch.ones(SIZE))


def no_memory_that_stays(megatron: Megatron) -> None:
    megatron.buffers[0].temporary_bucket_allocator = object()


@pytest.mark.parametrize("mark", ["", "_is_shared", "skip_backward_post_hook"])
def test_buckets_that_are_megatron_s(mark: str) -> None:
    megatron = Megatron(2, 2)
    if mark:
        setattr(megatron.parameters[1], mark, True)
    else:
        no_memory_that_stays(megatron)
    bucketing = GradientBucketing(megatron, megatron.take)
    known = [bucketing.knows(parameter) for parameter in megatron.parameters]
    assert known == [False, False, True, True]
    bucketing(megatron.parameters[:1])
    assert megatron.told == [0]


def test_a_bucket_that_sums_up_microbatches_stays_without_a_pool() -> None:
    megatron = Megatron(2, sharded=False)
    no_memory_that_stays(megatron)
    assert GradientBucketing(megatron, megatron.take).knows(megatron.parameters[0])
