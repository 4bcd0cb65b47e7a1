"""Trains a step by graphs and, if there is a reason, once more eagerly.

A reason is that a rank had more rows than the graphs have room for (``--cg-moe-rows``,
``--cg-moe-stash``), or that the step is verified (``--cg-verify-steps``): then the digests of all
numbers that it leaves for the optimizer are compared. Training continues with the eager numbers.

Note [Numbers that differ by themselves]
    Without deterministic algorithms two eager steps differ too. So a difference then counts only if
    a second eager step has the same number as the first. With them, a second one that differs shows
    that the step changes something that is not restored.

Note [What a step changes before its optimizer does]
    The numbers of the first attempt may be wrong, so what counts or sums up numbers has to be as
    before. Nothing is listed by name:

    - buffers and attributes of the model's modules, of their classes and of objects that they have:
      counts of tokens, biases of experts, scales of FP8
    - data in the namespaces of megatron-core and in its classes, and what its objects there hold:
      MoE metrics, sums and scales of losses, counts, the tracker of random states
    - random states: Python's, NumPy's, torch's on the host and on the device, and generators found

    Gradients and the sharding's own state are not among it. A tensor is restored in place, since
    graphs keep the address of what they write to, and then set again where it was.
"""

from __future__ import annotations

import copy
import dataclasses
import random
import sys
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from enum import Enum
from functools import cache, partial
from operator import is_
from typing import TYPE_CHECKING, Any

import numpy
import torch
from torch import nn
from torch.utils._pytree import keystr, tree_flatten_with_path

from megatron_cg.capture.session import Phase, Session
from megatron_cg.consensus.exchange import TIMEOUT
from megatron_cg.errors import STEP_DIFFERS
from megatron_cg.replay.plain import LIBRARIES, RECORDS, is_known, is_plain, restore_contents
from megatron_cg.replay.unit import Unit
from megatron_cg.replay.verify import Digests
from megatron_cg.restore import Restores, device_generator, put_back
from megatron_cg.telemetry import step_repeated, step_verified
from megatron_cg.upstream.patch import set_attribute, undone_after
from megatron_cg.upstream.te import rng_states

if TYPE_CHECKING:
    from megatron_cg.experts.row_bound import RowBound

_SHOWN = 8
_CAUSE = "No guard saw it, so the cause may lie between units: please report it, with this line."
_UNCHANGED = (
    "Two eager trainings of it differ too: it changes what is not restored, such as weights, or a "
    "count or iterator of the loop. Change that outside of the step that is verified, or keep it "
    "in a module's buffer or attribute."
)


class Batches:
    """The batches of one step, which can be read again."""

    def __init__(self, iterator: Any) -> None:
        self._iterator = iterator
        self.taken: list[Any] = []
        """What the step has taken from it."""
        self._next = 0

    def __iter__(self) -> Batches:
        return self

    def __next__(self) -> Any:
        if self._next == len(self.taken):
            self.taken.append(next(self._iterator))
        self._next += 1
        # Megatron's functions add to the dictionary of a batch.
        return copy.copy(self.taken[self._next - 1])

    def __getattr__(self, name: str) -> Any:
        return getattr(self._iterator, name)

    def rewind(self) -> None:
        """Begin again with the first batch of the step."""
        self._next = 0


def train_step(
    session: Session,
    by_graphs: Callable[[], Any],
    eagerly: Callable[[], Any],
    *,
    bound: RowBound | None = None,
    number: int | None = None,
    state: StepState | None = None,
) -> Any:
    """Train all passes of a step, and return what they return.

    ``eagerly`` trains them once more, with the same batches and cleared gradients. ``number`` is
    the step's in the log. All ranks call it. Raises ReplayMismatchError as ``step_differed``.
    """
    mismatches, counters = session.mismatches, session.counters
    verifies = mismatches.verifies_step
    if mismatches.conditions.all_eager or not (verifies or bound):
        return by_graphs()
    state = state or _saved(session, again=bound is not None)
    result = by_graphs()
    excess = bound.exceeded() if bound is not None else None
    if excess is None and not verifies:
        return result
    replayed = Digests(_numbers(session, state, result)) if excess is None else None
    del result

    def repeated() -> Any:
        state.restore()
        with undone_after(set_attribute(mismatches.conditions, "all_eager", True)):
            return eagerly()

    if excess is not None:
        step_repeated(number, excess)
        counters.repeated += 1
    eager_passes = counters.eager
    result = repeated()
    if replayed is None:
        return result
    eager = Digests(_numbers(session, state, result))
    found = replayed.differences(eager)
    differs = mismatches.on_any_rank("a verified step", bool(found), TIMEOUT)
    unstable: list[str] = []
    if differs:
        result = repeated()
        unstable = eager.differences(Digests(_numbers(session, state, result)))
    if differs and not torch.are_deterministic_algorithms_enabled():
        found = [name for name in found if name not in unstable]
        differs, unstable = bool(found), []
        differs = mismatches.on_any_rank("a verified step, again", differs, TIMEOUT)
    counters.steps_verified, counters.eager = counters.steps_verified + 1, eager_passes
    step_verified(number, str(eager))
    if differs:
        mismatches.step_differed(_text(number, found, eager, _UNCHANGED if unstable else _CAUSE))
    return result


def _saved(session: Session, *, again: bool) -> StepState:
    """What a step may change, as it is now; with ``again`` a later call takes less time."""
    if session.step_state is not None:
        session.step_state.save()
        return session.step_state
    state = StepState([session.sharding.network], session.units)
    if again and session.phase is Phase.REPLAYING:
        session.on_close(set_attribute(session, "step_state", state))
    return state


def _numbers(session: Session, state: StepState, result: Any) -> Iterator[tuple[str, Any]]:
    """What a step has left, the last layer's gradients first."""
    for path, value in tree_flatten_with_path(result)[0]:
        if isinstance(value, torch.Tensor) or is_plain(value):
            yield f"result{keystr(path)}", value
    for name, gradient in session.sharding.gradients():
        yield f"gradient {name}", gradient
    yield from state.tensors()


def _text(number: int | None, found: list[str], eager: Digests, cause: str) -> str:
    step = "A step" if number is None else f"Step {number}"
    more = f" and {len(found) - _SHOWN} more" if len(found) > _SHOWN else ""
    names = ", ".join(found[:_SHOWN]) + more if found else "none on this rank, see another's log"
    return (
        f"{step}, {STEP_DIFFERS}: {names}. Gradients are "
        f"named in the order of the backward pass, the last layer first. Compared: {eager}. {cause}"
    )


_CORE, _SHARDING = "megatron.core", "megatron.core.distributed"
_KNOWN = frozenset({"megatron", "transformer_engine"})
_SCRATCH = frozenset({"GlobalMemoryBuffer", "GlobalSymmetricMemoryBuffer"})
"""Classes of megatron-core whose tensors are written before they are read."""
_CONTAINERS = frozenset({dict, list, set, deque, defaultdict, Counter, tuple})
_STATE = _CONTAINERS | {torch.Tensor, torch.Generator}
_DATA = _STATE | {bool, int, float, complex, str, bytes, type(None)}
_OF_TORCH = frozenset(vars(nn.Module())) - {"training"}
_DEPTH = 4


class _Holder:
    """Something with parts, and what they are now: a container, attributes, or a class.

    ``name`` says what a part is, with {} for its key. Parts of a ``namespace`` count if they are
    data; its functions and modules stay as they are.
    """

    def __init__(
        self, name: str, parts: Any, *, namespace: bool = False, is_compared: bool = True
    ) -> None:
        self.name, self.parts, self.is_compared = name, parts, is_compared
        self._namespace, self._has_keys = namespace, isinstance(parts, dict | type)
        self._now: Any = vars(parts) if isinstance(parts, type) else parts
        """What has the parts, always as they are."""
        self.saved = self._copy()

    def has_changed(self) -> bool:
        """Whether its parts are not the same objects in the same order; this runs in each step."""
        now, saved = self._now, self.saved
        if len(now) != len(saved) or (self._has_keys and not all(map(is_, now, saved))):
            return True
        return not all(map(is_, now.values() if self._has_keys else now, saved.values()))

    def below(self, written_by: str) -> list[tuple[Any, Any]]:
        """The parts that may change in place, with objects of classes ``written_by`` these."""
        saved = self.saved
        kinds = set(map(type, saved.values()))
        kinds = {kind for kind in kinds if kind in _STATE or _is_followed(kind, written_by)}
        found = [pair for pair in saved.items() if type(pair[1]) in kinds]
        return [pair for pair in found if _is_own(pair[0])] if self._namespace else found

    def restore(self) -> None:
        """Let the parts be the same objects again, no more and no less."""
        if not self.has_changed():
            return
        saved, now, parts = self.saved, self._copy(), self.parts
        if not self._namespace:
            restore_contents(parts, saved if self._has_keys else saved.values())
            return
        for key in now.keys() - saved.keys():
            if _is_data(key, now[key]):
                delattr(parts, key) if isinstance(parts, type) else parts.pop(key)
        for key, value in saved.items():
            other = now.get(key, self)
            if other is not value and (_is_data(key, value) or _is_data(key, other)):
                change = partial(setattr, parts) if isinstance(parts, type) else parts.__setitem__
                change(key, value)

    def _copy(self) -> dict[Any, Any]:
        return dict(self._now if self._has_keys else enumerate(self._now))


def _is_data(name: str, value: Any) -> bool:
    return type(value) in _DATA and _is_own(name)


def _is_own(name: str) -> bool:
    return name not in _OF_TORCH and name[:2] != "__"


class _Root:
    """A holder, and the holders, tensors and generators in it; ``written_by`` as in ``below``."""

    def __init__(self, name: str, parts: Any, written_by: str, **kind: bool) -> None:
        self.holders = list[_Holder]()
        self.tensors = list[tuple[str, torch.Tensor, bool]]()
        """With their names, and whether they are compared."""
        self.generators = list[tuple[str, torch.Generator]]()
        self._seen = set[int]()
        self._add(_Holder(name, parts, **kind), written_by, _DEPTH)
        self.again = partial(_Root, name, parts, written_by, **kind)
        """Looks into it anew."""

    def _add(self, holder: _Holder, written_by: str, depth: int) -> None:
        self.holders.append(holder)
        for key, value in holder.below(written_by):
            if id(value) in self._seen:
                continue
            self._seen.add(id(value))
            name, compared = holder.name.format(key), holder.is_compared
            if type(value) is torch.Tensor:
                self.tensors.append((name, value, compared))
            elif type(value) is torch.Generator:
                self.generators.append((name, value))
            elif depth:
                inner = value if type(value) in _CONTAINERS else vars(value)
                one = _Holder(f"{name}[{{}}]", inner, is_compared=compared)
                self._add(one, _below(type(value), written_by), depth - 1)


class StepState:
    """The state of ``model``, its modules, and of megatron-core, as it is when it was last saved.

    Attributes in graphs of Megatron's layers are restored and not compared, as replays set none;
    nor are random states of a device where units do not leave them as eager passes do.
    """

    def __init__(self, model: Iterable[nn.Module] = (), units: Sequence[Unit] = ()) -> None:
        self._model = tuple(model)
        self._graphed = {m for unit in units if not unit.is_plain_module for m in unit.graphed}
        self._written = [parameter for unit in units for parameter in unit.written]
        self._draws = all(unit.draws_as_eager for unit in units)
        self._roots, self._spaces, self._children = list[_Root](), list[Any](), list[_Holder]()
        self._tensors = list[tuple[str, torch.Tensor, torch.Tensor, torch.Tensor]]()
        self.save()

    def save(self) -> None:
        """Save what is now; looks only into what has other parts than when it was last saved."""
        self._roots = self._look()
        self._tensors.clear()
        tensors = [(name, one) for name, one, _ in self._found_tensors(self._roots)]
        copies = [torch.empty_like(tensor) for _, tensor in tensors]
        if copies:
            with torch.no_grad():  # with few launches, since a step with a bound of rows saves too
                torch._foreach_copy_(copies, [tensor for _, tensor in tensors])
        self._tensors = [(h, t, t.data, c) for (h, t), c in zip(tensors, copies, strict=True)]
        found = self._found_generators(self._roots)
        self._random = [(name, one, one.get_state()) for name, one in found]
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
            for root in self._roots:
                for holder in root.holders:
                    stack.restore(holder.name.format("..."), holder.restore)

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """What the step has made of all this by now, by name."""
        roots = self._look()
        yield from ((name, one) for name, one, compared in self._found_tensors(roots) if compared)
        for name, generator in self._found_generators(roots):
            if self._draws or generator.device.type == "cpu":
                yield f"random state {name}", generator.get_state()

    def _look(self) -> list[_Root]:
        """All roots, those without changes as they were."""
        spaces, roots = _namespaces(len(sys.modules)), self._roots
        if spaces is not self._spaces or _have_changed(self._children):
            self._spaces = spaces
            roots = list(self._all())
            self._children = [_Holder("", module._modules) for _, module in _modules(self._model)]
        return [root.again() if _have_changed(root.holders) else root for root in roots]

    def _all(self) -> Iterator[_Root]:
        classes = {type(module): None for _, module in _modules(self._model)}
        for path, module in _modules(self._model):
            yield _Root(f"buffer {path}{{}}", module._buffers, "packages")
            own, name = module not in self._graphed, f"attribute {path}{{}}"
            yield _Root(name, vars(module), "users", namespace=True, is_compared=own)
        kinds = dict.fromkeys(kind for one in classes for kind in one.__mro__)
        for kind in (k for k in kinds if not is_known(k, LIBRARIES)):
            yield _Root(f"attribute {kind.__name__}.{{}}", kind, "users", namespace=True)
        for path, space in self._spaces:
            yield _Root(f"{path}.{{}}", space, "packages", namespace=True)

    def _found_tensors(self, roots: list[_Root]) -> Iterable[tuple[str, torch.Tensor, bool]]:
        """Each once, with its name and whether it is compared."""
        own = (("a frozen parameter", one, True) for one in self._written)
        inside = (one for root in roots for one in root.tensors if _has_memory(one[1]))
        return _once((*own, *inside))

    @staticmethod
    def _found_generators(roots: list[_Root]) -> Iterable[tuple[str, torch.Generator]]:
        found = [("of the host", torch.default_generator)]
        found += [("of the device", one) for one in device_generator()]
        found += [one for one in rng_states().items() if type(one[1]) is torch.Generator]
        found += [one for root in roots for one in root.generators]
        return _once(found)


def _have_changed(holders: Iterable[_Holder]) -> bool:
    return any(holder.has_changed() for holder in holders)


def _once[T: tuple[Any, ...]](found: Iterable[T]) -> Iterable[T]:
    """Of those with the same second part the first."""
    first: dict[int, T] = {}
    for one in found:
        first.setdefault(id(one[1]), one)
    return first.values()


def _below(kind: type, written_by: str) -> str:
    """Whose objects are followed in one of ``kind``.

    An attribute of a module may lead to all of Megatron, such as its configuration; a container
    there has the state of FP8. Objects of users may lead anywhere, such as to an optimizer.
    """
    if kind in _CONTAINERS:
        return "users and packages" if "users" in written_by else written_by
    return "packages" if "packages" in written_by and is_known(kind, _KNOWN) else ""


def _has_memory(tensor: torch.Tensor) -> bool:
    """Whether its values can be copied: it is dense, and nobody has freed its memory."""
    is_dense = tensor.layout is torch.strided and not tensor.is_nested
    return is_dense and (tensor.numel() == 0 or tensor.untyped_storage().nbytes() > 0)


def _modules(roots: Iterable[nn.Module]) -> Iterator[tuple[str, nn.Module]]:
    """As ``named_modules``, in less time, and without what has the sharding's own state."""
    left, seen = [("", root) for root in roots], set[int]()
    while left:
        path, module = left.pop()
        if id(module) not in seen:
            seen.add(id(module))
            if type(module).__name__ != "MegatronFSDP":
                yield path, module
            children = module._modules.items()
            left += [(f"{path}{name}.", child) for name, child in children if child is not None]


@cache
def _is_followed(kind: Any, written_by: str) -> bool:
    """Whether state may be in attributes of objects of this class."""
    known = is_known(kind, _KNOWN) and kind.__name__ not in _SCRATCH
    wanted = "packages" in written_by and known
    wanted = wanted or ("users" in written_by and not is_known(kind, RECORDS))
    others = (nn.Module, torch.Tensor, type, Enum)
    return wanted and kind.__dictoffset__ != 0 and not issubclass(kind, others)


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
    return any(type(value) in _DATA and name[:2] != "__" for name, value in vars(kind).items())
