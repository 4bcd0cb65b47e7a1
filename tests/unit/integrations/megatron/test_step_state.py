"""What a step changes beside what ``tests/unit/moe/test_repeats.py`` trains with is restored."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

from megatron_cg.integrations.megatron.step_state import StepState

pytestmark = pytest.mark.usefixtures("one_rank")


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.current_max_attn_logits: torch.Tensor | None = None


@pytest.fixture
def generators(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[torch.Generator]]:
    """The GPU's generator, and one of Megatron's tracker."""
    from megatron.core.tensor_parallel.random import get_cuda_rng_tracker

    device, tracked = torch.Generator(), torch.Generator()
    monkeypatch.setattr(torch.cuda, "get_rng_state", lambda *_: device.get_state())
    monkeypatch.setattr(torch.cuda, "set_rng_state", lambda state, *_: device.set_state(state))
    monkeypatch.setattr(get_cuda_rng_tracker(), "states_", {"generator": tracked})
    yield [device, tracked]
    assert get_cuda_rng_tracker().states_["generator"] is tracked


def assert_restored(state: StepState, seen: Callable[[], Any], change: Callable[[], Any]) -> None:
    for _ in range(2):
        change()
        before = seen()
        state.save()
        change()
        assert seen() != before
        state.restore()
        assert seen() == before


def test_generators_stay_those_of_graphs(generators: list[torch.Generator]) -> None:
    assert_restored(
        StepState([]),
        lambda: [generator.get_state().tolist() for generator in generators],
        lambda: [torch.rand((), generator=generator) for generator in generators],
    )


def test_the_largest_logits(generators: list[torch.Generator]) -> None:
    attention = Attention()
    logits: list[Any] = [None, torch.ones(2), torch.zeros(2)]

    def change() -> None:
        logits.append(logits.pop(0))
        attention.current_max_attn_logits = logits[0]

    state = StepState([nn.ModuleList([attention, nn.Linear(2, 2)])])
    assert_restored(state, lambda: id(attention.current_max_attn_logits), change)


def test_moe_metrics_in_place_and_new_ones_go(generators: list[torch.Generator]) -> None:
    from megatron.core.transformer.moe.moe_logging import (
        destroy_moe_metrics_tracker,
        get_moe_metrics_tracker,
    )

    destroy_moe_metrics_tracker()
    state = StepState([])
    state.save()
    state.restore()
    tracker = get_moe_metrics_tracker()
    tracker.record("one", torch.tensor(1.5), 1, 2)
    values = tracker.metrics["one"].values
    state.save()
    tracker.record("one", torch.tensor(1.5), 2, 2)
    tracker.record("two", torch.tensor(1.5), 2, 2)
    state.restore()
    assert set(tracker.metrics) == {"one"}
    assert tracker.metrics["one"].values is values and values.tolist() == [1.5, 0.0]


@pytest.mark.parametrize("index", [0, 1])
def test_sums_of_losses_for_the_log(
    generators: list[torch.Generator], index: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A graph writes to the tensor that was there, even if the step puts another one there."""
    from megatron.core.transformer import multi_token_prediction
    from megatron.core.transformer.experimental_attention_variant import dsa

    helpers = [multi_token_prediction.MTPLossLoggingHelper, dsa.DSAIndexerLossLoggingHelper]
    tracker: dict[str, Any] = {}
    monkeypatch.setattr(helpers[index], "tracker", tracker)
    state = StepState([])
    state.save()
    tracker["values"] = torch.ones(2)
    state.restore()
    assert tracker == {}
    values = torch.ones(2)
    tracker.update(values=values, reduce_group=None)
    state.save()
    tracker.update(values=values.add_(1) * 2, reduce_group="a group")
    state.restore()
    assert tracker["values"] is values and values.tolist() == [1, 1]
    assert tracker["reduce_group"] is None
