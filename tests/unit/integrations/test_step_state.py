"""What a step changes beside what ``experts/test_repeats.py`` trains with is restored."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from megatron.core.tensor_parallel.random import get_cuda_rng_tracker
from megatron.core.transformer import multi_token_prediction as mtp
from megatron.core.transformer.experimental_attention_variant import dsa
from megatron.core.transformer.moe import moe_logging
from megatron.core.transformer.moe.moe_logging import MoEMetricsTracker
from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler as InPlace
from megatron.core.transformer.multi_token_prediction import MTPLossAutoScaler as Replaced
from torch import nn

from megatron_cg.errors import NotRestoredError
from megatron_cg.integrations import repeated_step
from megatron_cg.integrations.repeated_step import StepState

pytestmark = pytest.mark.usefixtures("one_rank")


class Counting(nn.Module):
    passes = 0

    def __init__(self) -> None:
        super().__init__()
        self.made: Any
        self.seen: Any = nn.Buffer(torch.zeros(2))
        self.wide: Any = nn.Buffer(torch.zeros(1).expand(3))
        self.register_buffer("fixed", torch.inference_mode()(torch.zeros)(2))

        self.logits: Any = torch.zeros(2)
        self.steps, self.counts = 0, SimpleNamespace(steps=[0])
        self.history: Any = [torch.zeros(1)]
        self.sums: dict[str, Any] = {"loss": torch.zeros(1), "of": {"layer": 0}, "none": None}
        # Transformer Engine's modules have such a dictionary, with objects of its own in it.
        tracker: Any = MoEMetricsTracker()
        tracker.scale = torch.zeros(1)
        self.fp8_meta = {"scaling_fwd": tracker}


def flat(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.tolist()
    if isinstance(value, dict):
        return [(key, flat(one)) for key, one in value.items()]
    return [flat(one) for one in value] if isinstance(value, list) else value


def rebind(module: Counting) -> None:
    module.seen = module.seen + 1
    module.logits = None
    module.steps += 1
    module.history = [1]
    module.sums = {}


def write(module: Counting) -> None:
    module.seen.add_(1)
    module.wide.set_(torch.ones(3))
    module.logits.add_(1)
    module.history[0].add_(1)
    module.sums["loss"].add_(1)


def mix(module: Counting) -> None:
    module.seen.add_(1)
    module.seen = module.seen + 1
    module.history.append(2)
    module.sums["of"]["layer"] += 1
    module.sums["new"] = 1
    module.sums["loss"] = module.sums.pop("loss")
    del module.sums["none"]
    module.made = 1


def state_of(module: Counting) -> list[Any]:
    found = [flat(vars(module)), flat(module._buffers), flat(module.counts.steps)]
    return [*found, flat(module.fp8_meta["scaling_fwd"].scale), Counting.passes]


@pytest.mark.parametrize("change", [rebind, write, mix])
def test_buffers_and_attributes_of_modules(
    change: Callable[[Counting], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """More than once: a step whose numbers differ is trained a third time."""
    monkeypatch.setattr(Counting, "passes", 0)
    module = Counting()

    def run() -> None:
        change(module)
        module.counts.steps = [module.counts.steps.pop() + 1]
        module.fp8_meta["scaling_fwd"].scale.add_(1)
        Counting.passes += 1

    state = StepState([nn.ModuleList([module, nn.Linear(2, 2)])])
    for _ in range(2):
        before, seen, logits = state_of(module), module.seen, module.logits
        for _ in range(2):
            run()
            assert all(a != b for a, b in zip(state_of(module), before, strict=True))
            state.restore()
            assert state_of(module) == before
            assert module.seen is seen and module.logits is logits  # graphs write there
        write(module)
        module.fp8_meta["scaling_fwd"].scale, module.counts = torch.ones(1), SimpleNamespace()
        module.counts.steps = [7]
        state.save()


def test_what_was_no_data_and_new_modules_are_saved_again() -> None:
    module: Any = nn.Sequential(Counting())
    module.made = flat
    state = StepState([module])
    module.append(Counting())
    module.made = torch.zeros(2)
    state.save()
    module[1].seen.add_(1)
    module.made.add_(1)
    state.restore()
    assert module.made.tolist() == module[1].seen.tolist() == [0, 0]
    module.made = made = SimpleNamespace()
    module.table = {"a": None}
    state.save()
    module.table["b"] = module.table.pop("a")
    state.save()
    module.table.clear()
    module.made = None
    state.restore()
    assert module.made is made and module.table == {"b": None}


def test_tensors_without_memory_to_copy_are_left_alone() -> None:
    module: Any = nn.Module()
    module.sparse, module.freed = torch.eye(2).to_sparse(), torch.ones(2)
    module.freed.untyped_storage().resize_(0)
    before = module.sparse
    state = StepState([module])
    module.sparse = None
    state.restore()
    assert module.sparse is before


def test_what_cannot_be_restored_does_not_stop_the_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    class Sealed(type):
        def __setattr__(cls, name: str, value: Any) -> None:
            raise TypeError("sealed")

    kind = Sealed("Kind", (), {"count": 0, "__module__": mtp.__name__})
    monkeypatch.setattr(mtp, "Kind", kind, raising=False)
    repeated_step._namespaces.cache_clear()
    module = Counting()
    state = StepState([module])
    type.__setattr__(kind, "count", 1)
    module.seen.add_(1)
    torch.rand(2)
    changed = torch.get_rng_state()
    with pytest.raises(NotRestoredError, match="multi_token_prediction:Kind"):
        state.restore()
    assert module.seen.tolist() == [0, 0] and not torch.equal(torch.get_rng_state(), changed)


def test_generators_stay_those_of_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    tracker, one = get_cuda_rng_tracker(), torch.Generator()
    monkeypatch.setattr(tracker, "states_", {"generator": one, "tensor": one.get_state()})
    before = one.get_state().tolist(), torch.get_rng_state().tolist()
    state = StepState([])
    torch.rand(2, generator=one)
    torch.rand(2)
    tracker.states_ = {"generator": torch.Generator()}
    state.restore()
    assert tracker.states_["generator"] is one and "tensor" in tracker.states_
    assert (one.get_state().tolist(), torch.get_rng_state().tolist()) == before


def test_moe_metrics_in_place_and_new_ones_go() -> None:
    moe_logging.destroy_moe_metrics_tracker()
    state = StepState([])
    moe_logging.get_moe_metrics_tracker()
    state.restore()
    assert moe_logging._MOE_METRICS_TRACKER is None
    tracker = moe_logging.get_moe_metrics_tracker()
    tracker.record("one", torch.tensor(1.5), 1, 2)
    values = tracker.metrics["one"].values
    state = StepState([])
    tracker.record("one", torch.tensor(1.5), 2, 2)
    tracker.record("two", torch.tensor(1.5), 2, 2)
    state.restore()
    assert set(tracker.metrics) == {"one"}
    assert tracker.metrics["one"].values is values and values.tolist() == [1.5, 0.0]


@pytest.mark.parametrize(
    "name", ["MTPLossLoggingHelper", "DSAIndexerLossLoggingHelper", "NewHelper"]
)
def test_sums_of_losses_for_the_log(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also those that a release adds; a graph writes to the tensor that was there."""
    if name == "NewHelper":
        new = type(name, (), {"tracker": {}, "scale": None, "__module__": mtp.__name__})
        monkeypatch.setattr(mtp, name, new, raising=False)
    repeated_step._namespaces.cache_clear()
    helper: Any = getattr(mtp, name, None) or getattr(dsa, name)
    tracker: dict[str, Any] = {}
    monkeypatch.setattr(helper, "tracker", tracker)
    state = StepState([])
    tracker["values"] = torch.ones(2)
    state.restore()
    assert tracker == {}
    values = torch.ones(2)
    tracker.update(values=values, reduce_group=None)
    state = StepState([])
    tracker.update(values=values.add_(1) * 2, reduce_group="a group")
    state.restore()
    assert helper.tracker is tracker and tracker["reduce_group"] is None
    assert tracker["values"] is values and values.tolist() == [1, 1]


def test_scales_of_losses() -> None:
    """One that the schedule copies into, and one that it puts another tensor for."""
    InPlace.main_loss_backward_scale, replaced = None, Replaced.main_loss_backward_scale
    for _ in range(2):
        state = StepState([])
        before = flat(InPlace.main_loss_backward_scale)
        InPlace.set_loss_scale(torch.ones(1) / 2)
        Replaced.set_loss_scale(torch.ones(1) / 2)
        state.restore()
        assert flat(InPlace.main_loss_backward_scale) == before
        assert Replaced.main_loss_backward_scale is replaced
        InPlace.main_loss_backward_scale = torch.ones(1)
    InPlace.main_loss_backward_scale = None
