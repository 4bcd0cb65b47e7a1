"""Packed and padded sequences, and layers with several residual streams (mHC).

Graphs behind attention are not told of packs: they replay, unless they would read more than
attention's output. Sequences of a pack have other lengths, and other numbers, in every step; tokens
of a pack do not.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import pytest
import torch

from megatron_cg.tape.fakes import replaced
from megatron_cg.tape.tape_backend import TapeBackend
from megatron_cg.tape.training_plan import CpuModelConfig
from tests.unit.counted import expect
from tests.unit.packs import pack_of, packs_on_cpu
from tests.unit.trainers import trainer_of

LAYERS, TOKENS, BEFORE, AFTER = 2, 16, 2, 3
PACKS = ((0, 5, 16), (0, 16), (0, 3, 4, 11, 16), (0, 8, 16), (0, 1, 16))
"""Where the sequences of each step's pack begin, and the end of the last."""
MOE: dict[str, Any] = {"experts": 4}
BALANCED = {
    **MOE,
    "options": {"moe_router_load_balancing_type": "seq_aux_loss", "moe_aux_loss_coeff": 0.5},
}
RECOMPUTED = {"recompute_granularity": "selective", "recompute_modules": ["core_attn"]}


def train(
    scopes: tuple[str, ...],
    *,
    graphed: bool,
    model: Mapping[str, Any] | None = None,
    padding_mask: torch.Tensor | None = None,
    room: int | None = None,
    **fields: Any,
) -> tuple[Any, Any]:
    """Losses and norms of all steps, and the counters of the graphs; no packs if padded.

    ``model`` has other fields of the model's config, and ``fields`` are of the packs' objects.
    """
    settings: dict[str, Any] = {"dropout": 0.1, "bf16": False} | dict(model or {})
    settings["options"] = {"apply_rope_fusion": True} | settings.get("options", {})
    shape = CpuModelConfig(layers=LAYERS, sequence_length=TOKENS, graph_modules=scopes, **settings)
    with packs_on_cpu(), trainer_of(shape, micro_batch_size=1, graphs=graphed) as trainer:
        whole, numbers = trainer.model, []
        for number, starts in enumerate(PACKS):
            if graphed and number == BEFORE:
                trainer.capture(TapeBackend(), packed_samples=room)
            pack = pack_of(starts, **fields) if padding_mask is None else None
            trainer.model = partial(whole, packed_seq_params=pack, padding_mask=padding_mask)
            numbers.append(trainer.step())
            trainer.model = whole
        return numbers, trainer.session and trainer.session.counters


def assert_as_eager(scopes: tuple[str, ...], counts: dict[str, int], **given: Any) -> Any:
    """Train eagerly and with graphs: the same numbers, and these counts of the graphs."""
    eager, _ = train(scopes, graphed=False, **given)
    graphed, counters = train(scopes, graphed=True, **given)
    assert graphed == eager
    expect(counters, **counts)
    return eager


ROUTER = ("moe_router", "moe_preprocess")
ALL_EAGER = {"replayed": 0, "mismatched": LAYERS * AFTER, "eager": LAYERS * AFTER}


@pytest.mark.parametrize(
    ("scopes", "model", "layers"),
    [
        (("mlp",), {}, LAYERS),
        (ROUTER, MOE, LAYERS),
        (("attn",), {}, LAYERS),
        ((), {}, LAYERS),
        (("attn", "mlp"), {"options": {"mtp_num_layers": 1}}, LAYERS + 1),
        (("attn", *ROUTER), BALANCED, LAYERS),
        (("attn",), {"dropout": 0.0, "options": RECOMPUTED}, LAYERS),
    ],
    ids=str,
)
def test_graphs_replay(
    one_rank: None, scopes: tuple[str, ...], model: dict[str, Any], layers: int
) -> None:
    counts = dict.fromkeys(("replayed", "backwards"), layers * AFTER)
    numbers = assert_as_eager(scopes, counts | {"mismatched": 0, "eager": 0}, model=model)
    assert len(set(numbers)) == len(PACKS)


def test_a_router_behind_attention_counts_no_padding(one_rank: None) -> None:
    padding = torch.arange(TOKENS)[None] >= TOKENS // 4
    assert_as_eager(("moe_router",), ALL_EAGER, model=BALANCED, padding_mask=padding)


def test_samples_that_a_pack_joins_are_not_balanced_as_one(one_rank: None) -> None:
    """A router behind attention: its graph has not been told where a sample ends."""
    joined = partial(assert_as_eager, ("moe_router",), model=BALANCED)
    counts = {"replayed": LAYERS * AFTER, "mismatched": 0}
    one = joined(counts, tokens_per_sample=TOKENS)
    assert one == joined(counts) != joined(ALL_EAGER, tokens_per_sample=TOKENS // 2)


def test_a_pack_without_room_runs_eagerly(one_rank: None, caplog: pytest.LogCaptureFixture) -> None:
    counts = {"replayed": LAYERS * (AFTER - 1), "mismatched": LAYERS, "eager": LAYERS}
    assert_as_eager(("attn",), counts, room=2)
    assert "the pack of sequences was of up to 2 samples at capture and is of 4 now" in caplog.text
    assert "raise --cg-packed-samples" in caplog.text


ALL = 4


@contextmanager
def trainer(scopes: tuple[str, ...]) -> Iterator[Any]:
    """A trainer of layers of megatron-core 0.20, which its scripts make by a spec of one's own.

    What it compiles takes longer than the steps, so it runs eagerly.
    """
    hyper_connection = pytest.importorskip("megatron.core.transformer.hyper_connection")
    from megatron.core.transformer.transformer_layer import HyperConnectionTransformerLayer

    from megatron_cg.tape import train as tape_train

    name = "get_gpt_layer_local_spec"
    make = vars(tape_train)[name]

    def spec(**named: Any) -> Any:
        made = make(**named)
        made.module = HyperConnectionTransformerLayer
        for part in ("self_attention_hyper_connection", "mlp_hyper_connection"):
            setattr(made.submodules, part, hyper_connection.HyperConnectionModule)
        return made

    given = {"enable_mhc_connections": True}
    shape = CpuModelConfig(layers=LAYERS, graph_modules=scopes, options=given)
    with (
        replaced(tape_train, name, spec),
        replaced(torch.cuda.nvtx, "range", lambda _text: nullcontext()),
        torch.compiler.set_stance("force_eager"),
        trainer_of(shape, microbatches=2) as made,
    ):
        yield made


@pytest.mark.parametrize("scopes", [("attn",), ("mlp",), ()], ids=str)
def test_graphs_of_several_residual_streams_replay(one_rank: None, scopes: tuple[str, ...]) -> None:
    runs = []
    for graphed in (False, True):
        with trainer(scopes) as made:
            numbers = [made.step() for _ in range(BEFORE)]
            session = made.capture(TapeBackend()) if graphed else None
            runs.append(numbers + [made.step() for _ in range(ALL - BEFORE)])
            if session is not None:
                expect(session.counters, replayed=LAYERS * 2 * (ALL - BEFORE), eager=0)
    eager, graphed_run = runs
    assert graphed_run == eager and len(set(eager)) == ALL
