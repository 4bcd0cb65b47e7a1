"""A backward pass whose graph was replayed again is an error, whatever the backend looks at."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import pytest
import torch

from megatron_cg.backends.driver.recorder import Recorded
from megatron_cg.backends.tape.tape_backend import TapeBackend
from megatron_cg.errors import ReplayMismatchError
from megatron_cg.tools.cpu.training_plan import CpuModelConfig
from tests.unit.counted import expect
from tests.unit.trainers import trainer_of


@pytest.fixture
def trainer(one_rank: None, monkeypatch: pytest.MonkeyPatch) -> Any:
    # Graphs of Transformer Engine (2.20.2) do not look whether they were replayed again.
    monkeypatch.setattr(Recorded, "replays", property(lambda _: 0, lambda _, __: None))
    with trainer_of(CpuModelConfig(layers=2), graphs=True) as made:
        made.step()
        made.capture(TapeBackend())
        yield made


def in_turn(trainer: Any) -> None:
    for _ in range(2):
        trainer._forward().sum().backward()


def discarded(trainer: Any) -> None:
    trainer._forward()
    trainer._forward().sum().backward()


def in_reverse(trainer: Any) -> None:
    first, second = trainer._forward(), trainer._forward()
    second.sum().backward()
    first.sum().backward()


def as_they_came(trainer: Any) -> None:
    first, second = trainer._forward(), trainer._forward()
    first.sum().backward()
    second.sum().backward()


def another_between(trainer: Any) -> None:
    first = trainer._forward()
    trainer._forward()
    first.sum().backward()


@pytest.mark.parametrize("passes", [in_turn, discarded])
def test_passes_in_turn_are_none_of_it(trainer: Any, passes: Callable[[Any], None]) -> None:
    passes(trainer)
    expect(trainer.session.counters, replayed=4, mismatched=0)


@pytest.mark.parametrize("passes", [in_reverse, as_they_came, another_between])
def test_a_graph_that_was_replayed_again_has_no_backward(
    trainer: Any, passes: Callable[[Any], None]
) -> None:
    with pytest.raises(ReplayMismatchError, match="after another forward replay of the same graph"):
        passes(trainer)


def test_a_layer_has_no_backward_before_a_later_one(trainer: Any) -> None:
    kept: list[torch.Tensor] = []
    with ExitStack() as hooks:
        for unit in trainer.session._units:
            hook = unit.layer.register_forward_hook(lambda _, __, out: kept.append(out[0]))
            hooks.enter_context(hook)
        trainer._forward()
    with pytest.raises(ReplayMismatchError, match=r"layer 0: its backward .* of layer 1"):
        kept[0].sum().backward()


def test_nor_has_one_whose_backward_has_run(trainer: Any) -> None:
    layer = trainer.session._units[-1].layer
    kept: list[torch.Tensor] = []
    with layer.register_forward_hook(lambda _layer, _args, outputs: kept.append(outputs[0])):
        trainer._forward()
    (hidden,) = kept
    hidden.sum().backward(retain_graph=True)
    with pytest.raises(ReplayMismatchError, match="or a second time"):
        hidden.sum().backward()
