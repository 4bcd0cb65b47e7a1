"""Where to reach into a run: its steps, its captures, and all that a capture may not change."""

import functools
import gc
import os
from collections.abc import Callable
from itertools import count
from typing import Any

import torch

from megatron_cg.hooks import MODULE_REGISTRIES


class ForcedError(RuntimeError):
    """Raised on purpose."""


def rank() -> int:
    return int(os.environ["RANK"])


def wrap(owner: Any, name: str, make: Callable[[Any], Any]) -> None:
    old = getattr(owner, name)
    new = make(old)
    setattr(owner, name, new if isinstance(owner, type) else functools.wraps(old)(new))


def helper_class() -> Any:
    from megatron_cg.integrations.megatron import helper

    return helper.FsdpHelper


def before_steps(action: Callable[[int, Any], None]) -> None:
    """Call ``action`` before each training step, with its number, from 1, and the model."""
    from megatron.training import training

    numbers = count(1)

    def make(old: Callable[..., Any]) -> Callable[..., Any]:
        def train_step(*args: Any, **kwargs: Any) -> Any:
            action(next(numbers), args[2][0])
            return old(*args, **kwargs)

        return train_step

    wrap(training, "train_step", make)


def before_capture(action: Callable[[Any], None]) -> None:
    """Call ``action`` with the capture helper before each capture."""

    def make(old: Callable[[Any], None]) -> Callable[[Any], None]:
        def create(self: Any) -> None:
            action(self)
            old(self)

        return create

    wrap(helper_class(), "capture", make)


def fingerprint(model: Any) -> list[tuple[Any, ...]]:
    """Every hook of every module and raw parameter below ``model``, by identity and in order."""
    found: list[tuple[Any, ...]] = []
    for name, module in model.named_modules():
        for registry in MODULE_REGISTRIES:
            found += [
                (name, registry, key, id(fn)) for key, fn in getattr(module, registry).items()
            ]
        own = sorted(set(vars(module)) & {"forward", "_should_call_te_cudagraph", "config"})
        found.append((name, "attributes", *((key, id(vars(module)[key])) for key in own)))
    for index, parameter in enumerate(model.module.param_and_grad_buffer.params):
        for registry in ("_post_accumulate_grad_hooks", "_backward_hooks"):
            hooks = getattr(parameter, registry, None) or {}
            found += [(index, registry, key, id(fn)) for key, fn in hooks.items()]
    return found


def flags() -> dict[str, Any]:
    from megatron.core.transformer import cuda_graphs
    from megatron.core.transformer.transformer_layer import TransformerLayer
    from transformer_engine.pytorch import graph
    from transformer_engine.pytorch.distributed import get_all_rng_states

    return {
        "megatron capturing": cuda_graphs.is_graph_capturing(),
        "TE capturing": graph.is_graph_capturing(),
        "layer __call__": id(TransformerLayer.__call__),
        "own __call__": "__call__" in TransformerLayer.__dict__,
        "gc": gc.isenabled(),
        "capture function": id(cuda_graphs.make_graphed_callables),
        "stream": torch.cuda.current_stream().cuda_stream,
        "rng": [torch.cuda.get_rng_state().tolist(), torch.get_rng_state().sum().item()],
        "tracked": {
            name: state.get_state().tolist() for name, state in get_all_rng_states().items()
        },
    }
