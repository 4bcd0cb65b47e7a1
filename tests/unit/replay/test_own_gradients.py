"""Which gradients of a replay's inputs are copied: those that somebody ahead may keep."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
import torch
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from megatron_cg.replay import borders
from megatron_cg.replay.borders import own_gradient
from megatron_cg.tape.tape_backend import TapeBackend
from megatron_cg.tape.training_plan import CpuModelConfig
from tests.unit.counted import expect
from tests.unit.trainers import trainer_of

Made = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""From a replay's output and a leaf."""
WEIGHT = torch.ones(4, 4, requires_grad=True)


class Replay(torch.autograd.Function):
    """Passes its gradient on."""

    @staticmethod
    def forward(_ctx: Any, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.clone()

    @staticmethod
    def backward(_ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
        return gradients[0]


def of(module: str) -> Callable[[torch.Tensor], torch.Tensor]:
    return type("Function", (Replay,), {"__module__": module}).apply  # type: ignore[attr-defined,no-any-return]


somebodys_own = of(__name__)
passed_on = of("megatron.core.tensor_parallel.mappings")
computed = of("transformer_engine.pytorch.module.linear")


def views(tensor: torch.Tensor) -> torch.Tensor:
    for _ in range(40):
        tensor = tensor.view(tensor.shape)
    return tensor


COPIED: dict[str, Made] = {
    "a leaf": lambda _, leaf: leaf,
    "a view of a leaf": lambda _, leaf: leaf.view(-1),
    "a leaf beside a replay": lambda replay, leaf: replay + leaf,
    "a leaf before a replay": lambda replay, leaf: torch.cat([leaf, replay]),
    "a leaf before a product": lambda _, leaf: torch.cat([leaf, leaf @ WEIGHT]),
    "a bias": lambda replay, leaf: functional.linear(replay, WEIGHT, leaf[0]),
    "an unknown function": lambda replay, _: somebodys_own(replay),
    "a checkpoint": lambda replay, _: checkpoint(lambda x: x + WEIGHT, replay, use_reentrant=True),
    "a function of Megatron's": lambda _, leaf: passed_on(leaf),
    "further than is looked": lambda replay, _: views(replay),
    "a retained gradient": lambda replay, _: (replay.retain_grad(), replay)[1],  # type: ignore[func-returns-value]
    "a hook on the gradient": lambda replay, _: (replay.register_hook(torch.neg), replay)[1],
}
NOT_COPIED: dict[str, Made] = {
    "a replay": lambda replay, _: replay,
    "a view of a replay": lambda replay, _: passed_on(replay.view(-1)),
    "a sum of a replay": lambda replay, leaf: replay + leaf @ WEIGHT,
    "an embedding": lambda _, leaf: functional.embedding(torch.tensor([0]), leaf).transpose(0, 1),
    "a linear layer": lambda _, leaf: computed(leaf).view(-1),
    "nothing to train": lambda _, leaf: leaf.detach(),
}


@pytest.mark.parametrize("case", [*COPIED, *NOT_COPIED])
def test_only_a_gradient_that_may_be_kept_is_copied(case: str) -> None:
    replay = Replay.apply(torch.ones(4, 4, requires_grad=True))  # type: ignore[no-untyped-call]
    node = replay.grad_fn
    value = {**COPIED, **NOT_COPIED}[case](replay, torch.ones(4, 4, requires_grad=True))
    copied = own_gradient(value, lambda one: one is node) is not value
    assert copied is (case in COPIED)


@contextmanager
def graphed() -> Iterator[Any]:
    with trainer_of(CpuModelConfig(layers=2), graphs=True) as trainer:
        trainer.step()
        trainer.capture(TapeBackend())
        yield trainer


def test_weights_under_megatron_fsdp_need_no_copy_of_their_gradient(
    one_rank: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(borders, "pass_on", None)
    with graphed() as trainer:
        trainer.step()
        expect(trainer.session.counters, replayed=2)


def test_a_leaf_before_a_layer_keeps_its_gradient(one_rank: None) -> None:
    """As the output of an encoder that is cut off, or a prompt that is learned."""
    kept = []
    with graphed() as trainer:
        model = trainer.model
        shape = (CpuModelConfig().sequence_length, 2, CpuModelConfig().hidden_size)
        for _ in range(2):
            leaf = torch.randn(shape).to(torch.bfloat16).requires_grad_()
            trainer.model = partial(model, decoder_input=leaf)
            with trainer._fsdp.no_sync():
                trainer._forward().sum().backward()
            assert leaf.grad is not None
            kept.append((leaf.grad, leaf.grad.clone()))
        trainer.model = model
        expect(trainer.session.counters, replayed=2 * 2)
    assert all(torch.equal(gradient, copy) for gradient, copy in kept)
    assert not torch.equal(*(copy for _, copy in kept))
