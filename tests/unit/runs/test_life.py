"""What happens to a run between its steps: with graphs it trains as it does eagerly, bit for bit.

Two processes train the real model on the tape, each life once eagerly and once with graphs, which
are captured after the second step. Buffers are moved under graphs, on one rank or on both.
"""

import gc
import math
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

import megatron_cg
from megatron_cg.capture.session import close_all_sessions
from megatron_cg.consensus.exchange import Agreement
from megatron_cg.errors import ReplayMismatchError
from megatron_cg.experts.install import use_device_counts
from megatron_cg.replay.mismatch_policy import ReplayPolicy
from megatron_cg.tape.launch import run_processes
from megatron_cg.tape.tape_backend import TapeBackend
from megatron_cg.tape.training_plan import CpuModelConfig
from megatron_cg.tools.record.compare import Comparison, Run, compare, read_run
from megatron_cg.tools.record.record import Recorder, parameter_digests
from megatron_cg.upstream.patch import undone_after
from tests.functional.loops import HAS_V2, WITHOUT_V2
from tests.functional.tampering.replay import (
    buffers_moved,
    buffers_moved_in_backward,
    parameter_replaced,
)
from tests.unit.counted import expect
from tests.unit.experts.test_training import OVERLAPPED
from tests.unit.grouped_linear import grouped_experts, in_place_of_te
from tests.unit.ranks import on_ranks
from tests.unit.trainers import evaluate, half_a_batch, new_trainer, trainer_of

pytestmark = pytest.mark.fault
STEPS, WARMUP, LAYERS, RANKS = 8, 2, 2, 2


@dataclass
class Training:
    trainer: Any
    graphs: bool
    directory: Path
    extra: dict[str, torch.Tensor] = field(default_factory=dict)
    """Other losses of the step that is being trained."""
    counted: dict[str, int] = field(default_factory=dict)
    """Counters of sessions that were closed."""
    saved: dict[str, str] = field(default_factory=dict)
    """Digests of the weights as they were saved."""
    after: ExitStack = field(default_factory=ExitStack)
    """Undoes after a step what holds for it alone."""

    def capture(self) -> None:
        if self.graphs:
            policy = ReplayPolicy("eager", verify_interval=2)
            self.trainer.capture(TapeBackend(), Agreement(), policy=policy)

    def close(self) -> None:
        if self.trainer.session is not None:
            self.trainer.session.close()
            for name, count in self.trainer.session.counters.as_dict().items():
                self.counted[name] = self.counted.get(name, 0) + count
            self.trainer.session = None


Event = Callable[[Training], object]
"""Happens before a step."""


def evaluated(training: Training) -> None:
    training.extra["evaluation"] = torch.tensor(evaluate(training.trainer), dtype=torch.float64)


def evaluated_on_more(training: Training) -> None:
    """With so many sequences that Megatron makes the buffers larger that graphs read too."""
    batches = training.trainer._batches
    more = [torch.cat(tensors) for tensors in zip(*[next(batches) for _ in range(3)], strict=True)]
    with patch.object(training.trainer, "_batches", iter([more])):
        evaluated(training)


def microbatches(count: int) -> Event:
    def event(training: Training) -> None:
        training.trainer.plan = replace(training.trainer.plan, microbatches=count)

    return event


def learning_rate(training: Training) -> None:
    for group in training.trainer._optimizer.param_groups:
        group["lr"] = 5e-3


def gradients_times(scale: float) -> Event:
    """The loss stays what it is, its gradient is scaled; nothing is updated if that overflows."""

    def event(training: Training) -> None:
        trainer, forward = training.trainer, training.trainer._forward

        def scaled() -> torch.Tensor:
            losses: torch.Tensor = forward()
            losses.register_hook(lambda gradient: gradient * scale)
            return losses

        training.after.enter_context(patch.object(trainer, "_forward", scaled))
        if not math.isfinite(scale):
            optimizer = trainer._optimizer
            training.after.enter_context(patch.object(optimizer, "step", lambda **_: None))

    return event


def fails_to_capture(training: Training) -> None:
    """After the first stage of a shared expert."""
    permute = "megatron.core.transformer.moe.token_dispatcher.permute"
    failing = patch(permute, side_effect=RuntimeError("no permutation"))
    if training.graphs:
        with failing, pytest.raises(RuntimeError, match="no permutation"):
            training.capture()


def short(training: Training) -> None:
    training.after.enter_context(half_a_batch(training.trainer))


def saved(training: Training) -> None:
    if training.trainer.plan.model.under_v2:
        save_v2(training.trainer, training.directory / "saved")
    else:
        save(state_of(training.trainer), checkpoint_id=training.directory / "saved")
    training.saved = parameter_digests(training.trainer.model)


def loaded(training: Training) -> None:
    if training.trainer.plan.model.under_v2:
        save_v2(training.trainer, training.directory / "saved", load=True)
    else:
        state = state_of(training.trainer)
        load(state, checkpoint_id=training.directory / "saved")
        training.trainer.model.load_state_dict(state["model"], strict=False)
        training.trainer._optimizer.load_state_dict(state["optimizer"])
    if parameter_digests(training.trainer.model) != training.saved:
        raise ValueError("what was loaded is not what was saved")


def resumed(training: Training) -> None:
    """Go on in a model that was never trained like this one, as after a restart."""
    training.close()
    parallel_state.destroy_model_parallel()
    plan = training.trainer.plan
    training.trainer = type(training.trainer)(replace(plan, model=replace(plan.model, seed=5)))
    training.trainer.step()
    loaded(training)
    training.capture()


def state_of(trainer: Any) -> dict[str, Any]:
    """Model and optimizer as ``fsdp_dtensor`` checkpoints hold them, ready for torch to save."""
    from megatron.core.distributed.fsdp.src.megatron_fsdp.uneven_dtensor import (
        preprocess_state_dict_for_uneven_dtensor,
    )

    model = {k: v for k, v in trainer.model.state_dict().items() if v is not None}
    return {
        "model": preprocess_state_dict_for_uneven_dtensor(model),
        "optimizer": trainer._optimizer.state_dict(),
    }


def save_v2(trainer: Any, directory: Path, *, load: bool = False) -> None:
    """Save or load by v2's own functions; Megatron's optimizer of v2 has no checkpoints."""
    from megatron.core.distributed.fsdp.src.megatron_fsdp import experimental
    from megatron.core.utils import unwrap_model

    act = experimental.load_checkpoint if load else experimental.save_checkpoint
    act(unwrap_model(trainer.model), trainer._optimizer, directory)


NAN = gradients_times(math.inf)
ALL: dict[int, tuple[Event, ...]] = {
    2: (learning_rate, evaluated),
    3: (NAN,),
    4: (evaluated_on_more, microbatches(2)),
    5: (saved, NAN),
    6: (Training.close, Training.capture, evaluated, gradients_times(2.0)),
    7: (loaded, microbatches(1), evaluated),
}
SHORT: dict[int, tuple[Event, ...]] = {
    2: (fails_to_capture,),
    5: (short,),
    6: (evaluated, Training.close),
    7: (Training.capture,),
}
V2 = "all at once under v2, dropless experts"
EXPERTS = "dropless experts and a shared expert, overlapped"
LIVES: dict[str, dict[int, tuple[Event, ...]]] = {
    "resumed": {4: (saved,), 6: (resumed,)},
    "all at once": ALL,
    **({V2: ALL} if HAS_V2 else {}),
    EXPERTS: SHORT,
}
REPLAYED = {"resumed": 6, "all at once": 9, V2: 9, EXPERTS: 4}
"""Replays of each layer in each process."""


def train_all(root: Path) -> None:
    for name in LIVES:
        for graphs in (False, True):
            live(name, root / name / ("graphs" if graphs else "eager"), graphs=graphs)


def live(name: str, directory: Path, *, graphs: bool) -> None:
    model = CpuModelConfig(layers=LAYERS, dropout=0.1, graph_modules=("attn", "mlp"))
    if name == "all at once":
        model = replace(model, experts=4, graph_modules=("attn", "moe_router"))
    if name == V2:
        options = {"megatron_fsdp_version": 2}
        model = replace(model, experts=4, graph_modules=(), fsdp_options=options)
        model = replace(model, grouped=grouped_experts)
    if name == EXPERTS:
        model = replace(model, experts=4, grouped=grouped_experts, expert_parallel=2)
        scopes = ("attn", "moe") if graphs else ("attn",)
        model = replace(model, dropout=0.0, options=OVERLAPPED, graph_modules=scopes)
    recorder = Recorder(directory)
    on_device = name == V2 or (name == EXPERTS and graphs)
    with in_place_of_te(), undone_after(use_device_counts() if on_device else lambda: None):
        train_life(name, Training(new_trainer(model), graphs, directory), recorder)
    parallel_state.destroy_model_parallel()


def train_life(name: str, training: Training, recorder: Recorder) -> None:
    for number in range(1, STEPS + 1):
        if number == WARMUP + 1:
            training.capture()
        for event in LIVES[name].get(number, ()):
            event(training)
        with training.after:
            start = time.perf_counter()
            loss, norm = training.trainer.step()
        losses = {"lm loss": torch.tensor(loss, dtype=torch.float64)} | training.extra
        skipped = not math.isfinite(norm)
        recorder.add_step(losses, None if skipped else norm, skipped, start)
        training.extra = {}
    training.close()
    recorder.note("graphs", training.counted)
    recorder.finish([training.trainer.model])


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Run, Run]]:
    root = tmp_path_factory.mktemp("life")
    run_processes(partial(train_all, root), RANKS)
    return {n: (read_run(root / n / "eager"), read_run(root / n / "graphs")) for n in LIVES}


@pytest.mark.parametrize("name", REPLAYED)
def test_a_life_with_graphs_is_the_eager_one(name: str, runs: dict[str, tuple[Run, Run]]) -> None:
    if name not in LIVES:
        pytest.skip(WITHOUT_V2)
    result: Comparison = compare(*runs[name])
    assert result.status == "identical", result.reason
    assert len({value.step for value in result.values}) == STEPS and result.shards > 0
    assert result.graphs["replayed"] == RANKS * LAYERS * REPLAYED[name]
    assert result.graphs["verified"] > 0 == result.graphs["outputs_only"]
    if name == EXPERTS:  # Both ranks leave their graphs together.
        assert result.graphs["mismatched"] == RANKS * LAYERS
        assert result.graphs["eager"] == 2 * RANKS * LAYERS
    skipped = [step["skipped"] for step in runs["all at once"][0][0]["steps"]]
    assert [number for number, it_was in enumerate(skipped, 1) if it_was] == [3, 5]


def test_two_models_in_one_process_do_not_disturb_each_other(one_rank: None) -> None:
    model = CpuModelConfig(layers=2, graph_modules=("attn", "mlp"))
    other = CpuModelConfig(
        layers=1, hidden_size=64, seed=5, experts=4, graph_modules=("attn", "moe_router")
    )

    def alternating(*, graphs: bool) -> list[Any]:
        trainers = []
        for shape in (model, other):
            parallel_state.destroy_model_parallel()
            trainers.append(new_trainer(shape))
        numbers = [trainer.step() for trainer in trainers]
        first, second = (trainer.capture(TapeBackend()) if graphs else None for trainer in trainers)
        for step in range(4):
            if step == 2 and first is not None:
                first.close()
            numbers += [trainer.step() for trainer in trainers]
        if first is not None and second is not None:
            expect(first.counters, captured=2, replayed=4)
            expect(second.counters, captured=1, replayed=4)
            second.close()
        return [*numbers, *(parameter_digests(trainer.model) for trainer in trainers)]

    try:
        assert alternating(graphs=False) == alternating(graphs=True)
    finally:
        close_all_sessions()


def in_use() -> dict[str, int]:
    """What is alive: objects of this package by class, tensors, and their bytes."""
    gc.collect()
    counts: dict[str, int] = {}
    storages: dict[int, int] = {}
    for found in gc.get_objects():
        kind = type(found)
        if str(kind.__module__).startswith("megatron_cg"):
            counts[kind.__qualname__] = counts.get(kind.__qualname__, 0) + 1
        elif issubclass(kind, torch.Tensor):
            counts["tensors"] = counts.get("tensors", 0) + 1
            local = getattr(found, "_local_tensor", found)
            if local is not None:
                storage = local.untyped_storage()
                storages[storage._cdata] = storage.nbytes()
    return counts | {"bytes": sum(storages.values())}


def in_use_after(cycle: Callable[[], None]) -> tuple[dict[str, int], dict[str, int]]:
    used = []
    for cycles in (5, 15):
        for _ in range(cycles):
            cycle()
        used.append(in_use())
    return used[0], used[1]


def test_enabling_twenty_times_leaves_nothing_behind() -> None:
    def cycle() -> None:
        megatron_cg.enable()
        megatron_cg.disable()

    early, late = in_use_after(cycle)
    assert early == late


def test_capturing_twenty_times_leaves_nothing_behind(one_rank: None) -> None:
    trainer = new_trainer(CpuModelConfig(layers=1, graph_modules=("attn", "mlp")))
    trainer.step()

    def cycle() -> None:
        session = trainer.capture(TapeBackend())
        trainer.step()
        expect(session.counters, captured=1, replayed=1)
        session.close()
        trainer.session = None

    early, late = in_use_after(cycle)
    assert early["tensors"] > 0 and early["bytes"] > 0
    assert early == late


def test_a_failed_gather_is_what_is_told(one_rank: None, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = new_trainer(CpuModelConfig(layers=2), graphs=True)
    losses = [trainer.step()[0]]
    pipeline = trainer.model.module.all_gather_pipeline
    own, failed = pipeline.get_fsdp_buffer, list[int]()

    def no_buffer(bucket: int, bwd: bool = False) -> Any:
        """Fails once, as a gather asks that has marked its bucket by then."""
        status = pipeline.bucket_status[pipeline.get_bucket_key(bucket, bwd)]
        if status.name == "COMMUNICATING" and not failed:
            failed.append(bucket)
            raise MemoryError(f"no buffer for bucket {bucket}")
        return own(bucket, bwd)

    with monkeypatch.context() as patch, pytest.raises(MemoryError, match="no buffer for bucket"):
        patch.setattr(pipeline, "get_fsdp_buffer", no_buffer)
        trainer.capture(TapeBackend())
    losses += [trainer.step()[0] for _ in range(2)]
    assert len(set(losses)) == 3


BEFORE, AFTER, DEPTH = 2, 2, 3
BOTH = (0, 1)
Change = Callable[[Any], None]


def play() -> dict[str, Any]:
    model = CpuModelConfig(layers=DEPTH, graph_modules=("attn", "mlp"), dropout=0.1)

    def run(policy: str | None, change: Change | None = None, moved: tuple[int, ...] = BOTH) -> Any:
        numbers, error = [], ""
        with trainer_of(model, graphs=True) as trainer:
            try:
                numbers += [trainer.step() for _ in range(BEFORE)]
                if policy is not None:
                    given: Any = policy
                    trainer.capture(TapeBackend(), Agreement(), policy=ReplayPolicy(given))
                if change is not None and dist.get_rank() in moved:
                    change(trainer.model)
                numbers += [trainer.step() for _ in range(AFTER)]
            except ReplayMismatchError as found:
                error = str(found)
            report = trainer.session.counters.as_dict() if trainer.session is not None else {}
        return {"numbers": numbers, "error": error, "graphs": report}

    return {
        "nothing": run(None),
        # On one rank alone an eager run would hang too: the gradient that Megatron-FSDP waits for
        # never comes there, so ranks reduce in another order.
        "other parameter eagerly": run(None, parameter_replaced),
        "untouched": run("eager"),
        "eager": run("eager", buffers_moved, moved=(1,)),
        "other parameter": run("eager", parameter_replaced),
        "error": run("error", buffers_moved),
        "backward": run("eager", buffers_moved_in_backward),
    }


@pytest.fixture(scope="module")
def moved() -> list[dict[str, Any]]:
    return on_ranks(play)


def test_training_has_the_numbers_of_eager_runs(moved: list[dict[str, Any]]) -> None:
    """A rank whose buffers moved trains eagerly; a replaced parameter is used at once."""
    for number, rank in enumerate(moved):
        nothing, other = rank["nothing"]["numbers"], rank["other parameter eagerly"]["numbers"]
        for name, numbers, mismatched in (
            ("untouched", nothing, 0),
            ("eager", nothing, number * DEPTH * AFTER),
            ("other parameter", other, AFTER),
        ):
            counts = rank[name]["graphs"]
            assert rank[name]["numbers"] == numbers and counts["mismatched"] == mismatched, name
            assert counts["replayed"] == DEPTH * AFTER - mismatched, name
        assert other != nothing


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("error", ("layer 0", "The FSDP buffer of unit", "(--cg-on-mismatch error)")),
        ("backward", ("in the backward pass", "cannot run eagerly")),
    ],
)
def test_a_run_ends_with_unit_and_cause(
    moved: list[dict[str, Any]], name: str, words: tuple[str, ...]
) -> None:
    for rank in moved:
        assert all(word in rank[name]["error"] for word in words), rank[name]["error"]
        assert len(rank[name]["numbers"]) == BEFORE
