"""What a step changes before its optimizer does: found by observation, saved, restored, compared.

Megatron's own ``RerunStateMachine`` (megatron-core 0.19.2) saves random states and batches alone,
since it expects the same numbers again. Here the numbers of the first attempt may be wrong, so
whatever counts or sums up numbers has to be as before. Nothing is listed by name:

- buffers and attributes of the model's modules: counts of tokens, biases of experts, the largest
  attention logits, scales of FP8
- data in the namespaces of megatron-core and in its classes, and what its objects there hold: MoE
  metrics, sums of losses for the log, scales of losses, ``RerunStateMachine``'s counts, the tracker
  of random states
- random states: Python's, NumPy's, torch's on the host and on the device, and generators found

Gradients and the sharding's own state are not among it. A tensor is restored in place, since graphs
keep the address of what they write to, and then set again where it was.
"""

from __future__ import annotations

import dataclasses
import random
import sys
from collections import Counter, defaultdict, deque
from collections.abc import Collection, Iterable, Iterator
from enum import Enum
from functools import cache
from typing import Any, NamedTuple

import numpy
import torch
from torch import nn

from megatron_cg.backends.cuda_cleanup import device_generator
from megatron_cg.restore import Restores, put_back
from megatron_cg.upstream.te_if_loaded import rng_states

_CORE, _SHARDING = "megatron.core", "megatron.core.distributed"
_KNOWN = frozenset({"megatron", "transformer_engine"})
_SCRATCH = frozenset({"GlobalMemoryBuffer", "GlobalSymmetricMemoryBuffer"})
"""Classes of megatron-core whose tensors are written before they are read."""
_PARTS = frozenset({dict, list, set, deque, defaultdict, Counter, tuple})
_DATA = _PARTS | {bool, int, float, complex, str, bytes, type(None), torch.Tensor, torch.Generator}
_OF_TORCH = frozenset(vars(nn.Module())) - {"training"}
_DEPTH = 4
_ABSENT: Any = object()
_Parts = list[tuple[Any, Any]]


class _Holder(NamedTuple):
    """Something with parts: a container, the attributes of an object, or a class."""

    name: str
    """What its parts are, with {} in the place of a part's name."""
    parts: Any
    whole: bool = True
    """Whether every part counts, or data alone."""
    is_compared: bool = True

    def items(self) -> _Parts:
        """The parts that count, by name or place."""
        parts = vars(self.parts) if isinstance(self.parts, type) else self.parts
        if not hasattr(parts, "items"):
            return list(enumerate(parts))
        if self.whole:
            return list(parts.items())
        return [
            (key, value)
            for key, value in parts.items()
            if type(value) in _DATA and key not in _OF_TORCH and key[:2] != "__"
        ]

    def restore(self, saved: _Parts) -> None:
        """Let the parts be what :meth:`items` returned before, no more and no less."""
        now, parts = self.items(), self.parts
        if list(map(_identity, now)) == list(map(_identity, saved)):
            return
        if not isinstance(parts, dict | type):
            parts.clear()
            (parts.update if isinstance(parts, set) else parts.extend)([v for _, v in saved])
            return
        for key in dict(now).keys() - dict(saved).keys():
            delattr(parts, key) if isinstance(parts, type) else parts.pop(key)
        for key, value in saved:
            setattr(parts, key, value) if isinstance(parts, type) else parts.update({key: value})


def _identity(item: tuple[Any, Any]) -> tuple[Any, int]:
    return item[0], id(item[1])


class StepState:
    """The state of ``model``, its modules, and of megatron-core, as it is now.

    Attributes of modules in ``graphed``, which replays do not set, are restored and not compared.
    """

    def __init__(self, model: Iterable[nn.Module], graphed: Collection[nn.Module] = ()) -> None:
        self._model, self._graphed = tuple(model), graphed
        holders = self._holders()
        self._saved = [(holder, holder.items()) for holder in holders]
        found = _found(holders, torch.Tensor)
        copies = [torch.empty_like(tensor) for _, tensor in found]
        if copies:
            with torch.no_grad():  # with few launches, since a step with a bound of rows saves too
                torch._foreach_copy_(copies, [tensor for _, tensor in found])
        self._tensors = [(n, t, t.data, copy) for (n, t), copy in zip(found, copies, strict=True)]
        self._random = [(name, one, one.get_state()) for name, one in _generators(holders)]
        self._host = random.getstate(), numpy.random.get_state()

    def restore(self) -> None:
        """Put everything back; may be called again. Raises NotRestoredError at its end."""
        with Restores() as stack:
            stack.restore("NumPy's random state", numpy.random.set_state, self._host[1])
            stack.restore("Python's random state", random.setstate, self._host[0])
            for name, generator, state in self._random:
                stack.restore(f"the random state {name}", generator.set_state, state)
            for name, tensor, memory, values in self._tensors:
                stack.restore(name, put_back, tensor, memory, values)
            for holder, parts in self._saved:
                stack.restore(holder.name.format("..."), holder.restore, parts)

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """What the step has made of all this by now, by name."""
        holders = self._holders()
        yield from _found((one for one in holders if one.is_compared), torch.Tensor)
        for name, generator in _generators(holders):
            yield f"random state {name}", generator.get_state()

    def _holders(self) -> list[_Holder]:
        seen = set[int]()
        holders: list[_Holder] = []
        for root in self._model:
            for path, module in root.named_modules(prefix="module"):
                compared = module not in self._graphed
                holders += _below(_Holder(f"{path}.{{}}", vars(module), False, compared), seen)
                holders.append(_Holder(f"buffer {path}.{{}}", module._buffers))
        for name, found in _namespaces(len(sys.modules)):
            holders += _below(_Holder(f"{name}.{{}}", found, False), seen, objects=True)
        return holders


def _below(
    holder: _Holder, seen: set[int], depth: int = _DEPTH, *, objects: bool = False
) -> Iterator[_Holder]:
    """``holder``, and what its parts hold; with ``objects`` also objects of known packages."""
    yield holder
    parts = vars(holder.parts) if isinstance(holder.parts, type) else holder.parts
    for key, value in holder.items() if not objects or holder.whole else list(parts.items()):
        inner: Any = None
        if type(value) in _PARTS:
            inner = value
        elif objects and type(value) not in _DATA and _is_followed(value):
            inner = vars(value)
        if (
            inner is not None
            and depth
            and id(inner) not in seen
            and (holder.whole or str(key)[:2] != "__")
        ):
            seen.add(id(inner))
            name = f"{holder.name.format(key)}[{{}}]"
            below = _Holder(name, inner, is_compared=holder.is_compared)
            yield from _below(below, seen, depth - 1, objects=True)


def _is_followed(value: Any) -> bool:
    kind = type(value)
    return (
        hasattr(value, "__dict__")
        and kind.__module__.partition(".")[0] in _KNOWN
        and kind.__name__ not in _SCRATCH
        and not isinstance(value, nn.Module | torch.Tensor | type | Enum)
    )


@cache
def _namespaces(_modules: int) -> list[tuple[str, Any]]:
    """The namespaces of megatron-core's modules and its classes that have data, by name."""
    found: list[tuple[str, Any]] = []
    for path, module in list(sys.modules.items()):
        if path.startswith(_CORE) and not path.startswith(_SHARDING):
            found.append((path, vars(module)))
            for name, value in vars(module).items():
                if isinstance(value, type) and value.__module__ == path and _has_data(value):
                    found.append((f"{path}:{name}", value))
    return found


def _has_data(kind: type) -> bool:
    if issubclass(kind, Enum) or dataclasses.is_dataclass(kind) or hasattr(kind, "_is_protocol"):
        return False
    return bool(_Holder("", kind, whole=False).items())


def _found[T](holders: Iterable[_Holder], kind: type[T]) -> list[tuple[str, T]]:
    """The parts of exactly this class, each once."""
    parts = {
        id(value): (holder.name.format(key), value)
        for holder in holders
        for key, value in holder.items()
        if type(value) is kind
    }
    return list(parts.values())


def _generators(holders: Iterable[_Holder]) -> Iterator[tuple[str, torch.Generator]]:
    yield "of the host", torch.default_generator
    yield from (("of the device", one) for one in device_generator())
    yield from (found for found in rng_states().items() if isinstance(found[1], torch.Generator))
    yield from _found(holders, torch.Generator)
