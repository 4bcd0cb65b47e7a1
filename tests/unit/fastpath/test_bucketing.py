"""Gradients on their way to a bucket: at once, one by one, and in parts."""

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from megatron_cg.errors import FastPathError
from megatron_cg.fastpath.bucketing import Bucket, GradientBucketing

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
        self.scratch: list[int] = []
        """Buckets that a buffer was made free for."""
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
            _enforce_double_buffer_limit=self.scratch.extend,
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
    """A model whose first parameters are detached, and gradients for all."""

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


def refused(case: Case) -> bool:
    try:
        case.bucketing.refuse_what_is_left()
    except FastPathError:
        return True
    return False


@pytest.mark.parametrize("sharded", [True, False], ids=["sharded", "summed"])
@pytest.mark.parametrize("first", ["experts", "dense"])
def test_plain_gradients_are_copied_at_once(first: str, sharded: bool) -> None:
    case = Case(6, sharded=sharded)
    megatron, (buffer,) = case.megatron, case.megatron.buffers
    for number in (1, 2):
        megatron.begin()
        steps = [case.take, case.rest_comes]
        if first == "dense":
            # What waited goes before, so that the experts complete the bucket.
            steps.reverse()
        steps[0]()
        # Its own function is not asked before there is something to reduce.
        assert buffer.reduced == number - 1 and len(megatron.told) == number - 1
        assert megatron.left() == ([4, 5] if first == "experts" else list(range(6)))
        assert refused(case)
        steps[1]()
        assert buffer.reduced == number and case.bucketing.copies == 2 * number
        times = 1 if sharded else number
        assert megatron.has([g * times for g in case.gradients if g is not None])
        assert all(parameter.grad is None for parameter in megatron.parameters)
    assert megatron.told == [5 if first == "experts" else 3] * 2
    assert megatron.scratch == [0] * 4
    megatron.begin()
    assert not refused(case)


def test_megatron_fsdp_does_not_scale_what_the_copy_has_scaled() -> None:
    case = Case(4)
    megatron, (buffer,) = case.megatron, case.megatron.buffers
    config = SimpleNamespace(average_in_collective=False, gradient_reduce_div_fusion=False)
    own = {"ddp_config": config, "gradient_scaling_factor": 0.5}
    vars(buffer).update(own)
    megatron.param_and_grad_buffer.bucket_to_bucket_group = {0: [0]}
    case.bucketing.scales = True
    factors, fails = list[Any](), False

    def take(parameters: list[Any]) -> None:
        factors.append(vars(buffer)["gradient_scaling_factor"])
        megatron.take(parameters)
        if fails:
            raise KeyError

    case.bucketing._original = take
    case.take()
    assert megatron.has([g * 0.5 for g in case.gradients if g is not None])
    assert factors == [None] and vars(buffer).items() >= own.items()
    megatron.begin()
    fails = True
    with pytest.raises(KeyError):
        case.take()
    assert factors == [None, None] and vars(buffer).items() >= own.items()


def test_two_operations_and_what_waits_have_copies_of_their_own() -> None:
    case = Case(9)
    other = case.bucketing.detach(case.rest[:3], bool)
    assert case.bucketing.knows(case.weights[0]) and not case.bucketing.knows(nn.Parameter())
    for number in (1, 2):
        case.megatron.begin()
        one, two = case.gradients[7:]
        assert one is not None and two is not None
        case.hook(case.rest[3], one)
        case.take()
        case.bucketing.take_detached(other, case.gradients[4:7], [False] * 3)
        case.hook(case.rest[4], two)
        # What waited before the experts came waits on for the last one.
        assert case.bucketing.copies == 3 * number and case.megatron.has(case.gradients)


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


def test_a_gradient_of_another_shape_is_an_error() -> None:
    case = Case(4)
    first, *others = case.gradients
    assert first is not None
    case.gradients = [first.view(1, SIZE), *others]
    with pytest.raises(RuntimeError, match="size"):
        case.take()


@pytest.mark.parametrize("first", ["operation", "hook"])
def test_parts_that_wait_alone_are_refused(first: str) -> None:
    case = Case(4)
    case.comes_still = True
    if first == "operation":
        case.take(used=range(4))
    else:
        case.hook(case.weights[1], torch.ones(SIZE))
    assert not case.bucketing._buckets[0].waiting and case.megatron.told == []
    assert refused(case)
    case.megatron._root_pre_backward_hook_issued = False
    assert not refused(case)


def test_an_attached_weight_has_nothing_to_wait_for() -> None:
    case = Case(4)
    case.bucketing.attach(case.together)
    case.comes_still = True
    for weight, gradient in zip(case.weights, case.gradients, strict=True):
        assert gradient is not None
        case.hook(weight, gradient)
    assert case.megatron.has(case.gradients)


def test_a_part_that_comes_too_late_is_an_error() -> None:
    case = Case(5)
    case.take()
    with pytest.raises(FastPathError, match="the sum would be incomplete"):
        case.hook(case.weights[1], torch.ones(SIZE))


def test_views_follow_their_bucket_to_other_memory() -> None:
    parameters = [nn.Parameter(torch.zeros(SIZE)) for _ in range(4)]
    views, memory = Bucket(0, Buffer(parameters, True), 4).views, torch.arange(16.0)
    # Another storage, and another place in it.
    for data in (torch.arange(8.0) + 20, memory[:8], memory[8:]):
        first, second = (views(SimpleNamespace(data=data), parameters) for _ in range(2))
        assert all(a is b for a, b in zip(first, second, strict=True))
        assert torch.equal(torch.cat(first), data)


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
