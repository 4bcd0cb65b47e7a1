"""What changes under graphs that replay: inputs, modules, hooks, parameters, buffers, routings.

Each is done in the eager run too, on the same rank at the same step, so that the runs stay equal
wherever the guard does its work.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from tests.functional.tampering.places import before_steps, rank, wrap

STEP, ONLY = 7, 1
_KEPT: list[Any] = []
"""Memory of moved buffers, which is never given out again."""
_FAR = 16.0
"""A routing adds it to the logits of the chosen experts: the others stay below, and BF16 tells most
apart."""


def fault(name: str) -> None:
    """The fault of that name, before step 7, on rank 1 unless the name ends in ``@all``."""
    name, _, where = name.partition("@")

    def act(step: int, model: Any) -> None:
        if step == STEP and (where == "all" or rank() == ONLY):
            FAULTS[name](model)

    before_steps(act)


def first_layer(model: nn.Module) -> Any:
    from megatron.core.transformer.transformer_layer import TransformerLayer

    return next(module for module in model.modules() if isinstance(module, TransformerLayer))


def shorter_sequences(model: nn.Module) -> None:
    """The model sees the first half of each sequence; the rest has loss 0."""
    from megatron.core.models.gpt import GPTModel

    gpt = next(module for module in model.modules() if isinstance(module, GPTModel))
    old = gpt.forward

    def forward(tokens: Any, positions: Any, mask: Any, *args: Any, **kwargs: Any) -> Any:
        half = tokens.shape[1] // 2
        for key in ("labels", "loss_mask"):
            if kwargs.get(key) is not None:
                kwargs[key] = kwargs[key][:, :half].contiguous()
        short = (tokens[:, :half].contiguous(), positions[:, :half].contiguous())
        losses = old(*short, mask, *args, **kwargs)
        return torch.cat([losses, losses.new_zeros(losses.shape)], dim=1)

    vars(gpt)["forward"] = forward


def parameter_replaced(model: nn.Module) -> None:
    """For the layer's forward pass: between steps Megatron-FSDP would put its own back."""
    layer = first_layer(model)
    projection, own = layer.self_attention.linear_proj, []

    def before(*_args: Any) -> None:
        own.append(projection.weight)
        projection.weight = nn.Parameter(projection.weight.detach() * 1.5)

    def after(*_args: Any) -> None:
        projection.weight = own.pop()

    layer.register_forward_pre_hook(before)
    layer.register_forward_hook(after, prepend=True)


def wrong_gradient(detail: str) -> None:
    """After each backward replay of a layer one bit of a gradient is wrong, in the graph itself.

    ``detail`` is ``input`` or ``weight``, and after another @ the layer.
    """
    from megatron_cg.backends import te_backend as transformer_engine

    which, _, layer = detail.partition("@")

    def make(old: Callable[..., Any]) -> Callable[..., Any]:
        def capture(self: Any, *args: Any, **kwargs: Any) -> Any:
            graphs = old(self, *args, **kwargs)
            replay = self.replay_function(graphs[int(layer)])
            first = replay.first_weight
            replay.replace(_with_wrong_gradient(replay.function, first, which))
            return graphs

        return capture

    if which not in ("input", "weight"):
        raise ValueError(which)
    wrap(transformer_engine.TransformerEngineBackend, "capture", make)


def _with_wrong_gradient(function: Any, first_weight: int, which: str) -> Any:
    class Wrong(function):  # type: ignore[misc]
        @staticmethod
        @functools.wraps(function.backward)  # whose closure variables are looked up
        def backward(ctx: Any, *gradients: Any) -> Any:
            found = function.backward(ctx, *gradients)
            some = found[first_weight:] if which == "weight" else found[:first_weight]
            wrong = next(gradient for gradient in some if gradient is not None)
            wrong.detach().view(torch.uint8).flatten()[0] ^= 1
            return found

    return Wrong


def buffers_moved(_model: nn.Module) -> None:
    """Megatron-FSDP allocates its unsharded buffers anew; the old ones stay alive."""
    from megatron.core.distributed.fsdp.src.megatron_fsdp import utils

    pool = utils.get_global_memory_buffer()
    _KEPT.append(dict(pool.buffer))
    pool.buffer.clear()


def buffers_moved_in_backward(model: nn.Module) -> None:
    model.register_forward_hook(lambda *_: buffers_moved(model))


FAULTS: dict[str, Callable[[nn.Module], None]] = {
    "shape": shorter_sequences,
    "parameter": parameter_replaced,
    "address": buffers_moved,
    "address-in-backward": buffers_moved_in_backward,
}


def route(name: str) -> None:
    """Send every token to the experts of that name, in every layer and step of both runs.

    ``one``: one expert gets all tokens, and the router chooses the other experts of each.
    ``first``: the first half of the experts gets all, so with EP 2 the second rank gets none.
    ``crosswise``: each rank's tokens go to the experts of the other.
    ``turning``: the tokens of a microbatch tell which half of the experts gets all, in each layer.
    """
    from megatron.core.transformer.moe.router import TopKRouter

    def make(old: Callable[..., Any]) -> Callable[..., Any]:
        def gating(self: Any, tokens: torch.Tensor) -> torch.Tensor:
            logits: torch.Tensor = old(self, tokens)
            pull = _pull(name, self, logits)
            if name == "turning":
                pull = torch.where(tokens.float().sum() > 0, pull, pull.flip(0))
            return logits + pull

        return gating

    wrap(TopKRouter, "gating", make)


def _pull(name: str, router: Any, logits: torch.Tensor) -> torch.Tensor:
    """One value an expert. Kept on the router, since a capture uploads nothing."""
    if not hasattr(router, "pull"):
        experts, half = logits.shape[-1], logits.shape[-1] // 2
        pull = torch.zeros(experts)
        if name == "one":
            pull[0] = _FAR
        elif name in ("first", "turning"):
            pull[:half] = _FAR
        else:
            pull[half if rank() == 0 else 0 :][:half] = _FAR
        router.pull = pull.to(logits)
    found: torch.Tensor = router.pull
    return found
