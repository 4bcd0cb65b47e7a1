"""What full recompute with graphs cannot do: seen in Megatron's and Transformer Engine's code."""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ContextDecorator, contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from megatron_cg.backends.tape.tape_backend import TapeBackend
from megatron_cg.integrations.megatron.full_recompute import allow_full_recompute
from megatron_cg.replay.mismatch_policy import ReplayPolicy
from megatron_cg.tools.cpu.cpu_model import transformer_layers
from megatron_cg.tools.cpu.training_plan import CpuModelConfig
from megatron_cg.upstream.megatron import capturing_flag
from tests.functional.loops import RECOMPUTE
from tests.unit.ranks import on_ranks
from tests.unit.te_sources import source_of_te
from tests.unit.trainers import trainer_of

LAYERS = 2
OF_TE = (
    *("_IN_ACTIVATION_RECOMPUTE_REGION", "_ACTIVATION_RECOMPUTE_PHASE"),
    *("activation_recompute_forward", "is_fp8_activation_recompute_enabled"),
    "in_fp8_activation_recompute_phase",
)


@contextmanager
def training(scopes: tuple[str, ...]) -> Iterator[Any]:
    """A trainer of a model that recomputes whole layers, without the rules about it."""
    undo = allow_full_recompute()
    try:
        shape = CpuModelConfig(layers=LAYERS, graph_modules=scopes, options=RECOMPUTE)
        with trainer_of(shape, graphs=True) as trainer:
            trainer.step()
            yield trainer
    finally:
        undo()


def passes(trainer: Any, part: str) -> Counter[str]:
    """How often a step runs a part of the layers through Python, with and without gradients."""
    found: Counter[str] = Counter()

    def counted(run: Callable[..., Any]) -> Callable[..., Any]:
        def forward(*args: Any, **kwargs: Any) -> Any:
            found["grad" if torch.is_grad_enabled() else "no grad"] += 1
            return run(*args, **kwargs)

        return forward

    with pytest.MonkeyPatch.context() as changes:
        for layer in transformer_layers(trainer.model):
            changes.setattr(layer, part, counted(getattr(layer, part)))
        trainer.step()
    return found


@pytest.mark.refuses("full-recompute-of-parts")
def test_beside_a_graph_of_a_part_the_rest_of_the_layer_keeps_its_activations(
    one_rank: None,
) -> None:
    with training(("attn",)) as trainer:
        assert passes(trainer, "_forward_mlp") == {"no grad": LAYERS, "grad": LAYERS}
        trainer.capture(TapeBackend())
        trainer.step()  # The first replays are verified beside eager passes.
        assert passes(trainer, "_forward_attention") == {}
        # Once, and not again in the backward pass: it has kept what that reads.
        assert passes(trainer, "_forward_mlp") == {"grad": LAYERS}


@pytest.mark.refuses("hybrid-full-recompute")
def test_a_graph_inside_of_megatrons_checkpoint_is_not_replayed_in_the_first_pass(
    one_rank: None,
) -> None:
    """As a HybridStack, whose layers get no checkpoint of their own."""
    with (
        patch("megatron_cg.tools.cpu.train.recompute_in_layers", lambda *_: lambda: None),
        training(()) as trainer,
    ):
        session = trainer.capture(TapeBackend(), policy=ReplayPolicy("eager"))
        trainer.step()  # The first replays are verified beside eager passes.
        assert passes(trainer, "_forward_mlp") == {"no grad": LAYERS}
        assert session.counters.mismatched == 2 * LAYERS


def recompute_of_te() -> dict[str, Any]:
    """Transformer Engine's own functions that tell its modules of a recompute, with FP8 on."""
    file = source_of_te("distributed.py")
    named = {
        getattr(one, "name", "") or ast.unparse(getattr(one, "targets", [one])[0]): one
        for one in ast.parse(file.read_text()).body
        if isinstance(one, ast.Assign | ast.ClassDef | ast.FunctionDef)
    }
    state = SimpleNamespace(is_first_fp8_module=False)
    fp8 = SimpleNamespace(is_fp8_enabled=lambda: True, quantization_state=state)
    scope: dict[str, Any] = {
        "AbstractContextManager": AbstractContextManager,
        "ContextDecorator": ContextDecorator,
        "FP8GlobalStateManager": fp8,
        "List": list,
    }
    exec(compile(ast.Module([named[name] for name in OF_TE], []), file.name, "exec"), scope)
    return scope


@pytest.mark.refuses("low-precision-full-recompute")
def test_torchs_checkpoint_tells_fp8_modules_of_no_recompute() -> None:
    """They then update their scales in both passes, instead of using those of the first again."""
    te = recompute_of_te()
    seen: list[tuple[bool, bool]] = []

    def layer(rows: torch.Tensor) -> torch.Tensor:
        enabled, again = (te[name]() for name in OF_TE[-2:])
        seen.append((enabled, again))
        return rows * rows

    rows = torch.ones(2, requires_grad=True)
    for again in (False, True):
        with te["activation_recompute_forward"](activation_recompute=True, recompute_phase=again):
            layer(rows)
    assert seen == [(True, False), (True, True)]
    seen.clear()
    checkpoint(layer, rows, use_reentrant=True, preserve_rng_state=False).sum().backward()
    assert seen == [(False, False)] * 2


def kept(within: AbstractContextManager[Any]) -> int:
    """Elements of an input that Megatron's checkpoint keeps on each of two ranks."""
    from megatron.core.tensor_parallel import checkpoint

    rows = torch.ones(4, 2, requires_grad=True) * 1
    with within:
        checkpoint(lambda given: given * given, True, rows)
    return rows.numel()


def distributed() -> list[int]:
    from megatron.core import parallel_state, tensor_parallel

    parallel_state.initialize_model_parallel(2)
    tensor_parallel.model_parallel_cuda_manual_seed(1)
    try:
        return [kept(nullcontext()), kept(capturing_flag())]
    finally:
        parallel_state.destroy_model_parallel()


@pytest.mark.refuses("distributed-full-recompute")
def test_nothing_is_distributed_in_a_capture() -> None:
    assert on_ranks(distributed) == [[4, 8]] * 2
