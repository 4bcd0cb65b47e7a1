"""Which arguments and results of a call go through a graph, and which must be as they were."""

import functools
from collections import UserDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch

from megatron_cg.errors import CaptureError
from megatron_cg.units.call import CallSpec
from tests.unit.units.plain import Training, Unit, backward, refused, units

X, Y, MASK = torch.ones(1), torch.ones(2), torch.ones(3)
Call = tuple[tuple[Any, ...], dict[str, Any]]


class Kind(torch.Tensor):
    pass


KIND = torch.ones(1).as_subclass(Kind)


def forward(x: Any, flag: Any = False, y: Any = None, *, mask: Any = None, scale: Any = 1) -> None:
    pass


def variadic(x: Any, /, *more: Any, **named: Any) -> None:
    pass


def plain(x: Any, bias: Any) -> None:
    pass


@functools.wraps(plain)
def scaled(scale: Any, x: Any, bias: Any) -> None:
    """Takes one more argument than its signature says."""


def call(*args: Any, **kwargs: Any) -> Call:
    return args, kwargs


class Packed(NamedTuple):
    starts: torch.Tensor
    longest: int


@dataclass
class Fields:
    main: torch.Tensor


class Shared(UserDict[str, Any]):
    pass


class Counted(UserDict[str, Any]):
    def __init__(self) -> None:
        super().__init__()
        self.count = 0


NESTED = call(Y, (X, MASK), mask={"full": [MASK, 3], "none": None})
TENSORS: list[tuple[Callable[..., Any], Call, dict[str, Any]]] = [
    (forward, call(X, True, Y, mask=MASK, scale=1), {"x": X, "y": Y, "mask": MASK}),
    (forward, NESTED, {"x": Y, "flag[0]": X, "flag[1]": MASK}),
    (forward, call((X, Y)), {"x[0]": X, "x[1]": Y}),
    (forward, call(mask=(None, MASK), x=X), {"mask[1]": MASK, "x": X}),
    (variadic, call(1, X, Y, x=MASK), {"number 1": X, "number 2": Y, "x": MASK}),
    (scaled, call(X, Y, bias=MASK), {"x": X, "number 1": Y, "bias": MASK}),
    (forward, call(X, Packed(Y, 7)), {"x": X, "flag.starts": Y}),
    (
        forward,
        call(X, Shared(), UserDict(kept=(Y, MASK))),
        {"x": X, "y.kept[0]": Y, "y.kept[1]": MASK},
    ),
]
"""A function, a call, and its tensors by name."""


@pytest.mark.parametrize(("function", "made", "named"), TENSORS)
def test_tensors_are_taken_out_and_put_back(
    function: Any, made: Call, named: dict[str, Any]
) -> None:
    form = CallSpec.of(function, *made)
    tensors, mismatch = form.split(*made)
    assert mismatch is None and form.problems() == []
    assert form.names == (*named,) and [*map(id, tensors)] == [*map(id, named.values())]
    assert form.by_name(tensors) == named
    joined = form.join(tensors)
    assert joined == made and [type(one) for one in joined[0]] == [type(one) for one in made[0]]


GIVEN = torch.ones(1, 3).expand(4, 3)
LEAF, OTHER = torch.ones(2, requires_grad=True), torch.ones(2, requires_grad=True)
LIST = [MASK]
FULL = call(X, True, Y, mask=MASK, scale=1)
MISMATCHES: list[tuple[Call, Call, str]] = [
    (FULL, call(X, False, Y, mask=MASK, scale=1), "argument flag"),
    (FULL, call(X, True, y=Y, mask=MASK, scale=1), "the way of its call"),
    (FULL, call(X, True, Y, scale=1), "the way of its call"),
    (FULL, call(X, True, Y, mask=MASK, scale=X), "argument scale"),
    (FULL, call(X, True, Y, scale=1, mask=MASK), "the way of its call"),
    (NESTED, call(Y, (X,), **NESTED[1]), "argument flag"),
    (NESTED, call(Y, (X, None), **NESTED[1]), "argument flag[1]"),
    (NESTED, call(*NESTED[0], mask={"full": [MASK, 4], "none": None}), "argument mask['full'][1]"),
    (NESTED, call(*NESTED[0], mask={"none": None, "full": [MASK, 3]}), "argument mask"),
    (call(X), call(X, scale=None), "the way of its call"),
    (call(X, X.shape), call(X, Y.shape), "argument flag"),
    (call(X, X.shape), call(X, (1,)), "argument flag"),
    (call(X, GIVEN), call(X, GIVEN[:2]), "argument flag"),
    (call(X, GIVEN), call(X, GIVEN.contiguous()), "argument flag"),
    (call(X, Packed(Y, 7)), call(X, Packed(Y, 8)), "argument flag.longest"),
    (call(LEAF, 1, LEAF), call(LEAF, 1, Y), "argument y"),
    (call(LEAF, 1, OTHER), call(LEAF, 1, LEAF), "argument y"),
    (call(X, 1, X), call(X, 1, Y), "argument y"),
    (call(X, Shared()), call(X, Shared(kept=Y)), "argument flag"),
    (call(X, Shared()), call(X, UserDict()), "argument flag"),
    (call(X, 1, Y), call(X, 1, X), "argument y"),
    (call(X, LIST, LIST), call(X, LIST, [*LIST]), "argument y"),
    (call(X, LIST, [*LIST]), call(X, LIST, LIST), "argument y"),
]
"""A captured call, another one, and what differs."""


@pytest.mark.parametrize(("captured", "made", "subject"), MISMATCHES)
def test_another_form_is_a_mismatch(captured: Call, made: Call, subject: str) -> None:
    mismatch = CallSpec.of(forward, *captured).split(*made)[1]
    assert mismatch is not None and mismatch.subject == subject


@pytest.mark.parametrize("made", [call(X, mask=None), call(X, mask=MASK)])
def test_a_mask_that_comes_and_goes_is_named(made: Call) -> None:
    """Models of transformers drop one that masks nothing."""
    other = call(X, mask=MASK if made[1]["mask"] is None else None)
    mismatch = CallSpec.of(forward, *made).split(*other)[1]
    assert mismatch is not None and "Pass a 4-D mask in each step" in mismatch.cause


def test_equal_constants_are_none() -> None:
    form = CallSpec.of(forward, *call(X, X.shape, y=float("nan"), scale=1))
    assert form.split(*call(X, torch.Size([1]), y=float("nan"), scale=1))[1] is None


def test_a_list_or_tensor_that_is_given_twice_is_the_same_one() -> None:
    form = CallSpec.of(forward, *call(X, LIST, LIST, mask=X))
    args, kwargs = form.join(form.split(*call(X, LIST, LIST, mask=X))[0])
    assert args[1] is args[2] and kwargs["mask"] is args[0]


def test_a_container_that_changes_later_does_not_change_the_form() -> None:
    sizes = [1, 2]
    form = CallSpec.of(forward, (X, sizes), {})
    sizes[0] = 5
    mismatch = form.split((X, sizes), {})[1]
    assert mismatch is not None and mismatch.subject == "argument flag[0]"


class Array:
    """Cannot be compared, as an array of NumPy."""

    __hash__ = None  # type: ignore[assignment]

    def __eq__(self, _other: object) -> Any:
        raise ValueError


@pytest.mark.parametrize(
    ("made", "named"),
    [
        (call([object], scale=object), ["argument x[0]", "argument scale", "no argument"]),
        (call(X, Array()), ["argument flag"]),
        (call(X, KIND), ["argument flag"]),
        (call(X, y=Fields(Y)), ["argument y"]),
        (call(X, Counted(), UserDict({1: X})), ["argument flag", "argument y"]),
    ],
)
def test_what_no_graph_can_take_is_named(made: Call, named: list[str]) -> None:
    problems = CallSpec.of(forward, *made).problems()
    assert [text.split(" is ")[0] for text in problems] == named


class Storing(Unit):
    def forward(self, x: torch.Tensor, kept: Any = None) -> torch.Tensor:
        kept["last"] = y = super().forward(x)
        return y


def test_an_argument_that_a_unit_fills_is_refused() -> None:
    def microbatch(run: Training, x: torch.Tensor) -> torch.Tensor:
        return backward(run.model[1](run.model[0](x, Shared()), Shared()).square().mean())

    refused(CaptureError, "changes a list, dict or object", lambda: units(Storing), microbatch)
