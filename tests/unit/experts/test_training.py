"""Whole dropless MoE layers in graphs train bit for bit as Megatron's own way does eagerly."""

from collections.abc import Mapping
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, field
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
from megatron.core.transformer.moe.moe_logging import destroy_moe_metrics_tracker
from megatron.core.transformer.moe.router_trace import RouterTracer

from megatron_cg.consensus.exchange import Agreement
from megatron_cg.errors import HookError
from megatron_cg.experts import grouped_gemm
from megatron_cg.experts.install import experts_of, use_device_counts
from megatron_cg.experts.row_bound import RowBound
from megatron_cg.fastpath.bucketing import GradientBucketing
from megatron_cg.replay.mismatch_policy import Counters
from megatron_cg.tape.tape_backend import TapeBackend
from megatron_cg.tape.training_plan import CpuModelConfig
from megatron_cg.upstream.patch import set_attribute
from tests.functional.loops import HAS_V2
from tests.unit.counted import calls_of, expect
from tests.unit.grouped_linear import grouped_experts, in_place_of_te
from tests.unit.ranks import on_ranks
from tests.unit.trainers import trainer_of

STEPS, WARMUP, LAYERS, MICROBATCHES = 3, 1, 2, 2
EXPERTS = ("attn", "moe")
ROUTER = ("attn", "moe_router", "moe_preprocess")
ALONE = ("attn", "moe_router")


@dataclass(frozen=True)
class Model:
    """A model, trained eagerly in Megatron's way and in each of ``ways``."""

    expert_parallel: int = 1
    options: dict[str, Any] = field(default_factory=dict)
    fsdp: dict[str, Any] = field(default_factory=dict)
    experts: int = 4
    grouped: bool = True
    ways: tuple[str, ...] = ("fast",)
    tensor_parallel: int = 1


SHARED = {"moe_shared_expert_intermediate_size": 32}
OVERLAPPED = SHARED | {"moe_shared_expert_overlap": True, "moe_shared_expert_gate": True}
DROP_AND_PAD = {"moe_expert_capacity_factor": 1.0, "moe_pad_expert_input_to_capacity": True}
V2 = {"megatron_fsdp_version": 2}
TWO_GROUPS = {"num_distributed_optimizer_instances": 2}
"""Weights are sharded over two ranks, twice (HSDP)."""
OUTER_SHARDS = {**TWO_GROUPS, "outer_dp_sharding_strategy": "optim"}
"""And the optimizer's state is sharded over all four (HFSDP)."""
DENSE: dict[str, Any] = {"experts": 0, "grouped": False, "ways": ("dense",)}
ONE_CHOICE = {"moe_router_topk": 1, "moe_router_pre_softmax": True}
AVERAGED = {"calculate_per_token_loss": False}
MODELS = {
    "one rank has all experts": Model(options=AVERAGED, ways=("fast", "stash")),
    "experts on two ranks": Model(
        2, AVERAGED, ways=("eager", "graphs", "fast", "router", "layer", "peer", "stash")
    ),
    "one expert a rank, probabilities on the input": Model(
        2, {**ONE_CHOICE, "moe_apply_probs_on_input": True}, experts=2
    ),
    "shared experts, overlapped": Model(2, OVERLAPPED, ways=("fast", "alone")),
    "overlapped, drop and pad": Model(2, {**OVERLAPPED, **DROP_AND_PAD}, grouped=False),
    **({"under v2": Model(2, fsdp=V2, ways=("graphs", "layer", "peer"))} if HAS_V2 else {}),
}
"""``tools.random_models`` draws other routers, losses and ways of sharding."""
LAYOUTS = {
    "EP 2 x FSDP 2": Model(2, ways=("fast", "router")),
    "EP 4": Model(4, experts=8, ways=("fast", "stash")),
    "TP 2 x FSDP 2": Model(tensor_parallel=2, **DENSE),
    "HSDP 2 x 2": Model(fsdp=TWO_GROUPS, **DENSE),
    "HFSDP 2 x 2": Model(fsdp=OUTER_SHARDS, ways=("fast", "router")),
}
MODELS_OF = {2: MODELS, 4: LAYOUTS}
"""By the number of ranks."""
CASES = [
    (ranks, name, way)
    for ranks, models in MODELS_OF.items()
    for name, model in models.items()
    for way in model.ways
]
SCOPES = {"eager": EXPERTS, "graphs": EXPERTS, "fast": EXPERTS, "layer": ()} | {"peer": EXPERTS}
SCOPES |= {"stash": EXPERTS, "router": ROUTER, "alone": ALONE, "dense": ("attn", "mlp")}
FAST = ("fast", "dense", "peer", "stash")


def saved_bytes(trainer: Any) -> int:
    """Of all that forward graphs leave for backward graphs."""
    graphs = (one for m in trainer.model.modules() for one in getattr(m, "cuda_graphs", ()))
    passes = [one.graph._recorded for one in graphs]
    return sum(
        one.forward.pool._own[key].nbytes()
        for one in passes
        for key in one.forward.made & one.backward.used
    )


def fit(model: Model, way: str) -> dict[str, Any]:
    ours, graphs = way != "megatron", way not in ("megatron", "eager")
    destroy_moe_metrics_tracker()
    lie, distance = list[Any](), grouped_gemm._distance
    bound = RowBound(None, 4.0) if way == "stash" else None

    def watched(weights: Any) -> int | None:
        lie.append(distance(weights))
        return lie[-1]  # type: ignore[no-any-return]

    with ExitStack() as undo:
        undo.callback(set_attribute(grouped_gemm, "_distance", watched))
        if ours:
            undo.enter_context(in_place_of_te())
            undo.callback(use_device_counts(bound, by_peers=way == "peer"))
        shape = CpuModelConfig(
            layers=LAYERS,
            experts=model.experts,
            grouped=grouped_experts if model.grouped else None,
            expert_parallel=model.expert_parallel,
            tensor_parallel=model.tensor_parallel,
            options=model.options,
            fsdp_options=model.fsdp,
            graph_modules=SCOPES.get(way, ("attn",)),
        )
        made_of = trainer_of(shape, graphs=graphs, microbatches=MICROBATCHES)
        trainer = undo.enter_context(made_of)
        steps, counters, parts = [], Counters(), list[str]()
        factors = undo.enter_context(calls_of(GradientBucketing, "_copy"))
        for step in range(STEPS):
            if graphs and step == WARMUP:
                session = trainer.capture(TapeBackend(), Agreement(), fast_path=way in FAST)
                counters = session.counters
                parts = session.fast_path.parts if session.fast_path is not None else []
            steps.append([number.hex() for number in trainer.step()])
        if bound is not None and model.expert_parallel > 1:
            # Each backward pass has freed what its forward pass has kept.
            assert bound.stash is not None and not bound.stash._top and bound.stash.rows > 0
            assert bound.exceeded() is None
        kept = saved_bytes(trainer) if graphs else 0
        experts = experts_of(trainer.model)
        device = experts is not None and experts.gemm == "torch"
        shown = {name: getattr(counters, name) for name in ("captured", "replayed", "eager")}
        copied = None in lie
        made: dict[str, Any] = {"peers": experts is not None and experts.peers is not None}
        scaled = len(factors) - factors.count(None)
        made |= {"device": device, "parts": list(parts), "kept": kept, "scaled": scaled}
        return {"copied": copied, "steps": steps, **made, **shown}


def train_all(models: Mapping[str, Model]) -> dict[str, Any]:
    # What Megatron's router compiles takes longer than the steps; test_verify.py compiles it.
    torch.compiler.set_stance("force_eager")
    return {
        name: {way: fit(model, way) for way in ("megatron", *model.ways)}
        for name, model in models.items()
    }


@cache
def results(ranks: int) -> list[dict[str, Any]]:
    return on_ranks(partial(train_all, MODELS_OF[ranks]), ranks)


def check(found: dict[str, Any], model: Model, way: str) -> None:
    one, megatron, graphs = found[way], found["megatron"], way != "eager"
    assert one["steps"] == megatron["steps"] and len(set(map(tuple, one["steps"]))) == STEPS
    on_device = model.grouped and way not in ("router", "alone")
    assert not one["copied"]  # Weights lie in a bucket.
    assert one["device"] == on_device and not megatron["device"]
    assert one["peers"] == (way == "peer")
    if way == "stash":
        # One rank has no rows beyond those that are used.
        part = one["kept"] / found["fast"]["kept"]
        assert part < 0.8 if model.expert_parallel > 1 else part == 1
    replayed = LAYERS * MICROBATCHES * (STEPS - WARMUP)
    assert one["captured"] == LAYERS * graphs and one["eager"] == 0
    assert one["replayed"] == replayed * graphs
    fast = way in FAST and model.fsdp is not V2
    assert ("gradients" in one["parts"]) == fast
    # The buckets of the experts and of the dense weights.
    assert one["scaled"] == (2 * replayed if fast and model.options is AVERAGED else 0)


@pytest.mark.parametrize(("ranks", "model", "way"), CASES)
def test_layers_train_as_megatrons(ranks: int, model: str, way: str) -> None:
    for found in results(ranks):
        check(found[model], MODELS_OF[ranks][model], way)


@pytest.mark.parametrize("scopes", [("attn",), ("attn", "moe_router")], ids=" ".join)
def test_a_captured_router_has_no_trace(
    scopes: tuple[str, ...], one_rank: None, tmp_path: Path
) -> None:
    shape = CpuModelConfig(layers=LAYERS, experts=4, graph_modules=scopes)
    tracer = RouterTracer(str(tmp_path), STEPS, 0, training_mode=True)
    with trainer_of(shape, graphs=True) as trainer:
        tracer.register_hooks(trainer.model)
        trainer.step()
        captured = "moe_router" in scopes
        with pytest.raises(HookError, match="RouterTracer") if captured else nullcontext():
            session = trainer.capture(TapeBackend())
            trainer.step()
            expect(session.counters, replayed=LAYERS)
        assert len(tracer.records) == (LAYERS if captured else 2 * LAYERS)
