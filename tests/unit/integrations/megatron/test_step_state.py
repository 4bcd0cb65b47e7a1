"""What a step changes beside what ``tests/unit/moe/test_repeats.py`` trains with is restored."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

pytestmark = pytest.mark.usefixtures("one_rank")


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.current_max_attn_logits: torch.Tensor | None = None


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> torch.Generator:
    """The GPU's generator, which is not the host's."""
    generator = torch.Generator()
    monkeypatch.setattr(torch.cuda, "get_rng_state", lambda *_: generator.get_state())
    monkeypatch.setattr(torch.cuda, "set_rng_state", lambda state, *_: generator.set_state(state))
    return generator


@pytest.fixture
def tracker() -> Iterator[Any]:
    from megatron.core.tensor_parallel.random import get_cuda_rng_tracker

    tracker = get_cuda_rng_tracker()
    before = tracker.states_
    tracker.states_ = {"generator": torch.Generator()}
    yield tracker
    tracker.states_ = before


@pytest.fixture
def state(device: torch.Generator, tracker: Any) -> Any:
    from megatron_cg.integrations.megatron.step_state import StepState

    model = nn.ModuleList([Attention(), nn.Linear(2, 2)])
    made = StepState([model])
    made.model = model  # type: ignore[attr-defined]
    return made


def restored(state: Any, seen: Callable[[], Any], change: Callable[[], Any]) -> None:
    for _ in range(2):
        change()
        before = seen()
        state.save()
        change()
        assert seen() != before
        state.restore()
        assert seen() == before


def test_generators_stay_those_of_graphs(state: Any, tracker: Any, device: torch.Generator) -> None:
    """Of the device, and of Megatron's tracker."""
    of_graphs = tracker.states_["generator"]
    for generator in (of_graphs, device):

        def draw(generator: torch.Generator = generator) -> None:
            torch.rand((), generator=generator)

        def seen(generator: torch.Generator = generator) -> Any:
            return generator.get_state().tolist()

        restored(state, seen, draw)
    assert tracker.states_["generator"] is of_graphs


def test_the_largest_logits(state: Any) -> None:
    attention = state.model[0]
    found: list[Any] = [None, torch.ones(2), torch.zeros(2)]

    def change() -> None:
        found.append(found.pop(0))
        attention.current_max_attn_logits = found[0]

    restored(state, lambda: id(attention.current_max_attn_logits), change)


def test_moe_metrics_in_place_and_new_ones_go() -> None:
    from megatron.core.transformer.moe.moe_logging import (
        destroy_moe_metrics_tracker,
        get_moe_metrics_tracker,
    )

    from megatron_cg.integrations.megatron.step_state import StepState

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


def helpers() -> list[Any]:
    from megatron.core.transformer import multi_token_prediction
    from megatron.core.transformer.experimental_attention_variant import dsa

    return [multi_token_prediction.MTPLossLoggingHelper, dsa.DSAIndexerLossLoggingHelper]


@pytest.mark.parametrize("index", [0, 1])
def test_sums_of_losses_for_the_log(
    state: Any, index: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    helper = helpers()[index]
    monkeypatch.setattr(helper, "tracker", {})
    tracker = helper.tracker
    state.save()
    tracker["values"] = torch.ones(2)
    state.restore()
    assert tracker == {} and helper.tracker is tracker
    tracker.update(values=torch.ones(2), reduce_group=None)

    values = tracker["values"]

    def seen() -> Any:
        return tracker["values"].tolist()

    restored(state, seen, lambda: tracker["values"].add_(1))
    # A graph writes to this tensor, even if the step puts another one there.
    assert tracker["values"] is values
    state.save()
    held = values.tolist()
    tracker["values"] = values.add_(1) * 2
    state.restore()
    assert tracker["values"] is values and values.tolist() == held
    state.save()
    tracker["reduce_group"] = "a group"
    state.restore()
    assert tracker["reduce_group"] is None
