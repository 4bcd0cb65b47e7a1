"""Random generators of a model, and Megatron's RNG tracker as far as it is in use.

Nothing is imported for the tracker.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from megatron_cg.backends.cuda_cleanup import device_generator, generators_kept
from megatron_cg.backends.te.te_if_loaded import rng_states
from megatron_cg.upstream.symbols import Symbol

_RANDOM = "megatron.core.tensor_parallel.random"
_TRACKER = Symbol(f"{_RANDOM}:_CUDA_RNG_STATE_TRACKER", "the RNG tracker; None before it is made")
_STATES = Symbol(
    f"{_RANDOM}:CudaRNGStatesTracker",
    "the RNG tracker, which draws from one of its states",
    attributes=("states_",),
)
RELIES_ON = (_TRACKER, _STATES)


def megatron_tracker() -> Any:
    """Megatron's RNG tracker, or None: Megatron is not in use, or nobody has seeded it.

    ``get_cuda_rng_tracker`` would make one, which a later seeding does not replace.
    """
    return _TRACKER.find() if _RANDOM in sys.modules else None


def generators_of(callables: Iterable[nn.Module], device_type: str) -> list[torch.Generator]:
    """The generators that captured code may draw from, besides the device's own.

    Those of Megatron's and of TE's RNG trackers, and attributes of the modules. A tracker that is
    not graph-safe holds states as tensors, and torch refuses to set one in a capture.
    """
    tracker = megatron_tracker()
    states = [*rng_states().values(), *(tracker.states_.values() if tracker is not None else ())]
    states += [value for root in callables for m in root.modules() for value in vars(m).values()]
    generators = {id(value): value for value in states if isinstance(value, torch.Generator)}
    return [generator for generator in generators.values() if generator.device.type == device_type]


@contextmanager
def tracked_states_kept() -> Iterator[None]:
    """Restore which states Megatron's tracker holds; a fork replaces them."""
    tracker = megatron_tracker()
    tracked = dict(tracker.states_) if tracker is not None else {}
    try:
        yield
    finally:
        if tracker is not None:
            tracker.states_.clear()
            tracker.states_.update(tracked)


@contextmanager
def random_states_kept(callables: Iterable[nn.Module], device_type: str) -> Iterator[None]:
    """Restore all generators that captured code may draw from, and what the tracker holds."""
    own = device_generator() if device_type == "cuda" else []
    with tracked_states_kept(), generators_kept([*own, *generators_of(callables, device_type)]):
        yield
