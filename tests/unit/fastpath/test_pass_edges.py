"""Passes that begin elsewhere than the one before, fail or leave a graph; hooks that come later."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from megatron_cg.backends.tape.tape_backend import TapeBackend
from megatron_cg.tools.cpu.training_plan import CpuModelConfig
from tests.unit.ranks import on_ranks
from tests.unit.trainers import trainer_of

Forward = Callable[[], torch.Tensor]
LAYERS, CAPTURED_AFTER, STEPS, MICROBATCHES = 3, 1, 4, 3


class Some(nn.ModuleList):
    """Layers of which the first one can be left out."""

    skips = False

    def __iter__(self) -> Iterator[nn.Module]:
        layers = super().__iter__()
        if self.skips:
            next(layers)
        return layers


class Shuffled(nn.ModuleList):
    """Layers that run in another order than they are registered in."""

    order = (2, 0, 1)

    def __iter__(self) -> Iterator[nn.Module]:
        layers = list(super().__iter__())
        return iter([layers[number] for number in self.order])


def decoder_of(trainer: Any) -> Any:
    (decoder,) = (m for m in trainer.model.modules() if type(m).__name__ == "TransformerBlock")
    return decoder


@contextmanager
def one_rank_leaves_its_last_graph(trainer: Any) -> Iterator[None]:
    """The layer that runs last, and what follows it by registration is not there yet."""
    last = list(decoder_of(trainer).layers)[-1]
    last.mlp.training = dist.get_rank() > 0
    yield
    last.mlp.training = True


@contextmanager
def first_layer_skipped(trainer: Any) -> Iterator[None]:
    """In the last microbatch of each step; Megatron-FSDP has no buffer for more of it."""
    decoder = decoder_of(trainer)
    decoder.layers.__class__ = Some

    def skipping(forward: Forward) -> torch.Tensor:
        decoder.layers.skips = True
        try:
            return forward()
        finally:
            decoder.layers.skips = False

    with last_microbatches(trainer, skipping):
        yield


@contextmanager
def embedding_failed(trainer: Any) -> Iterator[None]:
    """In the last microbatch of each step; weights change, and the pass is tried again."""
    (embedding,) = (
        m for m in trainer.model.modules() if type(m).__name__ == "LanguageModelEmbedding"
    )

    def failing(*_: Any) -> None:
        raise ValueError

    def retrying(forward: Forward) -> torch.Tensor:
        hook = embedding.register_forward_pre_hook(failing)
        with suppress(ValueError):
            forward()
        hook.remove()
        # Gloo has read the weights that it gathers, if it does gather any.
        for work, _ in trainer.model.module.all_gather_pipeline.param_gather_event_map.values():
            work.wait()
        for group in trainer.model.module.param_and_grad_buffer.parameter_groups:
            # As through a DTensor: torch counts no such write.
            group.model_weight_buffer.data.data.mul_(1.25)
        return forward()

    with last_microbatches(trainer, retrying):
        yield


@contextmanager
def last_microbatches(trainer: Any, event: Callable[[Forward], torch.Tensor]) -> Iterator[None]:
    """Let ``event`` run the forward pass of each step's last microbatch."""
    own, passes = trainer._forward, 0

    def forward() -> torch.Tensor:
        nonlocal passes
        passes += 1
        losses: torch.Tensor = own() if passes % MICROBATCHES else event(own)
        return losses

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trainer, "_forward", forward)
        yield


@contextmanager
def gradients_hooked(hook: Callable[[torch.Tensor], None], trainer: Any) -> Iterator[None]:
    """By hooks that run after Megatron-FSDP's own, and find no gradient then."""
    with ExitStack() as stack:
        for parameter in trainer.model.module.param_and_grad_buffer.params:
            stack.callback(parameter.register_post_accumulate_grad_hook(hook).remove)
        yield


def halve(parameter: torch.Tensor) -> None:
    if parameter.grad is not None:
        parameter.grad.mul_(0.5)


def drop(parameter: torch.Tensor) -> None:
    parameter.grad = None


SHUFFLED = "one rank leaves its last graph"
EDGES: dict[str, Callable[[Any], AbstractContextManager[None]]] = {
    "first layer skipped": first_layer_skipped,
    "embedding failed": embedding_failed,
    SHUFFLED: one_rank_leaves_its_last_graph,
    "gradients halved": partial(gradients_hooked, halve),
    "gradients dropped": partial(gradients_hooked, drop),
}


def trained(name: str, *, graphs: bool) -> Any:
    """Numbers of the steps, and digests of the weights after them."""
    from megatron_cg.telemetry.record_shards import parameter_digests

    shape = CpuModelConfig(LAYERS, 16, 16, graph_modules=("attn", "mlp"))
    with trainer_of(shape, graphs=graphs, microbatches=MICROBATCHES) as trainer:
        if name == SHUFFLED:
            decoder_of(trainer).layers.__class__ = Shuffled
        numbers = [trainer.step() for _ in range(CAPTURED_AFTER)]
        if graphs:
            trainer.capture(TapeBackend())
        numbers.append(trainer.step())
        with EDGES[name](trainer):
            numbers += [trainer.step() for _ in range(STEPS - CAPTURED_AFTER - 1)]
            return [numbers, parameter_digests(trainer.model)]


def train_all() -> dict[str, Any]:
    return {name: [trained(name, graphs=graphs) for graphs in (False, True)] for name in EDGES}


@pytest.fixture(scope="module")
def results() -> list[dict[str, Any]]:
    return on_ranks(train_all)


@pytest.mark.parametrize("name", EDGES)
def test_what_is_trained_is_what_an_eager_run_trains(
    results: list[dict[str, Any]], name: str
) -> None:
    for found in results:
        eager, graphs = found[name]
        assert graphs == eager
