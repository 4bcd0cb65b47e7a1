"""What differs in a call from that at capture is found, and nothing else: random calls."""

from collections.abc import Callable
from random import Random
from typing import Any

import pytest
import torch

from megatron_cg.replay.guard import NOT_INPUTS, Addresses, Inputs, Watched
from megatron_cg.replay.guarded_graph import are_returned

Given = dict[str, Any]
"""A call: positional arguments by number, as text, and keywords."""


def of_capture() -> Given:
    """Two positional tensors, and a keyword."""
    return {
        "0": torch.ones(2, 3, requires_grad=True),
        "1": torch.ones(3),
        "mask": torch.ones(2, 2, dtype=torch.bool),
    }


CHANGES: dict[str, tuple[Callable[[Given], object], str]] = {
    "shape": (lambda given: given.update({"0": torch.ones(4, 3, requires_grad=True)}), "shape"),
    "dtype": (lambda given: given.update({"1": torch.ones(3).double()}), "dtype"),
    "stride": (lambda given: given.update(mask=torch.ones(2, 2).bool().t()), "stride"),
    "needs one now": (lambda given: given["1"].requires_grad_(), "requires_grad"),
    "needs none now": (lambda given: given["0"].requires_grad_(False), "requires_grad"),
    "no tensor": (lambda given: given.update({"1": 3}), "structure"),
    "keyword None": (lambda given: given.update(mask=None), "structure"),
    "keyword gone": (lambda given: given.pop("mask", None), "structure"),
    "keyword more": (lambda given: given.update(more=torch.ones(1)), "structure"),
    "one more": (lambda given: given.update({"2": torch.ones(1)}), "structure"),
    "none": (lambda given: None, ""),
    "new values": (lambda given: given.update({"1": torch.zeros(3)}), ""),
    "more, but None": (lambda given: given.update(absent=None), ""),
    "of the replay": (lambda given: given.update({min(NOT_INPUTS): torch.ones(1)}), ""),
}
"""What changes in a call, and the clause that sees it; nothing sees an empty one."""


def call(inputs: Inputs, given: Given) -> Any:
    named = {key: value for key, value in given.items() if not key.isdigit()}
    return inputs.broken([given[key] for key in sorted(given) if key.isdigit()], named)


@pytest.mark.parametrize("same_gradients", [False, True])
def test_a_call_is_broken_by_what_has_changed_in_it(same_gradients: bool) -> None:
    sample = of_capture()
    kwargs = {"mask": sample["mask"]}
    inputs = Inputs([sample["0"], sample["1"]], kwargs, "01", same_gradients=same_gradients)
    # A gradient that nobody needs any more may be computed.
    allowed = set() if same_gradients else {"needs none now"}
    of_one = {"no tensor", "dtype", "new values", "needs one now"}  # All change argument 1.
    for seed in range(600):
        given, chance = of_capture(), Random(seed)
        names = set(chance.sample(sorted(CHANGES), k=chance.choice((1, 2))))
        if len(names & of_one) > 1:
            continue
        for name in sorted(names):
            CHANGES[name][0](given)
        clauses = {CHANGES[name][1] for name in names - allowed} - {""}
        found = call(inputs, given)
        assert found is None if not clauses else found.key[0] in clauses, names


def test_the_stride_of_a_dimension_of_size_1_may_not_matter() -> None:
    sample = torch.ones(4, 1, 3)
    transposed, other = torch.ones(1, 4, 3).transpose(0, 1), torch.ones(3, 1, 4).transpose(0, 2)
    assert transposed.stride() != sample.stride()
    for lax in (False, True):
        inputs = Inputs([sample], {}, any_stride_of_one=lax)
        assert (inputs.broken([transposed], {}) is None) is lax
        assert inputs.broken([other], {}) is not None


def test_outputs_in_the_memory_of_two_inputs_are_found() -> None:
    one, two = torch.ones(4), torch.ones(4)
    assert are_returned(Inputs([one, two], {}).memory, [None, two[1:]])
    assert not are_returned(Inputs([one, two], {}).memory, [torch.ones(4), 1])
    assert not are_returned(Inputs([one], {}).memory, [one])


def test_a_value_of_the_host_counts_where_kernels_run_on_a_device() -> None:
    """They got it at capture, so a change in place is one, too."""
    host, device = torch.ones(2), torch.ones(2, device="meta")
    addresses = Addresses([Watched(host, "the scale", ""), Watched(device, "the weight", "")])
    addresses.note(forward=True)
    assert addresses.broken(forward=True) is None
    host.add_(1)
    found = addresses.broken(forward=True)
    assert found is not None and "the scale" in found.subject
