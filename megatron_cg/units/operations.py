"""What the operations of a unit's passes use besides its inputs: memory and random numbers.

A :class:`Operations` is a dispatch mode, so it sees what torch's dispatcher sees. The kernels of
Transformer Engine are called past it, and so are those of compiled code: what they read is known
from the module tree and the arguments only.

Note [Random numbers]
    A graph is given the seed and offset of its generators at each replay, whatever was set when it
    was captured. And what Python drew then, such as which layers to skip, is in the graph for good.

"""

import gc
import pickle
import random
import sys
import threading
import traceback
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from types import CellType, FrameType
from typing import Any

import torch
from torch import nn
from torch._ops import HigherOrderOperator
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode

from megatron_cg.backends.calls import has_wrapper, place_of, run_inside, tensors_in, written
from megatron_cg.capture.observer import generators_read
from megatron_cg.errors import CaptureError
from megatron_cg.memory.storage import StorageReference
from megatron_cg.replay.borders import local
from megatron_cg.replay.plain import attribute, is_known
from megatron_cg.replay.unit import Unit
from megatron_cg.restore import Restores, write_back
from megatron_cg.upstream.patch import instances, nothing_frozen, replace_function

_MARK = 0x5EED_CA97
"""The seed of all generators while a forward pass is observed."""
_SETTERS = (
    *((owner, name) for owner in (torch, torch.random) for name in ("manual_seed", "seed")),
    *((torch.cuda, name) for name in ("manual_seed", "manual_seed_all", "seed", "seed_all")),
)


@dataclass(frozen=True)
class Use:
    """The first operation that used some memory."""

    tensor: torch.Tensor
    """What it got, on memory that no operation of the pass has made; of a read, without values."""
    operation: str
    place: str
    """The module, file and line of the call."""
    package: str
    """Whose code called it."""
    requires_grad: bool
    device_type: str


_BETWEEN = {"torch", "megatron_cg", *sys.stdlib_module_names}
"""Packages whose frames lie between an operation and the code that called it."""


class Operations(TorchDispatchMode):
    """Notes in its block what operations use; restores nothing by itself.

    ``root`` is the module whose passes run, for the places of calls. Memory with one of the keys
    ``parameters`` may hold something else after the pass.
    """

    supports_higher_order_operators = True

    def __init__(self, root: nn.Module, parameters: Collection[int | None] = ()) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._root, self._parameters = root, frozenset(parameters)
        self.made: dict[int, StorageReference] = {}
        """Memory that operations have made, by its key."""
        self.reads: dict[int, tuple[StorageReference, Use]] = {}
        """Other memory that operations of a forward pass got, by its key."""
        self.writes: list[Use] = []
        """Other memory that operations wrote to, one item for each tensor."""
        self.notes_reads = True
        self._saved: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self._of_pass: list[tuple[torch.Tensor, torch.Tensor]] = []

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Without this, Dynamo would give up for good on code that is first called in the block."""
        return True

    def forget(self) -> None:
        """Begin with another pass; what restores memory is kept."""
        self.made, self.reads, self.writes = {}, {}, []

    def restore(self) -> None:
        """Restore all memory that was written to and that the block has not made."""
        _write_back([*self._saved.values()])
        self._saved.clear()

    def restore_parameters(self) -> None:
        """Restore what the pass that ends has written into parameters."""
        _write_back(self._of_pass)
        self._of_pass.clear()

    def left(self) -> list[torch.UntypedStorage]:
        """The memory made in the block that is still in use."""
        alive = (reference.storage() for reference in self.made.values())
        return [storage for storage in alive if storage is not None]

    def __torch_dispatch__(
        self,
        func: torch._ops.OpOverload,
        types: tuple[type, ...],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if has_wrapper(types):
            return NotImplemented  # Its own operations are seen here.
        kwargs = kwargs or {}
        if FakeTensor in types:
            return func(*args, **kwargs)
        if isinstance(func, HigherOrderOperator):
            return run_inside(self, func, args, kwargs)
        given = list(tensors_in([args, *kwargs.values()]))
        if func is torch.ops.aten.lift_fresh.default:  # torch.tensor(...) has just made it.
            for tensor in given:
                self._note_made(tensor)
        writes = given if func.namespace == "c10d" else written(func, args, kwargs)
        for tensor in writes:
            self._note_write(tensor, func)
        if self.notes_reads:
            for tensor in given:
                self._note_read(tensor, func)
        result = func(*args, **kwargs)
        keys = {key_of(tensor) for tensor in given}
        for tensor in tensors_in(result):
            if key_of(tensor) not in keys:
                self._note_made(tensor)
        return result

    def _note_made(self, tensor: torch.Tensor) -> None:
        key = key_of(tensor)
        if key is not None and key not in self.made:
            self.made[key] = StorageReference(tensor.untyped_storage())

    def _note_read(self, tensor: torch.Tensor, func: torch._ops.OpOverload) -> None:
        key = key_of(tensor)
        if key is not None and key not in self.made and key not in self.reads:
            # Not the tensor: compiled code makes memory unseen, which nobody has after the pass.
            use = replace(self._use(tensor, func), tensor=torch.empty_like(tensor, device="meta"))
            self.reads[key] = StorageReference(tensor.untyped_storage()), use

    def _note_write(self, tensor: torch.Tensor, func: torch._ops.OpOverload) -> None:
        key = key_of(tensor)
        if key is None or key in self.made:
            return
        self.writes.append(self._use(tensor, func))
        if key in self._parameters:
            self._of_pass.append((tensor.data, tensor.detach().clone()))
        elif key not in self._saved:
            memory = bytes_in(tensor.untyped_storage())
            self._saved[key] = memory, memory.clone()

    def _use(self, tensor: torch.Tensor, func: torch._ops.OpOverload) -> Use:
        frames = list(traceback.walk_stack(sys._getframe(2)))
        place = place_of(frames, self._root)
        packages = (str(f.f_globals.get("__name__")).partition(".")[0] for f, _ in frames)
        package = next((name for name in packages if name not in _BETWEEN), "")
        at = str(place) if place is not None else ""
        return Use(tensor, str(func), at, package, tensor.requires_grad, tensor.device.type)


def _write_back(saved: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
    with Restores() as stack:
        for memory, before in saved:
            stack.restore("memory that an operation wrote to", write_back, memory, before)


_CONTAINERS = (list, tuple, dict, set)


def holder_of(memory: Sequence[torch.UntypedStorage]) -> str | None:
    """What holds a tensor on one of these storages, in words; None if no Python object does.

    Frames do not count, nor what only frames hold: those are the variables of a backend that runs
    the passes. Nor do objects of packages that are known.
    """
    keys = {storage._cdata for storage in memory}
    if not keys:
        return None
    with nothing_frozen():
        # Each look at all objects takes some 50 ms, so there are few.
        tensors = [one for one in instances(torch.Tensor) if key_of(one) in keys]
        holders = [
            one
            for one in gc.get_referrers(*tensors)
            if one is not tensors and not isinstance(one, FrameType) and not is_known(one)
        ]
        excused = _held_by_frames_or_known([one for one in holders if isinstance(one, _CONTAINERS)])
    for holder in holders:
        if id(holder) not in excused:
            is_cell = isinstance(holder, CellType)
            return "a variable of a function" if is_cell else f"a {type(holder).__name__}"
    return None


def _held_by_frames_or_known(containers: Sequence[Any]) -> set[int]:
    """Ids of what a frame holds, or what is the ``__dict__`` of an object of a known package."""
    excused: set[int] = set()
    for owner in gc.get_referrers(*containers):
        if isinstance(owner, FrameType):
            excused.update(map(id, gc.get_referents(owner)))
        elif is_known(owner):
            excused.add(id(getattr(owner, "__dict__", None)))
    return excused


def key_of(tensor: torch.Tensor) -> int | None:
    """The key of the tensor's memory; None if it has none, as sparse and meta tensors have.

    Nor has a DTensor of Megatron-FSDP's gradients after ``zero_grad``, which takes its local one.
    """
    tensor = local(tensor)
    if tensor is None or tensor.layout is not torch.strided or tensor.is_meta:
        return None
    key: int = tensor.untyped_storage()._cdata
    return key


def bytes_in(storage: torch.UntypedStorage) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


@contextmanager
def seeds_refused(
    unit: Unit, device_type: str, reached: Iterable[tuple[str, Any]] = ()
) -> Iterator[None]:
    """Observe one forward pass of ``unit``; the caller restores torch's generators.

    ``reached`` are values besides attributes of its modules, by name.

    Raises CaptureError, from the pass or after it: it sets a seed, or Python draws.
    """
    generators = generators_read(unit, device_type)
    for generator in generators:
        generator.manual_seed(_MARK)
    python = _python_generators(unit, reached)
    states = [read() for _, read, _ in python]
    with Restores() as undo:
        for (name, _, write), before in zip(python, states, strict=True):
            undo.restore(name, write, before)
        for owner, name in _SETTERS:
            refuse = _refusing(getattr(owner, name), unit, f"torch.{name}")
            undo.callback(replace_function(owner, name, refuse))
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
