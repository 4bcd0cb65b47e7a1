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
        ((X, False, Y), {"mask": MASK, "scale": 1}, "argument flag"),
        ((X, 1, Y), {"mask": MASK, "scale": 1}, "argument flag"),
        ((X, True, None), {"mask": MASK, "scale": 1}, "argument y"),
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


def nested(*, tables: Any = (X, MASK), masks: Any = None) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """A call with tensors in a tuple, and in a list in a dict."""
    return (Y, tables), {"mask": masks or {"full": [MASK, 3], "none": None}}


def test_tensors_in_containers_are_taken_out_and_put_back() -> None:
    args, kwargs = nested()
    found = CallForm.of(forward, args, kwargs)
    assert found.problems() == []
    tensors, named, mismatch = found.split(args, kwargs)
    assert mismatch is None and tensors == (Y,)
    assert named == {"flag[0]": X, "flag[1]": MASK, "mask['full'][0]": MASK}
    joined, by_name = found.join(tensors, named)
    assert joined == args and by_name == kwargs
    assert type(joined[1]) is tuple and type(by_name["mask"]["full"]) is list


def test_the_first_tensor_may_be_in_a_container() -> None:
    found = CallForm.of(forward, ((X, Y),), {})
    assert found.split(((X, Y),), {}) == ((X,), {"x[1]": Y}, None)
    assert found.join((X,), {"x[1]": Y}) == (((X, Y),), {})


def test_the_first_tensor_may_be_given_by_keyword() -> None:
    found = CallForm.of(forward, (), {"mask": (None, MASK), "x": X})
    assert found.problems() == [] and found.names == ("mask[1]",)
    assert found.split((), {"x": X, "mask": (None, MASK)}) == ((MASK,), {"x": X}, None)
    assert found.join((MASK,), {"x": X}) == ((), {"mask": (None, MASK), "x": X})


def test_an_expanded_tensor_is_reduced_and_expanded_again() -> None:
    mask = torch.ones(2, 3).transpose(0, 1)[None, :, None].expand(4, 3, 5, 2)
    found = CallForm.of(forward, (X,), {"mask": mask})
    _, named, mismatch = found.split((X,), {"mask": mask})
    assert mismatch is None and named["mask"].shape == (1, 3, 1, 2)
    assert named["mask"].data_ptr() == mask.data_ptr()
    again = found.join((X,), named)[1]["mask"]
    assert again.shape == mask.shape and again.stride() == mask.stride()
    for other in (mask[:2], mask.contiguous(), None, 1):
        mismatch = found.split((X,), {"mask": other})[2]
        assert mismatch is not None and "(4, 3, 5, 2), expanded" in mismatch.expected


@pytest.mark.parametrize(
    ("changed", "subject"),
    [
        ({"tables": (X,)}, "argument flag"),
        ({"tables": [X, MASK]}, "argument flag"),
        ({"tables": None}, "argument flag"),
        ({"tables": (X, None)}, "argument flag[1]"),
        ({"masks": {"full": [MASK, 4], "none": None}}, "argument mask['full'][1]"),
        ({"masks": {"full": [MASK, 3], "none": MASK}}, "argument mask['none']"),
        ({"masks": {"full": [MASK, 3], "all": None}}, "argument mask"),
        ({"masks": {"none": None, "full": [MASK, 3]}}, "argument mask"),
    ],
)
def test_another_form_inside_a_container_is_a_mismatch(
    changed: dict[str, Any], subject: str
) -> None:
    mismatch = CallForm.of(forward, *nested()).split(*nested(**changed))[2]
    assert mismatch is not None and mismatch.subject == subject


def test_a_container_that_changes_later_does_not_change_the_form() -> None:
    sizes = [1, 2]
    found = CallForm.of(forward, (X, sizes), {})
    sizes[0] = 5
    mismatch = found.split((X, sizes), {})[2]
    assert mismatch is not None and mismatch.subject == "argument flag[0]"


def test_what_no_graph_can_take_is_named() -> None:
    assert form().problems() == []
    problems = CallForm.of(forward, ([object],), {"scale": object}).problems()
    assert [text.split(" is ")[0] for text in problems] == [
        "argument x[0]",
        "argument scale",
        "no argument",
    ]


def test_an_object_that_cannot_be_compared_is_named() -> None:
    class Array:
        def __eq__(self, _other: object) -> Any:
            raise ValueError("as an array of numpy")

        __hash__ = None  # type: ignore[assignment]

    args, kwargs = (X, Array()), {"y": float("nan")}
    found = CallForm.of(forward, args, kwargs)
    assert found.split(args, kwargs)[2] is None
    assert [text.split(" is ")[0] for text in found.problems()] == ["argument flag"]


def test_a_shape_is_a_constant() -> None:
    found = CallForm.of(forward, (X, X.shape), {})
    assert found.problems() == [] and found.split((X, Y[:1].shape), {})[2] is None
    for other in (Y.shape, (1,)):
        assert found.split((X, other), {})[2] is not None
