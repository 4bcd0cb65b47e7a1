"""Full recompute with graphs: as Megatron's eager recompute, to the last bit, in a layer's memory.

Every model here is built with ``--recompute-granularity full``. The eager runs are Megatron's own.
"""

from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from megatron.core import parallel_state

from megatron_cg.consensus.exchange import Agreement
from megatron_cg.experts.install import use_device_counts
from megatron_cg.recompute.layers import allow_full_recompute
from megatron_cg.replay.mismatch_policy import ReplayPolicy
from megatron_cg.tape.cpu_model import transformer_layers
from megatron_cg.tape.tape_backend import TapeBackend
from megatron_cg.tape.train import Trainer
from megatron_cg.tape.training_plan import CpuModelConfig, TrainingPlan
from megatron_cg.tools.align.compare import compare
from megatron_cg.tools.align.tape_run import train
from megatron_cg.tools.record.read_record import read_run
from tests.functional.loops import RECOMPUTE
from tests.unit.experts.test_repeats import SIGMOID
from tests.unit.grouped_linear import grouped_experts, in_place_of_te
from tests.unit.ranks import on_ranks
from tests.unit.trainers import evaluate, half_a_batch

STEPS, WARMUP, LAYERS, FIRST = 3, 1, 3, 2
"""``block`` recomputes the first two layers."""
BLOCK = {**RECOMPUTE, "recompute_method": "block", "recompute_num_layers": FIRST}
DENSE = TrainingPlan(
    CpuModelConfig(layers=LAYERS, graph_modules=(), options=RECOMPUTE),
    STEPS,
    WARMUP,
    microbatches=2,
)


def with_model(plan: TrainingPlan = DENSE, **changes: Any) -> TrainingPlan:
    return replace(plan, model=replace(plan.model, **changes))


def sharded(strategy: str, recompute: dict[str, Any]) -> TrainingPlan:
    options = {"data_parallel_sharding_strategy": strategy}
    return with_model(options=recompute, fsdp_options=options)


CHUNKS = {**RECOMPUTE, "recompute_num_layers": 2}
EXPERTS = with_model(experts=4, grouped=grouped_experts, expert_parallel=2)
PLANS = {
    "whole layers": DENSE,
    "attn mlp, fine-grained gathering": with_model(
        graph_modules=("attn", "mlp"),
        fsdp_options={"megatron_fsdp_enable_fine_grained_param_gather": True},
    ),
    "block, ZeRO-2": sharded("optim_grads", BLOCK),
    "chunks of two, ZeRO-1": sharded("optim", CHUNKS),
    "experts with a bias": with_model(EXPERTS, options={**RECOMPUTE, **SIGMOID}),
}


def eager(plan: TrainingPlan) -> TrainingPlan:
    """The same without graphs; Megatron's config refuses dropless experts in them."""
    return with_model(plan, graph_modules=("attn",)) if plan.model.grouped else plan


@pytest.fixture(scope="module")
def records(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("recompute")


@pytest.fixture(scope="module")
def lives(records: Path) -> list[dict[str, Any]]:
    return on_ranks(partial(train_all, records))


def train_all(root: Path) -> dict[str, Any]:
    for name, plan in PLANS.items():
        train(eager(plan), root / name / "eager")
        with ExitStack() as undo:
            if plan.model.grouped:
                undo.enter_context(in_place_of_te())
                undo.callback(use_device_counts())
            train(replace(plan, graphs=True), root / name / "graphs")
    return {way: live(way) for way in ("eager", "graphs")}


@pytest.mark.usefixtures("lives")
@pytest.mark.parametrize("name", PLANS)
def test_graphs_train_bit_for_bit_as_eager(records: Path, name: str) -> None:
    result = compare(read_run(records / name / "eager"), read_run(records / name / "graphs"))
    assert result.status == "identical", result.reason
    assert result.graphs["captured"] == 2 * LAYERS
    assert result.graphs["replayed"] == 2 * LAYERS * (STEPS - WARMUP) * DENSE.microbatches
    assert result.graphs["eager"] == 0
    assert len(result.values) == 2 * 2 * STEPS and result.shards > 40


SHORT, VERIFIED, DELETED, AGAIN, END = 2, 4, 5, 6, 8
"""Steps of a life: with a short batch; verified, after an evaluation; deleted and captured before.
"""
SOME = (0, 2)
"""The layers that are captured again."""


def live(way: str) -> list[dict[str, Any]]:
    graphs = way == "graphs"
    found = []
    with ExitStack() as undo:
        undo.callback(allow_full_recompute())
        trainer: Any = Trainer(replace(with_model(options=BLOCK), graphs=graphs, microbatches=1))
        undo.callback(parallel_state.destroy_model_parallel)
        layers: list[Any] = transformer_layers(trainer.model)
        session: Any = None
        kept: list[int] = []
        for step in range(END):
            if graphs and step in (WARMUP, AGAIN):
                only = SOME if step == AGAIN else None
                policy = ReplayPolicy("eager", verify_interval=4)
                session = trainer.capture(
                    TapeBackend(), Agreement(), only=only, policy=policy, fast_path=step == AGAIN
                )
                undo.callback(session.close)
                kept = [activations(layer) for layer in layers if layer.cuda_graphs]
            if graphs and step == DELETED:
                session.close()
                kept = []
            numbers = [evaluated(trainer)] if step == VERIFIED else []
            with half_a_batch(trainer, step == SHORT):
                numbers += [number.hex() for number in trainer.step()]
            counters = {} if session is None else session.counters.as_dict()
            found.append({"numbers": numbers, "kept": kept, "counters": counters})
    return found


def evaluated(trainer: Any) -> str:
    loss = evaluate(trainer)
    trainer.model.synchronize_param_gather()
    return loss.hex()


def activations(layer: Any) -> int:
    """How many storages that the forward tape made the backward tape reads."""
    recorded = layer.cuda_graphs[0].graph._recorded
    return len(recorded.forward.made & recorded.backward.used)


def test_a_life_has_megatrons_numbers(lives: list[dict[str, Any]]) -> None:
    for life in lives:
        numbers = {way: [step["numbers"] for step in steps] for way, steps in life.items()}
        assert numbers["graphs"] == numbers["eager"] and len(numbers["eager"]) == END


def test_graphs_keep_no_activation_of_recomputed_layers(lives: list[dict[str, Any]]) -> None:
    for life in lives:
        first, again = (life["graphs"][step]["kept"] for step in (WARMUP, AGAIN))
        assert first[:FIRST] == [0, 0] and first[FIRST] > 0
        assert again == [0, first[FIRST]]


def test_eager_passes_and_verifications_are_those_of_the_graphs(
    lives: list[dict[str, Any]],
) -> None:
    names = ("replayed", "eager", "mismatched", "verified", "outputs_only")
    for life in lives:
        counters = [[step["counters"].get(name) for name in names] for step in life["graphs"]]
        assert counters[SHORT] == [LAYERS, LAYERS, LAYERS, 0, 0]
        assert counters[VERIFIED] == [3 * LAYERS, 2 * LAYERS, LAYERS, LAYERS, 0]
        assert counters[END - 1] == [2 * len(SOME), 0, 0, 0, 0]
