"""Observes the code of modules whose classes this package does not know, while a unit warms up.

The passes of the warmup run under a dispatch mode, :class:`Operations`, and a profile function
(``python_state.py``). Each thing that they read, write or leave has a row in the guard
(``replay/guard.py``), or the capture ends with its name. Kernels of Transformer Engine and of
compiled code are called past the mode: what they read is known from modules and arguments only.
"""

import gc
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from types import CellType, FrameType, SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn.modules import module as torch_module
from torch.nn.utils import parametrize

from megatron_cg.backends.calls import CallMode, place_of, tensors_in, written
from megatron_cg.backends.driver import StorageReference
from megatron_cg.capture.observer import generators_read
from megatron_cg.errors import CaptureError
from megatron_cg.fsdp.sharding import REPLACED
from megatron_cg.replay.borders import RUN_BACKWARD, in_backward_pass, local, ranks_of_meshes
from megatron_cg.replay.guard import GLOBAL_HOOKS, Addresses, Entry, Watched
from megatron_cg.replay.plain import KNOWN, LIBRARIES, is_deep, is_known, package_of
from megatron_cg.replay.settings import SDPA, Switches
from megatron_cg.replay.unit import Unit
from megatron_cg.restore import Restores, values_kept, write_back_all
from megatron_cg.units.held import functions_in, instances, leaves_held, nothing_frozen
from megatron_cg.units.python_state import PythonState
from megatron_cg.upstream import patch

_MARK = 0x5EED_CA97
"""The seed of all generators while a forward pass is observed."""
_SETTERS = (
    *((owner, name) for owner in (torch, torch.random) for name in ("manual_seed", "seed")),
    *((torch.cuda, name) for name in ("manual_seed", "manual_seed_all", "seed", "seed_all")),
)


@dataclass(frozen=True)
class Use:
    """An operation that used memory which none of the pass has made, without the tensor.

    Compiled code makes memory unseen, which nobody has after the pass.
    """

    shape: torch.Size
    operation: str
    place: str
    """The module, file and line of the call."""
    package: str
    """Whose code called it."""
    requires_grad: bool
    device_type: str


class _Write(NamedTuple):
    """An operation wrote to a tensor. Unlike a tuple it is no holder for :func:`holder_of`."""

    tensor: torch.Tensor
    by: Use


class _Copy(NamedTuple):
    memory: torch.Tensor
    before: torch.Tensor  # what it held before an operation wrote to it


_BETWEEN = {"torch", "megatron_cg", *sys.stdlib_module_names}
"""Packages whose frames lie between an operation and the code that called it."""


class Operations(CallMode):
    """Notes what memory operations in its block use; restores nothing by itself.

    ``root`` is the module whose passes run.
    """

    def __init__(self, root: nn.Module) -> None:
        super().__init__()
        self._root = root
        self._parameters: set[int | None] = set()
        """The keys of memory that may hold something else after the pass."""
        self.made: dict[int, StorageReference] = {}
        """Memory that operations have made, by its key."""
        self.reads: dict[int, tuple[StorageReference, Use]] = {}
        """Other memory that operations of a forward pass got, by its key, and the first of them."""
        self.writes: list[_Write] = []
        """Other memory that operations wrote to."""
        self.chosen_by_gradients = False
        """Whether an operation of a forward pass was chosen by what needs a gradient."""
        self._has_transposed = self._has_folded = False  # See :meth:`_note_choice`.
        self._notes_reads = True
        self._saved: dict[int, _Copy] = {}
        self._of_pass: list[_Copy] = []

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Without this, Dynamo would give up for good on code that is first called in the block."""
        return True

    def begin(self, *, forward: bool) -> None:
        """A pass begins, a forward pass with notes of its own; what restores memory is kept."""
        self._parameters = {key_of(parameter) for parameter in self._root.parameters()}
        self._notes_reads = forward
        if forward:
            self.made, self.reads, self.writes = {}, {}, []

    def restore(self) -> None:
        """Restore all memory that was written to and that the block has not made."""
        write_back_all(self._saved.values())
        self._saved.clear()

    def restore_parameters(self) -> None:
        """Restore what the pass that ends has written into parameters."""
        write_back_all(self._of_pass)
        self._of_pass.clear()

    def left(self) -> list[torch.UntypedStorage]:
        """The memory made in the block that is still in use."""
        alive = (reference.storage() for reference in self.made.values())
        return [storage for storage in alive if storage is not None]

    def run(self, func: torch._ops.OpOverload, args: Any, kwargs: dict[str, Any]) -> Any:
        given = list(tensors_in([args, *kwargs.values()]))
        if func is torch.ops.aten.lift_fresh.default:  # torch.tensor(...) has just made it.
            for tensor in given:
                self._note_made(tensor)
        writes = given if func.namespace == "c10d" else written(func, args, kwargs)
        for tensor in writes:
            self._note_write(tensor, func)
        if self._notes_reads:
            for tensor in given:
                self._note_read(tensor, func)
        result = func(*args, **kwargs)
        keys = {key_of(tensor) for tensor in given}
        for tensor in tensors_in(result):
            if key_of(tensor) not in keys:
                self._note_made(tensor)
        if self._notes_reads:
            self._note_choice(func, given, result)
        return result

    def _note_choice(self, func: Any, given: Sequence[torch.Tensor], result: Any) -> None:
        """Note what torch (2.11) chooses otherwise if a matrix or a mask needs no gradient.

        ``matmul`` folds a batch into rows for a matrix that needs one, else only if that copies
        nothing and the batch comes first. It transposes one that comes second. Attention with a
        mask that needs one is not that of cuDNN, and on the CPU it is not fused.
        """
        name = func._schema.name.removeprefix("aten::")
        transposed, folded = self._has_transposed, self._has_folded
        self._has_transposed = name == "transpose" or (transposed and name == "t")
        self._has_folded = False
        if name in ("view", "_unsafe_view") and result.dim() == 2:
            sizes, steps = given[0].shape[1:-1], given[0].stride()
            flat = all(a == b * n for a, b, n in zip(steps, steps[1:], sizes, strict=False))
            self._has_folded = transposed or not flat or name == "_unsafe_view"
        elif name in ("mm", "mv"):
            self.chosen_by_gradients |= folded and given[1].requires_grad
        elif name.startswith("_scaled_dot_product"):
            self.chosen_by_gradients |= any(mask.requires_grad for mask in given[3:])
        self.chosen_by_gradients |= name == "_safe_softmax"  # of attention that is not fused

    def _note_made(self, tensor: torch.Tensor) -> None:
        key = key_of(tensor)
        if key is not None and key not in self.made:
            self.made[key] = StorageReference(tensor.untyped_storage())

    def _note_read(self, tensor: torch.Tensor, func: torch._ops.OpOverload) -> None:
        key = key_of(tensor)
        if key is not None and key not in self.made and key not in self.reads:
            reference = StorageReference(tensor.untyped_storage())
            self.reads[key] = reference, self._use(tensor, func)

    def _note_write(self, tensor: torch.Tensor, func: torch._ops.OpOverload) -> None:
        key = key_of(tensor)
        if key is None or key in self.made:
            return
        self.writes.append(_Write(tensor, self._use(tensor, func)))
        if key in self._parameters:
            self._of_pass.append(_Copy(tensor.data, tensor.detach().clone()))
        elif key not in self._saved:
            memory = bytes_in(tensor.untyped_storage())
            self._saved[key] = _Copy(memory, memory.clone())

    def _use(self, tensor: torch.Tensor, func: torch._ops.OpOverload) -> Use:
        frames = list(traceback.walk_stack(sys._getframe(2)))
        at = str(place_of(frames, self._root) or "")
        packages = (package_of(f.f_globals.get("__name__")) for f, _ in frames)
        package = next((name for name in packages if name not in _BETWEEN), "")
        return Use(tensor.shape, str(func), at, package, tensor.requires_grad, tensor.device.type)


class CodeObserver:
    """Observes the warmup passes of one unit, and makes the rows for what its code reads.

    ``samples`` are its inputs by name. What its code addresses is added to ``addresses``.
    """

    def __init__(
        self, unit: Unit, samples: Mapping[str, torch.Tensor], addresses: Addresses
    ) -> None:
        self._unit, self._error, self._samples = unit, unit.refused, samples
        self._device_type = next(iter(samples.values())).device.type
        self._addresses = addresses
        layer, inside = unit.layer, unit.graphed
        observed = {path: m for path, m in layer.named_modules() if m is layer or m in inside}
        self.state = PythonState(observed, layer.modules(), None if layer in inside else layer)
        self._operations = Operations(unit.layer)
        self._undo = Restores()
        self._undo.callback(self._operations.restore)
        self._changes: dict[str, str | None] = {}
        """The first of the last forward pass, and of the backward pass after it."""
        self.entries: list[Entry] = []
        self._writes: list[torch.UntypedStorage] = []
        self._refuse_global_hooks()

    @contextmanager
    def observed(self, *, forward: bool) -> Iterator[None]:
        """Observe one pass, instead of the last: code may behave differently in its first pass."""
        state, is_first = self.state, not self.state.names
        self._operations.begin(forward=forward)
        with ExitStack() as stack:
            stack.callback(self._operations.restore_parameters)
            if forward:
                stack.callback(questions_refused(self._unit, self._samples))
                stack.enter_context(seeds_refused(self._unit, self._device_type))
                hooks = partial(self._refuse_hook, torch.Tensor.register_hook)
                stack.callback(patch.replace_function(torch.Tensor, "register_hook", hooks))
            else:
                stack.callback(patch.run_instead(RUN_BACKWARD, self._run_backward))
            stack.enter_context(self._operations)
            state.begin()
            try:
                yield
            finally:
                state.end()
                drawn = state.put_back_draws()
                if is_first:
                    self._undo.callback(state.restorer())
        name = "forward" if forward else "backward"
        if drawn:
            raise self._error(
                f"changes {drawn[0]} in its {name} pass",
                "A replay runs no Python, so what was drawn at capture would hold for all steps. "
                "Draw outside of the unit and pass the result as an argument.",
            )
        self._changes = {} if forward else self._changes
        self._changes[name] = next(state.changes(), None)

    def _run_backward(self, run: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run the unit's backward pass, or one inside it."""
        self._unit.nested |= in_backward_pass() and bool(kwargs.get("accumulate_grad"))
        return run(*args, **kwargs)

    def conclude(self) -> None:
        """The warmup is over: refuse what has no row, and make the rows."""
        state = self.state
        state.asks_for_gradients |= self._operations.chosen_by_gradients
        self._refuse_changes()
        self._refuse_leftovers()
        self.entries = list(state.entries())
        graphed, last = self._unit.graphed, [tuple[type, ...]()]

        def classes(_key: str) -> tuple[type, ...]:  # One object as long as they are the same.
            if (now := tuple(map(type, graphed))) != last[0]:
                last[0] = now
            return last[0]

        kinds = SimpleNamespace(get=classes)
        self.entries.append(Entry(kinds, "", "state", "the classes of its modules"))
        if "autocast" in state.own_names:
            default = SimpleNamespace(get=torch.get_autocast_dtype)
            what = "the default dtype of torch.autocast"
            self.entries.append(Entry(default, self._device_type, "state", what))
        if "scaled_dot_product_attention" in state.names:
            self.entries.append(Entry(Switches(SDPA), "", "switches", "the kernels of SDPA"))
        if (cached := "_cache_enabled") in state.names:  # Weights are then computed once.
            self.entries.append(Entry(vars(parametrize), cached, "state", "parametrize.cached"))
        held: dict[int | None, list[Watched]] = {}
        for row in self.entries:
            for leaf in leaves_held(row.holder.get(row.key)):
                if hasattr(type(leaf), "__next__"):
                    raise self._error(
                        f"reads {row.what}, an iterator",
                        "A replay runs no Python, so it would not go on. Pass its values as "
                        "arguments.",
                    )
                if isinstance(leaf, torch.Tensor):
                    held.setdefault(key_of(leaf), []).append(Watched(leaf, row.what, REPLACED))
        deep = (row.what for row in self.entries if is_deep(row.holder.get(row.key)))
        if (beyond := state.beyond or next(deep, None)) is not None:
            raise self._error(
                f"reads {beyond}, which leads to more objects than can be compared",
                "Pass what it needs of them as arguments, or keep that in attributes.",
            )
        layer = self._unit.layer
        tensors = [*self._samples.values(), *layer.parameters(), *layer.buffers()]
        reached = {key_of(tensor) for tensor in tensors} | ranks_of_meshes(layer)
        # What the last forward pass read that is no sample, parameter or buffer.
        for key, (memory, use) in self._operations.reads.items():
            if key in reached or memory.expired():
                continue
            if key in held or use.package not in KNOWN:
                self._refuse_foreign(use, reached=key in held)
                self._addresses.add(held[key])
        self._addresses.note(forward=True)
        # What known code writes elsewhere is its own affair, such as how many rows it had.
        writes = self._operations.writes
        written = {key_of(tensor): tensor for tensor, by in writes if by.package not in KNOWN}
        self._writes = [one.untyped_storage() for key, one in written.items() if key not in reached]

    def writes(self) -> list[torch.Tensor]:
        """What operations of the last forward pass wrote to that they had not made."""
        return [tensor for tensor, _ in self._operations.writes]

    @contextmanager
    def kept(self) -> Iterator[None]:
        """Restore on exit what a pass changes besides buffers and frozen parameters."""
        writes = (("memory that it writes to", bytes_in(s)) for s in self._writes)
        with self.state.kept(), values_kept(writes):
            yield

    def restore(self) -> None:
        """Restore what passes have changed; nobody observes any more. Safe to call twice."""
        self._undo.close()

    def forget(self) -> None:
        """Hold samples and notes no longer: the unit is captured."""
        self._samples, self._changes = {}, {}
        self._operations = Operations(self._unit.layer)

    def _refuse_foreign(self, use: Use, *, reached: bool) -> None:
        where = f"({use.operation} in {use.place})" if use.place else f"({use.operation})"
        if use.requires_grad:
            raise self._error(
                f"uses a tensor that needs a gradient and is no parameter of it {where}",
                "A graph returns no gradient for it. Pass it as an argument, or make it a "
                "parameter of the unit.",
            )
        on_host = use.device_type == "cpu" and self._device_type != "cpu"
        if on_host and use.shape:
            raise self._error(f"reads a tensor of the host {where}", "Keep it on the device.")
        if not reached:
            raise self._error(
                f"reads a tensor of shape {tuple(use.shape)} that is no argument, parameter "
                f"or buffer {where}, and where its code gets it from is unknown",
                "Pass it as an argument, or keep it in a buffer.",
            )

    def _refuse_hook(self, register: Callable[..., Any], tensor: torch.Tensor, hook: Any) -> Any:
        own = [function.__module__ for function in functions_in(hook)] or [type(hook).__module__]
        if any(package_of(module) not in LIBRARIES for module in own):
            raise self._error(
                "registers a hook on a tensor in its forward pass",
                "A replay does not call it. Change gradients in a torch.autograd.Function instead, "
                "or hook a result outside of the unit.",
            )
        return register(tensor, hook)

    def _refuse_changes(self) -> None:
        for name, what in self._changes.items():
            if what is not None:
                raise self._error(
                    f"changes {what} in its {name} pass",
                    "A replay runs no Python, so it would stay as it was at capture. Return the "
                    "value, count outside of the unit, or write into a tensor that it keeps, such "
                    "as self.norm.copy_(...).",
                )

    def _refuse_leftovers(self) -> None:
        if (held := holder_of(self._operations.left())) is not None:
            raise self._error(
                f"keeps a tensor of its forward pass in {held}",
                "A replay would not put its own there. Return it.",
            )

    def _refuse_global_hooks(self) -> None:
        if len(self._unit.graphed) == 1 and self._unit.graphed[0] is self._unit.layer:
            return  # Hooks run around the layer itself.
        for name in GLOBAL_HOOKS:
            for hook in getattr(torch_module, name).values():
                label = getattr(hook, "__qualname__", type(hook).__name__)
                raise self._error(
                    f"has modules inside, for which the hook {label} on all modules "
                    f"(torch's {name}) would not be called",
                    "Register it on the modules that need it, or remove it before the capture.",
                )


def holder_of(memory: Sequence[torch.UntypedStorage]) -> str | None:
    """What holds a tensor on one of these storages, in words; None if no Python object does.

    Frames do not count, nor what only frames hold: those are the variables of a backend that runs
    the passes. Nor do objects of packages that are known, such as notes of what another unit wrote.
    """
    keys = {storage._cdata for storage in memory}
    if not keys:
        return None
    with nothing_frozen():
        # Each look at all objects takes some 50 ms, so there are few.
        tensors = [one for one in instances(torch.Tensor) if key_of(one) in keys]
        found = (one for one in gc.get_referrers(*tensors) if one is not tensors)
        holders = [one for one in found if not isinstance(one, FrameType) and not is_known(one)]
        containers = [one for one in holders if isinstance(one, list | tuple | dict | set)]
        excused = _held_by_frames_or_known(containers)
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
    return int(tensor.untyped_storage()._cdata)


def bytes_in(storage: torch.UntypedStorage) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


@contextmanager
def seeds_refused(unit: Unit, device_type: str) -> Iterator[None]:
    """Observe one forward pass of ``unit``; the caller restores torch's generators.

    Raises CaptureError, from the pass or after it: it sets a seed.
    """
    generators = generators_read(unit, device_type)
    for generator in generators:
        generator.manual_seed(_MARK)
    thread = threading.get_ident()

    def refuse(original: Callable[..., Any], name: str, *args: Any, **kwargs: Any) -> Any:
        if threading.get_ident() == thread:
            raise _sets_a_seed(unit, f"torch.{name}")
        return original(*args, **kwargs)

    with Restores() as undo:
        for owner, name in _SETTERS:
            setter = partial(refuse, getattr(owner, name), name)
            undo.callback(patch.replace_function(owner, name, setter))
        yield
    if any(generator.initial_seed() != _MARK for generator in generators):
        raise _sets_a_seed(unit, "manual_seed of a torch.Generator")


@patch.combined_undo
def questions_refused(unit: Unit, samples: Mapping[str, torch.Tensor]) -> Iterator[patch.Undo]:
    """Refuse code that asks what a capture answers otherwise than training does.

    Samples are leaves of autograd, and weights have no gradient. The pass raises CaptureError.
    """
    given = {id(one): name for name, one in samples.items() if one.requires_grad}
    weights = {id(one): name for name, one in unit.layer.named_parameters()}

    def asked(name: str, of: Mapping[int, str]) -> property:
        own: Any = getattr(torch.Tensor, name)

        def get(tensor: torch.Tensor) -> Any:
            package = package_of(sys._getframe(1).f_globals.get("__name__"))
            if id(tensor) in of and package not in LIBRARIES:
                raise unit.refused(
                    f"reads {of[id(tensor)]}.{name} in its forward pass",
                    "It is another in the capture. Pass what depends on it as an argument.",
                )
            return own.__get__(tensor)

        return property(get, getattr(own, "__set__", None), getattr(own, "__delete__", None))

    for name, of in (("is_leaf", given), ("grad_fn", given), ("grad", given | weights)):
        yield patch.set_attribute(torch.Tensor, name, asked(name, of))


def _sets_a_seed(unit: Unit, name: str) -> CaptureError:
    return unit.refused(
        f"sets a seed in its forward pass ({name})",
        "A replay draws from the state that the generator then has, whatever seed was set. Set it "
        "outside of the unit, or keep a torch.Generator as an attribute and seed it once.",
    )
