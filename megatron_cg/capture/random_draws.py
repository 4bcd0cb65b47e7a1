"""Refuses random numbers that a replay could not draw as an eager pass does.

A graph is given the seed and offset of its generators at each replay, whatever was set when it was
captured. And what Python drew then, such as which layers to skip, is in the graph for good.

Note [Two graphs, two draws]
    Activation checkpointing restores the random state of the forward pass before it recomputes, so
    that dropout drops the same elements. A unit's forward and backward passes are two graphs, and
    each gets, at its replay, the generator's state of that moment. The backward graph holds an
    offset from there, whatever state was restored in the capture (torch 2.11). So it would drop
    other elements than the forward graph, and gradients would be wrong without an error.
"""

import pickle
import random
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch

from megatron_cg.backends.base import device_generator, generators_of
from megatron_cg.capture.python_state import attribute
from megatron_cg.errors import CaptureError
from megatron_cg.replay.unit import Unit
from megatron_cg.restore import Restores
from megatron_cg.upstream.patch import put_over

_MARK = 0x5EED_CA97
"""The seed of all generators while a forward pass is observed."""
_SETTERS = (
    *((owner, name) for owner in (torch, torch.random) for name in ("manual_seed", "seed")),
    *((torch.cuda, name) for name in ("manual_seed", "manual_seed_all", "seed", "seed_all")),
)


@contextmanager
def seeds_refused(
    unit: Unit, device_type: str, reached: Iterable[tuple[str, Any]] = ()
) -> Iterator[None]:
    """Observe one forward pass of ``unit``; the caller restores torch's generators.

    ``reached`` are values besides attributes of its modules, by name.

    Raises CaptureError, from the pass or after it: it sets a seed, or Python draws.
    """
    generators = _generators(unit, device_type)
    for generator in generators:
        generator.manual_seed(_MARK)
    python = _python_generators(unit, reached)
    states = [read() for _, read, _ in python]
    with Restores() as undo:
        for (name, _, write), before in zip(python, states, strict=True):
            undo.restore(name, write, before)
        for owner, name in _SETTERS:
            refuse = _refusing(getattr(owner, name), unit, f"torch.{name}")
            undo.callback(put_over(owner, name, refuse))
        yield
        drew = [
            name
            for (name, read, _), before in zip(python, states, strict=True)
            if pickle.dumps(read()) != pickle.dumps(before)
        ]
    if any(generator.initial_seed() != _MARK for generator in generators):
        raise _sets_a_seed(unit, "manual_seed of a torch.Generator")
    if drew:
        raise unit.refused(
            f"draws from {' and '.join(drew)} in its forward pass",
            "A replay runs no Python, so what was drawn at capture would hold for all steps. "
            "Draw outside of the unit and pass the result as an argument.",
        )


@contextmanager
def recomputed_draws_refused(unit: Unit, device_type: str) -> Iterator[None]:
    """Observe one backward pass of ``unit``; see Note [Two graphs, two draws].

    Raises CaptureError after it: a restored random state was another one at the next restoring.
    """
    generators = _generators(unit, device_type)
    restored: list[torch.Tensor] = []
    drew: list[bool] = []

    def states() -> list[torch.Tensor]:
        return [generator.get_state() for generator in generators]

    def around(original: Callable[..., Any]) -> Callable[..., Any]:
        def set_rng_state(*args: Any, **kwargs: Any) -> Any:
            drew.extend(not torch.equal(*pair) for pair in zip(restored, states(), strict=False))
            result = original(*args, **kwargs)
            restored[:] = states()
            return result

        return set_rng_state

    with ExitStack() as undo:
        for owner in (torch, torch.cuda):
            undo.callback(put_over(owner, "set_rng_state", around(owner.set_rng_state)))
        yield
    if any(drew):
        raise unit.refused(
            "recomputes activations and draws random numbers in that (torch.utils.checkpoint "
            "around a dropout)",
            "Its forward and its backward graph would draw different ones, and gradients would be "
            "wrong. Set dropout to 0, take it out of what is recomputed, or drop the checkpoint.",
        )


def _generators(unit: Unit, device_type: str) -> list[torch.Generator]:
    of_unit = generators_of([unit.layer], device_type)
    return [torch.default_generator, *device_generator(), *of_unit]


def _refusing(original: Callable[..., Any], unit: Unit, name: str) -> Callable[..., Any]:
    thread = threading.get_ident()

    def call(*args: Any, **kwargs: Any) -> Any:
        if threading.get_ident() == thread:
            raise _sets_a_seed(unit, name)
        return original(*args, **kwargs)

    return call


def _sets_a_seed(unit: Unit, name: str) -> CaptureError:
    return unit.refused(
        f"sets a seed in its forward pass ({name})",
        "A replay draws from the state that the generator then has, whatever seed was set. Set it "
        "outside of the unit, or keep a torch.Generator as an attribute and seed it once.",
    )


def _python_generators(
    unit: Unit, reached: Iterable[tuple[str, Any]]
) -> list[tuple[str, Callable[[], Any], Callable[[Any], Any]]]:
    """Name, reader and writer of the states of Python's and NumPy's generators."""
    generators: list[tuple[str, Callable[[], Any], Callable[[Any], Any]]] = [
        ("Python's random", random.getstate, random.setstate)
    ]
    numpy: Any = sys.modules.get("numpy")
    kinds: Any = (torch.Generator,)
    if numpy is not None:
        kinds += (numpy.random.RandomState,)
        generators.append(("numpy.random", numpy.random.get_state, numpy.random.set_state))
    own = [
        (attribute(path, name), value)
        for path, module in unit.layer.named_modules()
        for name, value in vars(module).items()
        if not isinstance(value, torch.Generator)
    ]
    for label, value in (*own, *reached):
        if isinstance(value, random.Random):
            generators.append((label, value.getstate, value.setstate))
        elif isinstance(value, kinds):
            generators.append((label, value.get_state, value.set_state))
        elif numpy is not None and isinstance(value, numpy.random.Generator):
            bits = value.bit_generator
            write = partial(setattr, bits, "state")
            generators.append((label, partial(getattr, bits, "state"), write))
    return generators
