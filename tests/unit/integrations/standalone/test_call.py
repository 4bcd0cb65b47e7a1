"""Which arguments of a call go into a graph, and which must be as they were."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch

from megatron_cg.integrations.standalone.call import CallForm


def forward(x: Any, flag: Any = False, y: Any = None, *, mask: Any = None, scale: Any = 1) -> None:
    pass


X, Y, MASK = torch.ones(1), torch.ones(2), torch.ones(3)


def form() -> CallForm:
    return CallForm.of(forward, (X, True, Y), {"mask": MASK, "scale": 1})


def test_tensors_are_taken_out_and_put_back() -> None:
    args, kwargs, mismatch = form().split((Y, True, X), {"scale": 1, "mask": MASK})
    assert args == (Y,) and kwargs == {"y": X, "mask": MASK} and mismatch is None
    assert form().names == ("x",)
    joined, named = form().join((X,), {"mask": MASK, "y": Y})
    assert joined == (X, True, Y) and named == {"mask": MASK, "scale": 1}


def test_tensors_without_a_name_are_numbered() -> None:
    def variadic(x: Any, /, *more: Any, **named: Any) -> None:
        pass

    found = CallForm.of(variadic, (1, X, Y), {"x": MASK})
    assert found.split((1, X, Y), {"x": MASK})[:2] == ((X,), {"number 2": Y, "x": MASK})
    joined = found.join((X,), {"number 2": Y, "x": MASK})
    assert joined == ((1, X, Y), {"x": MASK})
    assert CallForm.of(variadic, (X, Y), {"x": MASK}).names == ("number 0",)


def test_a_decorator_with_another_argument_mixes_no_tensors_up() -> None:
    def plain(x: Any, bias: Any) -> None:
        pass

    @functools.wraps(plain)
    def scaled(scale: Any, x: Any, bias: Any) -> None:
        pass

    found = CallForm.of(scaled, (X, Y), {"bias": MASK})
    args, kwargs, mismatch = found.split((X, Y), {"bias": MASK})
    assert mismatch is None
    assert found.join(args, kwargs) == ((X, Y), {"bias": MASK})


@pytest.mark.parametrize(
    ("args", "kwargs", "subject"),
    [
        ((X, False, Y), {"mask": MASK, "scale": 1}, "argument number 1"),
        ((X, 1, Y), {"mask": MASK, "scale": 1}, "argument number 1"),
        ((X, True, None), {"mask": MASK, "scale": 1}, "argument number 2"),
        ((X, True), {"y": Y, "mask": MASK, "scale": 1}, "the number of positional arguments"),
        ((X, True, Y), {"scale": 1}, "argument mask"),
        ((X, True, Y), {"mask": MASK, "scale": X}, "argument scale"),
        ((X, True, Y), {"mask": MASK, "scale": 1, "new": 3}, "argument new"),
    ],
)
def test_another_form_is_a_mismatch(
    args: tuple[Any, ...], kwargs: dict[str, Any], subject: str
) -> None:
    mismatch = form().split(args, kwargs)[2]
    assert mismatch is not None and mismatch.subject == subject


def test_a_keyword_of_none_may_be_left_out() -> None:
    without = CallForm.of(forward, (X,), {"mask": None})
    assert without.split((X,), {})[2] is None
    assert CallForm.of(forward, (X,), {}).split((X,), {"mask": None})[2] is None


def test_a_keyword_that_is_left_out_is_its_default_and_not_none() -> None:
    def variadic(x: Any, **named: Any) -> None:
        pass

    given_none = CallForm.of(forward, (X,), {"scale": None})
    mismatch = given_none.split((X,), {})[2]
    assert mismatch is not None and mismatch.subject == "argument scale"
    left_out = CallForm.of(forward, (X,), {})
    assert left_out.split((X,), {"scale": None})[2] is not None
    assert left_out.split((X,), {"scale": 1})[2] is None
    unknown = CallForm.of(variadic, (X,), {}).split((X,), {"scale": None})[2]
    assert unknown is not None and unknown.expected == "not given"


def test_what_no_graph_can_take_is_named() -> None:
    assert form().problems() == []
    problems = CallForm.of(forward, ([X],), {"y": Y, "scale": object}).problems()
    assert [text.split(" is ")[0] for text in problems] == [
        "argument number 0",
        "argument scale",
        "no argument given by position",
    ]
