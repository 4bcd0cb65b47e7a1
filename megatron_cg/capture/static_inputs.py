"""Inputs that are the same tensor in every pass, so that a graph can read them in place.

For example, a rotary table is computed once and passed to every layer in every step. A graph that
is captured with a synthetic sample needs a copy of the table into the graph's own memory before
each replay. A graph that is captured with the table itself needs no copy.

Note [A borrowed input is never written]
    TE copies an input at another address into the static input (``Graphed.forward``). Here that
    would overwrite the model's own table. So the guard forbids the replay if a borrowed input is
    not at the captured address; see ``replay/guard.py``.
"""

import inspect
import weakref
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from megatron_cg.replay.borders import local
from megatron_cg.upstream.backward_pass import in_backward_pass
from megatron_cg.upstream.patch import all_of, look


class StaticInputs:
    """Observes whole training steps to find the inputs of layers, by name, that never change."""

    def __init__(self, layers: Iterable[nn.Module]) -> None:
        self._layers = tuple(layers)
        self._seen: dict[tuple[nn.Module, str], tuple[weakref.ref[torch.Tensor], int, int]] = {}
        """With the version of the values, since a layer may write into an input, such as a state,
        and with the step in which it came first."""
        self._changed: set[tuple[nn.Module, str]] = set()
        self._again: set[tuple[nn.Module, str]] = set()
        """Those that came in two steps at least."""
        self._step = 0

    def observe_step(self) -> Callable[[], None]:
        self._step += 1
        return all_of(look(layer, self._called) for layer in self._layers)

    def replace_in(
        self, layer: nn.Module, samples: Mapping[str, torch.Tensor]
    ) -> dict[str, torch.Tensor]:
        """``samples`` of a layer, with unchanging inputs instead of synthetic ones.

        Nothing is replaced before two steps were observed: a mask may be one tensor for all
        microbatches of a step and another tensor in the next step.
        """
        inputs = dict(samples)
        for name, sample in samples.items():
            reference = self._seen.get((layer, name))
            tensor = reference[0]() if reference is not None else None
            if (layer, name) not in self._again - self._changed or tensor is None:
                continue
            kinds = [(t.shape, t.dtype, t.stride(), t.device) for t in (tensor, sample)]
            if kinds[0] == kinds[1] and not sample.requires_grad:
                inputs[name] = tensor
        return inputs

    def _called(self, layer: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        if in_backward_pass():
            return  # recomputed, on inputs that were detached: other tensors each time
        names = positional_names(layer.forward, len(args), kwargs)
        self._look(layer, dict(zip(names, args, strict=True)) | dict(kwargs))

    def _look(self, layer: nn.Module, inputs: Mapping[str, Any]) -> None:
        for name, given in inputs.items():
            key, value = (layer, name), local(given)
            if not isinstance(value, torch.Tensor) or value.requires_grad:
                self._changed.add(key)
            elif key not in self._seen:
                self._seen[key] = weakref.ref(value), version_of(value), self._step
            else:
                reference, version, first = self._seen[key]
                self._again.update({key} if first < self._step else ())
                if reference() is not value or version != version_of(value):
                    self._changed.add(key)


def version_of(tensor: torch.Tensor) -> int:
    """How often the values were written in place; torch does not count it in inference mode."""
    return 0 if tensor.is_inference() else tensor._version


def positional_names(
    forward: Callable[..., Any], count: int, taken: Container[str] = ()
) -> list[str]:
    """Names of the first ``count`` positional arguments.

    ``number N`` where there is none that a keyword could have, or where a keyword has it already: a
    decorator may pass on the signature of what it decorates, and take other arguments.
    """
    named = inspect.Parameter.POSITIONAL_OR_KEYWORD
    parameters = inspect.signature(forward).parameters.values()
    names = [p.name if p.kind is named else None for p in parameters][:count]
    names += [None] * (count - len(names))
    return [
        f"number {n}" if name is None or name in taken else name for n, name in enumerate(names)
    ]
