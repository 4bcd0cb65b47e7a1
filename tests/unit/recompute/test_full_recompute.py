"""Full recompute with graphs: as Megatron's eager recompute, to the last bit, in a layer's memory.

What it changes in Megatron and in layers is put back. Every model here is built with
``--recompute-granularity full``. The eager runs are Megatron's own.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from megatron.core import parallel_state, tensor_parallel
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron_cg.capture.observer import recomputed_draws_refused
from megatron_cg.consensus.exchange import Agreement
from megatron_cg.errors import CaptureError, ConfigurationError, UpstreamChangedError
from megatron_cg.experts.install import use_device_counts
from megatron_cg.integrations.megatron.megatron_unit import MegatronUnit, ObservedInputs
from megatron_cg.recompute import layers as full_recompute
from megatron_cg.recompute.layers import allow_full_recompute, recompute_in_layers
from megatron_cg.replay.mismatch_policy import ReplayPolicy
from megatron_cg.tape.tape_backend import TapeBackend
from megatron_cg.tape.train import Trainer, build, transformer_layers
from megatron_cg.tape.training_plan import CpuModelConfig, TrainingPlan
from megatron_cg.tools.align.tape_run import train
from megatron_cg.tools.record.compare import compare, read_run
from megatron_cg.upstream.megatron import capturing_flag, is_capturing
from tests.functional.loops import GROUPS, RECOMPUTE, Run
from tests.functional.own_loop import make_config, make_model
from tests.unit.experts.test_repeats import SIGMOID
from tests.unit.grouped_linear import grouped_experts, in_place_of_te
from tests.unit.ranks import on_ranks
from tests.unit.trainers import evaluate, half_a_batch

STEPS, WARMUP, LAYERS, FIRST = 3, 1, 3, 2
"""``block`` recomputes the first two layers."""
BLOCK = {**RECOMPUTE, "recompute_method": "block", "recompute_num_layers": FIRST}
MODEL = CpuModelConfig(layers=LAYERS, graph_modules=(), options=RECOMPUTE)
DENSE = TrainingPlan(MODEL, STEPS, WARMUP, microbatches=2)


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


SHORT, VERIFIED, DELETED, AGAIN, DRAWS, END = 2, 4, 5, 6, 8, 9
"""Steps of a life: with a short batch; verified, after an evaluation; deleted and captured before;
with dropout from then on."""
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
            numbers = []
            for layer in layers if step == DRAWS else ():
                layer.hidden_dropout = 0.1
            if step == VERIFIED:
                numbers.append(evaluate(trainer).hex())
                trainer.model.synchronize_param_gather()
            with half_a_batch(trainer, step == SHORT):
                numbers += [number.hex() for number in trainer.step()]
            counters = {} if session is None else session.counters.as_dict()
            found.append({"numbers": numbers, "kept": kept, "counters": counters})
    return found


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


def test_eager_and_verified_passes_are_as_graphs(lives: list[dict[str, Any]]) -> None:
    names = ("replayed", "eager", "mismatched", "verified", "outputs_only")
    for life in lives:
        counters = [[step["counters"].get(name) for name in names] for step in life["graphs"]]
        assert counters[SHORT] == [LAYERS, LAYERS, LAYERS, 0, 0]
        assert counters[VERIFIED] == [3 * LAYERS, 2 * LAYERS, LAYERS, LAYERS, 0]
        assert counters[DRAWS - 1] == [2 * len(SOME), 0, 0, 0, 0]
        assert counters[DRAWS] == [2 * len(SOME), len(SOME), len(SOME), 0, 0]


def config(**changes: Any) -> TransformerConfig:
    given: dict[str, Any] = {"cuda_graph_impl": "transformer_engine", **RECOMPUTE, **changes}
    return TransformerConfig(num_layers=2, hidden_size=8, num_attention_heads=2, **given)


@pytest.fixture
def allowed() -> Iterator[None]:
    undo = allow_full_recompute()
    yield
    undo()


REFUSED: dict[str, dict[str, Any]] = {
    "only supported with full iteration": {"distribute_saved_activations": True},
    "does not work when activation recomputation": {
        "cpu_offloading": True,
        "cpu_offloading_num_layers": 1,
    },
    'must be "block" or "uniform"': {"recompute_method": None},
}


@pytest.mark.parametrize("said", REFUSED)
def test_megatrons_other_rules_hold(allowed: None, said: str) -> None:
    with pytest.raises((AssertionError, ValueError), match=said):
        config(**REFUSED[said])


@pytest.mark.parametrize("at", range(len(full_recompute.RELIES_ON)))
def test_checkpoints_in_other_places_are_an_error(monkeypatch: pytest.MonkeyPatch, at: int) -> None:
    symbols = list(full_recompute.RELIES_ON)
    symbols[at] = replace(symbols[at], fingerprints=("0",))
    monkeypatch.setattr(full_recompute, "RELIES_ON", tuple(symbols))
    with pytest.raises(UpstreamChangedError, match=r"checkpointed_forward.*another body"):
        allow_full_recompute()
    with pytest.raises(AssertionError, match="only supported with full iteration"):
        config()


@pytest.fixture
def block(one_rank: None, allowed: None) -> Any:
    """A decoder whose first layer alone is recomputed."""
    options = {**BLOCK, "recompute_num_layers": 1}
    model = build(CpuModelConfig(layers=2, graph_modules=(), options=options))
    model.module._replace_param_with_raw_if_needed()
    return model.module.module.module.decoder


def test_everything_is_put_back(block: Any) -> None:
    before = [dict(vars(module)) for module in (block, *block.layers)]
    undo = recompute_in_layers(block, ObservedInputs([]))
    assert block.config.recompute_granularity is None
    assert block.config.recompute_method == "block" and block.config.num_layers == 2
    assert block.layers[0].config.recompute_granularity == "full"
    assert "forward" in vars(block.layers[0]) and "forward" not in vars(block.layers[1])
    undo()
    undo()
    assert [dict(vars(module)) for module in (block, *block.layers)] == before


@pytest.mark.parametrize(("recompute", "recomputed"), [(RECOMPUTE, True), (BLOCK, False)], ids=str)
def test_a_prediction_layer_is_recomputed_by_uniform_alone(
    one_rank: None, allowed: None, recompute: dict[str, Any], recomputed: bool
) -> None:
    parallel_state.initialize_model_parallel()
    tensor_parallel.model_parallel_cuda_manual_seed(1)
    group = replace(GROUPS["mtp"], config={**GROUPS["mtp"].config, **recompute})
    model: Any = make_model(group, make_config(group, Run("fp32")))
    (prediction,) = model.mtp.layers
    # In the first pass of its checkpoint, no input of the layer needs a gradient.
    inputs = ObservedInputs([prediction.mtp_model_layer])
    inputs._called(prediction.mtp_model_layer, (), {"hidden_states": torch.zeros(1)})
    undo = recompute_in_layers(model, inputs)
    assert prediction.config.recompute_granularity is None
    assert ("forward" in vars(prediction.mtp_model_layer)) is recomputed
    undo()
    assert prediction.config.recompute_granularity == "full"
    assert "forward" not in vars(prediction.mtp_model_layer)


@pytest.mark.refuses("full-recompute-lost-gradients")
def test_a_first_input_without_gradients_is_refused(one_rank: None, allowed: None) -> None:
    """Inside a chunk of two, no input needs a gradient in the first pass."""
    model = build(CpuModelConfig(layers=2, graph_modules=(), options=CHUNKS))
    first, second = transformer_layers(model)
    inputs = ObservedInputs([first, second])
    inputs._called(second, (), {"hidden_states": torch.zeros(1)})
    recompute_in_layers(model, inputs)()
    inputs._called(first, (), {"hidden_states": torch.zeros(1)})
    with pytest.raises(ConfigurationError, match="train the embedding"):
        recompute_in_layers(model, inputs)
    inputs._called(first, (), {"hidden_states": torch.zeros(1, requires_grad=True)})
    undo = recompute_in_layers(model, inputs)
    with pytest.raises(ConfigurationError, match="train the embedding"):
        model.module.module.module.decoder(hidden_states().detach(), None)
    undo()


@pytest.mark.refuses("full-recompute-frozen-weights")
def test_frozen_weights_that_torch_multiplies_are_refused(block: Any) -> None:
    block.layers[0].mlp.linear_fc1.requires_grad_(False)
    with pytest.raises(ConfigurationError, match="--transformer-impl transformer_engine"):
        recompute_in_layers(block, ObservedInputs([]))


@contextmanager
def passes_of(block: Any, draws: Any = None) -> Iterator[list[tuple[bool, bool]]]:
    """Of each pass of the first layer: whether a capture runs, and whether gradients are on."""
    ran: list[tuple[bool, bool]] = []
    layer = block.layers[0]
    own = layer._forward_mlp

    def forward(*args: Any, **kwargs: Any) -> Any:
        ran.append((is_capturing(), torch.is_grad_enabled()))
        with nullcontext() if draws is None else draws():
            torch.empty(int(draws is not None)).uniform_()
        return own(*args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(layer, "_forward_mlp", forward)
        undo = recompute_in_layers(block, ObservedInputs([]))
        yield ran
        undo()


def hidden_states() -> torch.Tensor:
    return torch.ones(4, 1, 32, dtype=torch.bfloat16, requires_grad=True)


def test_a_region_is_recomputed_as_it_ran(block: Any) -> None:
    hidden, given = hidden_states(), {"attention_mask": None}
    with passes_of(block) as ran:
        (out,) = MegatronUnit("layer 0", block.layers[0]).run((hidden,), given)
        with capturing_flag():
            out.sum().backward()
    assert ran == [(False, False), (False, True)]
    assert hidden.grad is not None


@pytest.mark.parametrize("tracked", [False, True])
def test_draws_of_a_recomputed_layer_are_refused(block: Any, tracked: bool) -> None:
    tensor_parallel.model_parallel_cuda_manual_seed(1)
    fork = tensor_parallel.get_cuda_rng_tracker().fork if tracked else nullcontext
    unit = MegatronUnit("layer 0", block.layers[0])
    with passes_of(block, fork) as ran, capturing_flag():
        out, *_ = block.layers[0]._te_cuda_graph_capture(hidden_states(), attention_mask=None)
        refused = pytest.raises(CaptureError, match=r"draws random numbers .*full recompute")
        with refused, recomputed_draws_refused(unit, "cpu"):
            out.sum().backward()
    assert ran == [(True, False), (True, True)]


@pytest.mark.filterwarnings("error:None of the inputs")
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("gradients", [True, False])
def test_only_training_is_recomputed(block: Any, training: bool, gradients: bool) -> None:
    block.layers[0].train(training)
    with passes_of(block) as ran, torch.set_grad_enabled(gradients):
        # A hook of the layer has detached its input.
        out, _ = block.layers[0].forward(hidden_states().detach(), attention_mask=None)
    assert out.requires_grad is gradients
    assert [grad for _, grad in ran] == [gradients and not training]
