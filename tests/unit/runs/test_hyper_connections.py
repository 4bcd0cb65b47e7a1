"""Layers with several residual streams (mHC), which megatron-core has from 0.20 on."""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron_cg.tape.fakes import replaced
from megatron_cg.tape.tape_backend import TapeBackend
from megatron_cg.tape.training_plan import CpuModelConfig
from tests.unit.counted import expect
from tests.unit.trainers import trainer_of

hyper_connection = pytest.importorskip("megatron.core.transformer.hyper_connection")
LAYERS, BEFORE, STEPS = 2, 2, 4


@contextmanager
def trainer(scopes: tuple[str, ...], **options: object) -> Iterator[Any]:
    """A trainer of a model with such layers, which Megatron's scripts make by a spec of one's own.

    What it compiles takes longer than the steps, so it runs eagerly.
    """
    from megatron.core.transformer.transformer_layer import HyperConnectionTransformerLayer

    from megatron_cg.tape import cpu_model

    name = "get_gpt_layer_local_spec"
    make = vars(cpu_model)[name]

    def spec(**named: Any) -> Any:
        made = make(**named)
        made.module = HyperConnectionTransformerLayer
        for part in ("self_attention_hyper_connection", "mlp_hyper_connection"):
            setattr(made.submodules, part, hyper_connection.HyperConnectionModule)
        return made

    given = {"enable_mhc_connections": True, **options}
    shape = CpuModelConfig(layers=LAYERS, graph_modules=scopes, options=given)
    with (
        replaced(cpu_model, name, spec),
        replaced(torch.cuda.nvtx, "range", lambda _text: nullcontext()),
        torch.compiler.set_stance("force_eager"),
        trainer_of(shape, microbatches=2) as made,
    ):
        yield made


@pytest.mark.parametrize("scopes", [("attn",), ("mlp",), ()], ids=str)
def test_their_graphs_replay(one_rank: None, scopes: tuple[str, ...]) -> None:
    runs = []
    for graphed in (False, True):
        with trainer(scopes) as made:
            numbers = [made.step() for _ in range(BEFORE)]
            session = made.capture(TapeBackend()) if graphed else None
            runs.append(numbers + [made.step() for _ in range(STEPS - BEFORE)])
            if session is not None:
                expect(session.counters, replayed=LAYERS * 2 * (STEPS - BEFORE), eager=0)
    eager, graphed_run = runs
    assert graphed_run == eager and len(set(eager)) == STEPS


@pytest.mark.refuses("recompute-of-mhc")
def test_no_pass_beside_a_replay_can_recompute(
    one_rank: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The pass that a replay is compared with ends in its backward pass."""
    from megatron.core.tensor_parallel import random

    of_te = SimpleNamespace(is_fp8_enabled=lambda: False)
    monkeypatch.setattr(random, "FP8GlobalStateManager", of_te, raising=False)
    nothing = "activation_recompute_forward"
    monkeypatch.setattr(random, nothing, lambda **_named: nullcontext(), raising=False)
    recompute = {"recompute_granularity": "selective", "recompute_modules": ["mhc"]}
    with trainer((), **recompute) as made:
        made.capture(TapeBackend())
        with pytest.raises(AttributeError, match="no attribute 'inputs'"):
            made.step()
