"""What nothing looked at in the guard's words, found by ``python -m tools.mutate``."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from megatron_cg.capture.unit_guard import UnitGuard
from megatron_cg.replay.guard import Mismatch
from megatron_cg.replay.guard.addresses import Addresses, Watched
from megatron_cg.replay.guard.modes import Autocast, Training
from megatron_cg.replay.guard.objects import Hooks, Objects, entries
from megatron_cg.replay.unit import Unit


def said(mismatch: Mismatch | None) -> str:
    assert mismatch is not None
    return mismatch.text("layer 0")


@pytest.mark.parametrize(
    ("captured", "words"),
    [
        (True, "was training at capture and is evaluation now"),
        (False, "was evaluation at capture and is training now"),
    ],
)
def test_modes_of_training_are_named(captured: bool, words: str) -> None:
    layer = nn.Linear(1, 1).train(captured)
    clause = Training([layer])
    assert clause.broken() is None
    assert words in said((layer.train(not captured), clause.broken())[1])


def test_what_autocast_was_and_is_is_named() -> None:
    outside = Autocast("cpu")
    with torch.autocast("cpu", torch.bfloat16):
        inside = Autocast("cpu")
        assert "was off at capture and is torch.bfloat16 now" in said(outside.broken())
        assert inside.broken() is None
        with torch.autocast("cpu", torch.float16):
            assert "was torch.bfloat16 at capture and is torch.float16" in said(inside.broken())
    assert "was torch.bfloat16 at capture and is off now" in said(inside.broken())
    assert outside.broken() is None


def nothing(*_args: object) -> None:
    return None


def test_hooks_put_on_and_taken_off_inside_a_graph_are_named() -> None:
    layer = nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1))
    first = layer[0].register_forward_hook(nothing)
    clause = Hooks(layer, list(layer))
    assert clause.broken() is None
    second = layer[1].register_forward_pre_hook(nothing)
    assert "module 1 was without hooks at capture and is with a hook now" in said(clause.broken())
    second.remove()
    layer[0].register_forward_hook(nothing)
    assert "module 0 was with 1 hooks at capture and is with 2 others" in said(clause.broken())
    first.remove()
    assert "module 0 was with 1 hooks at capture and is with 1 others" in said(clause.broken())


def test_a_layer_that_gets_a_hook_of_the_old_kind_is_named() -> None:
    layer = nn.Linear(1, 1)
    clause = Hooks(layer, [layer])
    layer._is_full_backward_hook = False  # as register_backward_hook leaves it
    assert "module the layer was without register_backward_hook" in said(clause.broken())


@pytest.mark.parametrize(
    ("place", "name", "words"),
    [
        ("", "0", "module 0 was the Sequential"),
        ("0", "0", "module 0.0 was the Linear"),
        ("0.0", "weight", "parameter 0.0.weight was the Parameter"),
        ("0.0", "mean", "buffer 0.0.mean was the Tensor"),
        ("0.0", "forward", "forward of 0.0 was the NoneType"),
        ("", "scale", "parameter scale was the Parameter"),
    ],
)
def test_a_replaced_part_is_named_by_its_place_in_the_layer(
    place: str, name: str, words: str
) -> None:
    layer = nn.Sequential(nn.Sequential(nn.Linear(1, 1)))
    layer.register_parameter("scale", nn.Parameter(torch.ones(1)))
    layer.get_submodule("0.0").register_buffer("mean", torch.ones(1))
    parts = Objects(entries(layer, list(layer.modules())))
    assert parts.broken() is None
    owner = layer.get_submodule(place)
    old = getattr(owner, name)
    setattr(owner, name, nn.Parameter(torch.ones(1)) if name == "weight" else copy.copy(old))
    assert words in said(parts.broken())


class Quantized:
    """A tensor whose memory is in others, as TE's are."""

    def __init__(self) -> None:
        self._data, self._transpose = torch.zeros(4), torch.zeros(4)
        self._scale_inv = None

    def data_ptr(self) -> int:
        return 0


@pytest.mark.parametrize("moved", ["_data", "_transpose"])
def test_all_memory_of_a_quantized_tensor_is_followed_and_told_in_hex(moved: str) -> None:
    weight = Quantized()
    where = Addresses([Watched(weight, "a weight", "It moved.")])  # type: ignore[arg-type]
    before = [weight._data, weight._transpose]
    where.note(forward=True)
    assert where.broken(forward=True) is None
    setattr(weight, moved, torch.zeros(4))
    words = said(where.broken(forward=True))
    assert f"was {hex(before[0].data_ptr())}, {hex(before[1].data_ptr())} at capture" in words
    assert hex(getattr(weight, moved).data_ptr()) in words


def test_the_address_of_a_plain_tensor_is_told_in_hex() -> None:
    weight = nn.Parameter(torch.zeros(4))
    where = Addresses([Watched(weight, "a weight", "It moved.")])
    where.note(forward=False)
    before, weight.data = weight.data, torch.zeros(4)
    expected = f"was {hex(before.data_ptr())} at capture and is {hex(weight.data_ptr())} now"
    assert expected in said(where.broken(forward=False))


def test_a_mismatch_is_known_by_its_clause_and_subject() -> None:
    assert Mismatch("shape", "x", "1", "2", "Cause.").key == ("shape", "x")


@pytest.mark.parametrize(
    ("in_forward", "in_backward", "known", "held"),
    [(0, 0, False, False), (1, 0, False, True), (0, 1, False, True), (0, 0, True, True)],
)
def test_collectives_of_a_capture_are_counted_in_each_of_its_passes(
    monkeypatch: pytest.MonkeyPatch, in_forward: int, in_backward: int, known: bool, held: bool
) -> None:
    so_far = 5
    monkeypatch.setattr("megatron_cg.capture.unit_guard.collectives_so_far", lambda: so_far)
    layer = nn.Linear(1, 1)
    guard = UnitGuard(Unit("layer 0", layer, (layer,), collectives=known))
    so_far += 1  # before the capture, as FSDP's gathers are
    guard.pass_begins(forward=True)
    so_far += in_forward
    guard.pass_ended()
    so_far += 1  # between the passes
    guard.pass_begins(forward=False)
    so_far += in_backward
    guard.pass_ended()
    assert guard.collectives is held
