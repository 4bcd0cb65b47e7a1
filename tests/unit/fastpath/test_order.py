"""Gathers of the next unit come after a launch; a rank that does not replay keeps their order.

The eager rest of a layer, after its graph, has a collective of its own over another group, like the
all-to-all of experts.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import Mock

import pytest
import torch
import torch.distributed as dist

from megatron_cg.consensus.exchange import Agreement
from megatron_cg.fastpath.detached_weights import _Detached
from megatron_cg.replay import guarded_graph as graphed
from megatron_cg.replay.guard import Mismatch
from megatron_cg.tape.tape_backend import TapeBackend
from megatron_cg.tape.training_plan import CpuModelConfig
from tests.unit.ranks import on_ranks
from tests.unit.trainers import layers_of, trainer_of

LAYERS = 3
WRONG = Mismatch("verification", "output 0", "one", "other", "Cause.")


def no_change(_trainer: Any, _patch: pytest.MonkeyPatch) -> None:
    pass


def refused(trainer: Any, _patch: pytest.MonkeyPatch) -> None:
    for layer in layers_of(trainer):
        layer.self_attention.register_forward_hook(lambda *_: None)


def evaluation(trainer: Any, _patch: pytest.MonkeyPatch) -> None:
    for layer in layers_of(trainer):
        layer.eval()


def no_tensor(trainer: Any, _patch: pytest.MonkeyPatch) -> None:
    """An argument that no graph takes, and that the layer does not use."""
    for layer in layers_of(trainer):
        layer.register_forward_pre_hook(
            lambda _layer, args, kwargs: (args, {**kwargs, "sequence_len_offset": 0}),
            with_kwargs=True,
        )


def no_graphs(trainer: Any, _patch: pytest.MonkeyPatch) -> None:
    for layer in layers_of(trainer):
        layer.cuda_graphs = []


def verified(trainer: Any, patch: pytest.MonkeyPatch) -> None:
    """A verification that finds another number on this rank."""
    patch.setattr(graphed, "verify", lambda *_, **__: (WRONG, 0))
    patch.setattr(trainer.session.mismatches.verifications, "_interval", 1)


WAYS = [no_change, refused, evaluation, no_tensor, no_graphs, verified]


@contextmanager
def started(layers: int = LAYERS) -> Iterator[Any]:
    """A trainer whose first gathers are known, so that only the eager passes differ."""
    with trainer_of(CpuModelConfig(layers=layers), graphs=True) as trainer:
        trainer.step()
        trainer.capture(TapeBackend(), Agreement())
        trainer.step()
        trainer.step()
        yield trainer


def noted(fsdp: Any, patch: pytest.MonkeyPatch) -> list[Any]:
    events: list[Any] = []
    own = dist.all_gather_into_tensor
    units = {
        group.model_weight_buffer.data.untyped_storage().data_ptr(): group.fsdp_unit_id
        for group in fsdp.param_and_grad_buffer.parameter_groups
    }

    def gathered(*args: Any, **kwargs: Any) -> Any:
        if "input_tensor" in kwargs:
            unit = units[kwargs["input_tensor"].untyped_storage().data_ptr()]
            backward = fsdp._root_pre_backward_hook_issued
            events.append(f"{'backward' if backward else 'forward'}: gather {unit}")
        return own(*args, **kwargs)

    patch.setattr(dist, "all_gather_into_tensor", gathered)
    launch = _Detached.apply

    def launched(*args: Any) -> Any:
        outputs: Any = launch(*args)  # type: ignore[no-untyped-call]
        events.append("launch")
        return outputs

    patch.setattr(_Detached, "apply", launched)
    return events


def with_experts(trainer: Any, patch: pytest.MonkeyPatch) -> list[str]:
    events = noted(trainer.model.module, patch)
    experts = dist.new_group(backend="gloo")
    for number, layer in enumerate(layers_of(trainer)):

        def after_the_graph(_mlp: Any, _args: Any, number: int = number) -> None:
            events.append(f"experts {number}")
            dist.all_reduce(torch.ones(1), group=experts)

        layer.mlp.register_forward_pre_hook(after_the_graph)
    return events


def in_order() -> dict[str, Any]:
    found: dict[str, Any] = {}
    for way in WAYS:
        with started() as trainer, pytest.MonkeyPatch.context() as patch:
            events = with_experts(trainer, patch)
            if dist.get_rank() == 1:
                way(trainer, patch)
            trainer.step()
            counts = trainer.session.counters
            found[way.__name__] = [events, counts.eager, counts.replayed]
    return found


@pytest.fixture(scope="module")
def found() -> list[dict[str, Any]]:
    return on_ranks(in_order)


@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
def test_a_rank_that_runs_eagerly_keeps_to_the_order_of_the_others(
    found: list[dict[str, Any]], way: Callable[..., None]
) -> None:
    replaying, eager = (rank[way.__name__] for rank in found)
    events = [event for event in replaying[0] if "None" not in event]
    assert events == [
        *("forward: gather 0", "launch", "forward: gather 1", "experts 0"),
        *("launch", "forward: gather 2", "experts 1", "launch", "experts 2"),
        # Megatron-FSDP prefetches unit 1 in the call that asks for unit 2, in their order.
        *("backward: gather 1", "backward: gather 2", "backward: gather 0"),
    ]
    collectives = [
        [event for event in rank[0] if event not in ("launch", "forward: gather None")]
        for rank in (replaying, eager)
    ]
    assert collectives[0] == collectives[1]
    steps = 3 - (way is not no_change)
    assert (eager[1], eager[2]) == (LAYERS * (way is not no_change), LAYERS * steps)
    assert (replaying[1], replaying[2]) == (0, LAYERS * 3)


def test_an_error_before_a_replay_leaves_nothing_held(one_rank: None) -> None:
    with started(2) as trainer, pytest.MonkeyPatch.context() as patch:
        events = with_experts(trainer, patch)
        failing = Mock(side_effect=ArithmeticError("forced"))
        patch.setitem(vars(layers_of(trainer)[0]), "_te_cuda_graph_replay", failing)
        with pytest.raises(ArithmeticError, match="forced"):
            trainer.step()
        gathers = [event for event in events if "None" not in event]
        assert gathers == ["forward: gather 0", "forward: gather 1"]
