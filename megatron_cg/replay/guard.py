"""The guard of one graph: a table whose rows are compared before each replay.

A graph holds addresses, and the operations that Python code led to when it was captured. An eager
pass follows whatever has changed since; a replay does not. The rows are what the capture observed
(``capture/observer.py``), the cheap ones first: inputs, modes, objects, key sets, hooks and memory.
``docs/how-it-works.md`` lists them.

Note [The same object, or the same value]
    A row is compared by identity first, at about 40 ns. A plain value that was set again to the
    same value, also of a container, is the same (``plain.py``). Containers may be changed in
    place, so their contents are compared too, by identity first as well.

Note [What a graph does with its inputs]
    TE 2.20.2 (``graph.py``, ``functionalized`` and ``Graphed.forward``) copies each tensor into
    the captured static input. It checks neither shape nor dtype, and ``copy_`` broadcasts and
    converts. It silently ignores a keyword that was not in the samples. So all of this is checked.

Note [One address a bucket]
    Under Megatron-FSDP each unshard sets all parameters of a bucket to views of one storage
    (megatron-fsdp 0.6.1, ``DataParallelBuffer.fetch_bucket`` with ``set_param_data``). So one
    parameter per bucket is checked; with ``optim`` and ``optim_grads``, where FSDP does not do so,
    every parameter.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, is_dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.modules import module as torch_module
from torch.overrides import _get_current_function_mode_stack
from torch.utils._device import DeviceContext
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from megatron_cg.hooks import HookKind, describe, is_idle
from megatron_cg.replay.plain import (
    LIBRARIES,
    Contents,
    is_container,
    is_plain,
    package_of,
    same_value,
)
from megatron_cg.upstream.symbols import Symbol

GLOBAL_HOOKS = (
    "_global_forward_hooks",
    "_global_forward_pre_hooks",
    "_global_backward_hooks",
    "_global_backward_pre_hooks",
)
"""Registries of hooks on every module; torch 2.11, ``torch/nn/modules/module.py``."""
RELIES_ON = tuple(
    Symbol(f"torch.nn.modules.module:{name}", "hooks on every module") for name in GLOBAL_HOOKS
)

_RAW = ("_data", "_transpose", "_rowwise_data", "_columnwise_data", "_scale_inv")
"""Where TE 2.20.2 keeps the memory of a quantized tensor; its own address has no meaning."""
_NEEDS = "requires_grad"
_FIELDS = ("shape", "dtype", "stride", "device", _NEEDS)
"""Properties of a tensor that must be equal, by the name of the clause."""

NOT_INPUTS = frozenset({"is_first_microbatch", "cuda_graph_stream", "cuda_graph_event"})
"""Keywords that control a replay and are not inputs of the graph: ``GraphableMegatronModule.
_get_te_cuda_graph_replay_args`` of megatron-core 0.19.2 adds them."""

_REPLACED = (
    "It was replaced after capture, and the graph still uses the old one. Replace it before "
    "training begins, or delete the graphs and capture again."
)
CAUSES = {
    "structure": "A graph takes the tensors of capture, and would silently ignore another input.",
    "shape": "The sequence length or micro batch is another than at capture.",
    "dtype": "The precision of this input has changed.",
    "stride": "The strides of the input have changed, for example by a transpose or expand.",
    "device": "The input is on another device.",
    "requires_grad": "The graph computes gradients for the inputs that needed one at capture.",
    "training": "It was switched alone, but the graph would run it in the old mode. Switch the "
    "whole model with model.train() and model.eval().",
    "state": "Python code of the unit reads it, and a replay runs no Python. Set it before "
    "training begins, or keep it in a tensor that is written in place.",
    "frozen": "The graph computes no gradient for a weight that was frozen at capture, and code of "
    "the unit may ask. Set requires_grad before training begins, or capture again.",
    "autocast": "The graph computes in the precision of capture. Keep one torch.autocast around "
    "the same passes in all steps, with Megatron none, or train without graphs.",
    "autocast cache": "The graph casts a weight once for all its uses, or for each, as at capture. "
    "Keep cache_enabled of torch.autocast in all steps.",
    "determinism": "The graph holds the kernels of capture. Set it before training begins.",
    "modes": "A replay runs no operation in Python. Enter the mode or transform around passes of a "
    "model without graphs.",
    "default dtype": "The graph makes tensors of the dtype of capture. Set it before training "
    "begins.",
    "fp8": "The graph quantizes as it did at capture. Keep one FP8 format and recipe for the "
    "whole run, and call the layer inside Megatron's own FP8 context.",
    "sharing": "Without a view, autograd sums and torch.autocast casts together with uses outside "
    "of the layer. Keep a full backward hook on it, or remove it before training begins.",
    "switches": "The graph holds the kernels of capture. Set it before the capture, and around "
    "whole steps.",
    "recorded": "The model was called with output_attentions, output_router_logits or the like, "
    "and a replay runs no hook inside. Call it without in training, also in its config.",
    "setting": "Code of the layer reads it, and a replay runs no code. Set it before the capture, "
    "or delete the graphs and capture again.",
    "hooks": "A replay runs no Python of the modules inside the graph, so such a hook is not "
    "called. Put it on the layer itself, where it runs around every replay.",
}
# Asked before each replay, where finding them in torch takes longer than the calls.
_transform = torch._C._functorch.peek_interpreter_stack
_function_modes = torch._C._len_torch_function_stack
_dispatch_modes = torch._C._len_torch_dispatch_stack
_saved_tensors_hooks = torch._C._autograd._top_saved_tensors_default_hooks
_MODES = ("autocast", "autocast cache", "determinism", "default dtype", "modes", "fp8")


@dataclass(frozen=True)
class Mismatch:
    """What a guard found: ``subject`` was ``expected`` at capture, and is ``actual`` now."""

    clause: str
    """The guard's clause that found it, such as ``shape`` or ``address``."""
    subject: str
    """What it is about, such as ``argument hidden_states``."""
    expected: str
    actual: str
    cause: str
    """The likely cause, and what to type or do instead."""

    @property
    def key(self) -> tuple[str, str]:
        """Mismatches with equal keys are reported only once."""
        return self.clause, self.subject

    def text(self, layer: str) -> str:
        return (
            f"{layer}: {self.subject} was {self.expected} at capture and "
            f"is {self.actual} now ({self.clause}). {self.cause}"
        )


@dataclass(frozen=True)
class Entry:
    """One object that must stay the same, or plain value."""

    holder: Any
    """A dictionary, or another object whose ``get(key)`` returns the object or None."""
    key: Any
    clause: str
    what: str
    """What it is, in words."""
    counts: Callable[[Any], bool] | None = None
    """Whether what takes the place of None or an integer counts; without it, everything does."""


@dataclass(frozen=True)
class KeySet:
    """A dictionary of a module to which nothing may be added."""

    keys: Mapping[Any, Any]
    clause: str
    what: str
    reads: Callable[[Any], bool] = lambda _key: True
    """Whether a key matters."""


class Inputs:
    """Structure and metadata of one graph's inputs.

    They are taken from the samples, as they are after capture. ``names`` are those of positional
    samples. ``same_gradients`` says that all inputs that needed a gradient at capture must need
    one, and ``any_stride_of_one`` that the stride of a dimension of size 1 does not matter.
    """

    def __init__(
        self,
        args: Sequence[torch.Tensor],
        kwargs: Mapping[str, torch.Tensor],
        names: Sequence[str] = ("hidden_states",),
        *,
        same_gradients: bool = False,
        any_stride_of_one: bool = False,
    ) -> None:
        self._same_gradients, self._any_stride_of_one = same_gradients, any_stride_of_one
        tensors = [*args, *kwargs.values()]
        storages = [tensor.untyped_storage() for tensor in tensors]
        self.memory = [range(s.data_ptr(), s.data_ptr() + s.nbytes()) for s in storages]
        self._positional = len(args)
        self._keywords = tuple(kwargs)
        self._given: list[str] = []
        """The keywords of the last call that was as at capture."""
        self._names = [*names, *kwargs]
        self._captured = [_fields(tensor) for tensor in tensors]

    def broken(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Mismatch | None:
        """The first input that is not as it was at capture."""
        given = [name for name, value in kwargs.items() if value is not None]
        if given != self._given or len(args) != self._positional:
            if (mismatch := self._structure(args, kwargs)) is not None:
                return mismatch
            self._given = given
        flat = [*args, *[kwargs[name] for name in self._keywords]]
        for tensor, name, captured in zip(flat, self._names, self._captured, strict=True):
            # One comparison for the usual case: this runs for every input of every replay.
            if not isinstance(tensor, torch.Tensor) or captured != (
                tensor.shape,
                tensor.dtype,
                tensor.stride(),
                tensor.device,
                tensor.requires_grad,
            ):
                mismatch = self._other_kind(name, captured, tensor)
                if mismatch is not None:
                    return mismatch
        return None

    def _other_kind(self, name: str, captured: tuple[Any, ...], tensor: Any) -> Mismatch | None:
        if not isinstance(tensor, torch.Tensor):
            return _mismatch("structure", f"argument {name}", "a tensor", described(tensor))
        for clause, before, now in zip(_FIELDS, captured, _fields(tensor), strict=True):
            # An input that needs no gradient any more gets one that nobody reads. But code may look
            # at that: torch's reentrant checkpoint then computes no gradients of weights either.
            is_allowed = clause == "requires_grad" and before and not self._same_gradients
            if clause == "stride" and self._any_stride_of_one:
                pairs = zip(before, now, tensor.shape, strict=True)
                is_allowed = all(size == 1 or old == new for old, new, size in pairs)
            if before != now and not is_allowed:
                return _mismatch(clause, f"{clause} of argument {name}", str(before), str(now))
        return None

    def _structure(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Mismatch | None:
        if len(args) != self._positional:
            subject = "the number of positional arguments"
            return _mismatch("structure", subject, str(self._positional), str(len(args)))
        for name in self._keywords:
            if kwargs.get(name) is None:
                given = "missing" if name not in kwargs else "None"
                return _mismatch("structure", f"argument {name}", "a tensor", given)
        for name, value in kwargs.items():
            if value is not None and name not in self._keywords and name not in NOT_INPUTS:
                return _mismatch("structure", f"argument {name}", "not given", described(value))
        return None


@dataclass(frozen=True)
class Watched:
    """A tensor that a graph reads at a fixed address, its name, and why it might move."""

    tensor: torch.Tensor
    name: str
    cause: str


class Addresses:
    """The tensors of one unit, and their addresses in capture's forward and backward passes.

    A sharding gathers a layer for each of the two anew, maybe elsewhere. In the forward pass also
    the layout and dtype count (``w.data = w.data.t()``): a graph reads memory in those of capture.
    Those of quantized tensors mean nothing.
    """

    def __init__(self, watched: Iterable[Watched] = ()) -> None:
        self._watched: list[Watched] = []
        self._at: dict[bool, list[object]] = {True: [], False: []}
        """What was read in the forward pass, and in the backward pass."""
        self.add(watched)

    def add(self, watched: Iterable[Watched]) -> None:
        """Watch more tensors, of which none is watched already."""
        known = {id(item.tensor) for item in self._watched}
        self._watched += [item for item in watched if id(item.tensor) not in known]
        on_device = any(item.tensor.device.type != "cpu" for item in self._watched)
        rows = [(_reader(one.tensor, on_device=on_device), "memory", one) for one in self._watched]
        for item in self._watched:
            if not is_quantized(item.tensor):
                rows += [(item.tensor.stride, "layout", item), (item.tensor.size, "layout", item)]
                rows.append((partial(getattr, item.tensor, "dtype"), "dtype", item))
                if not isinstance(item.tensor, nn.Parameter):  # They have other rows.
                    rows.append((partial(getattr, item.tensor, _NEEDS), _NEEDS, item))
        self._rows = rows
        reads = [read for read, _, _ in rows]
        self._read = {True: reads, False: reads[: len(self._watched)]}

    def note(self, *, forward: bool) -> None:
        """Record all addresses as a forward or a backward pass begins; the last call counts."""
        self._at[forward] = [read() for read in self._read[forward]]

    def broken(self, *, forward: bool) -> Mismatch | None:
        """The first tensor that has moved, before a replay of that pass."""
        expected, now = self._at[forward], [read() for read in self._read[forward]]
        if now == expected:
            return None
        pairs = zip(self._rows, expected, now, strict=False)
        (_, part, item), *values = next(pair for pair in pairs if pair[1] != pair[2])
        subject = f"the {part} of {item.name} in the {'forward' if forward else 'backward'} pass"
        was, is_now = map(_hex if part == "memory" else str, values)
        if part == _NEEDS:
            return _mismatch("frozen", f"{part} of {item.name}", was, is_now)
        return Mismatch("address", subject, was, is_now, item.cause)


def is_quantized(tensor: torch.Tensor) -> bool:
    """Whether ``tensor`` keeps its values in other tensors, as TE's quantized ones do."""
    return any(isinstance(getattr(tensor, name, None), torch.Tensor) for name in _RAW)


def _reader(tensor: torch.Tensor, *, on_device: bool) -> Callable[[], object]:
    """Return a function that reads the address of ``tensor``, or all addresses if quantized."""
    if on_device and tensor.device.type == "cpu":
        # Kernels of the device got its value at capture, so a change in place counts too.
        return lambda: (tensor.data_ptr(), tensor._version)
    if isinstance(tensor, DTensor):
        return lambda: (tensor._local_tensor.data_ptr(),)  # Others may replace the local one.
    if not is_quantized(tensor):
        return tensor.data_ptr

    def read() -> tuple[int, ...]:
        raw = (getattr(tensor, name, None) for name in _RAW)
        return tuple(part.data_ptr() for part in raw if isinstance(part, torch.Tensor))

    return read


def _hex(address: Any) -> str:
    return ", ".join(map(hex, address if isinstance(address, tuple) else (address,)))


class Hooks:
    """Since a capture, no hook was added to a module inside the graph or removed from one.

    To be made while the unit's hooks are installed. Hooks of the layer run around the replay and
    may change, except one of ``register_backward_hook``. ``moved`` ones inside will run there too.
    """

    def __init__(
        self,
        layer: nn.Module,
        graphed: Iterable[nn.Module],
        moved: Callable[[Callable[..., Any]], bool] = lambda _hook: False,
    ) -> None:
        self._layer = layer
        names = {id(module): name for name, module in layer.named_modules()}
        registries = [
            (getattr(module, kind.value), names.get(id(module), type(module).__name__))
            for module in graphed
            for kind in HookKind
            if module is not layer
        ]
        registries += [(getattr(torch_module, name), f"torch's {name}") for name in GLOBAL_HOOKS]
        # Most registries are empty, and any() over empty dictionaries is the cheapest check.
        hooks = [(hook, name) for registry, name in registries for hook in registry.values()]
        self._recorders = [one for one in hooks if is_idle(one[0]) is not None]
        self._empty = [(r, name) for r, name in registries if all(map(moved, r.values()))]
        self._quiet = [registry for registry, _ in self._empty]
        quiet = set(map(id, self._quiet))
        self._kept = [(r, tuple(r), name) for r, name in registries if id(r) not in quiet]
        of_layer = (layer._backward_hooks, layer._backward_pre_hooks)
        self._viewing = of_layer if any(of_layer) else None
        """The layer's backward hooks, for which torch makes views of its inputs."""

    def broken(self) -> Mismatch | None:
        if any(self._quiet):
            for registry, name in self._empty:
                for hook in registry.values():
                    if not is_idle(hook):
                        return _hooked(name, hook)
        for hook, name in self._recorders:
            if not is_idle(hook):
                return _hooked(name, hook)
        for registry, keys, name in self._kept:
            if tuple(registry) != keys:
                was, now = f"with {len(keys)} hooks", f"with {len(registry)} others"
                return _mismatch("hooks", f"module {name}", was, now)
        if self._viewing is not None and not any(self._viewing):
            subject = "what makes views of the layer's inputs"
            return _mismatch("sharing", subject, "a backward hook", "none")
        if self._layer._is_full_backward_hook is False:
            was = "without register_backward_hook"
            return _mismatch("hooks", "module the layer", was, "with one")
        return None


class Objects:
    """Rows of objects, plain values and keys, which are as they were when this was made."""

    def __init__(self, entries: Iterable[Entry], key_sets: Iterable[KeySet]) -> None:
        self._entries = tuple(entries)
        # Flat, as unpacking inner tuples would take a third of the time of all comparisons.
        numbered = enumerate(self._entries)
        self._objects = [(n, e.holder, e.key, e.holder.get(e.key)) for n, e in numbered]
        containers = {n: Contents(v) for n, _, _, v in self._objects if is_container(v)}
        self._contents = {n: one for n, one in containers.items() if one.can_change}
        self._key_sets = list(key_sets)
        self._keys = [key_set.keys for key_set in self._key_sets]
        self._sizes = [len(keys) for keys in self._keys]
        self._known = [frozenset(keys) for keys in self._keys]

    def broken(self) -> Mismatch | None:
        """The first that is not as it was."""
        for number, holder, key, same in self._objects:
            if holder.get(key) is not same and (other := self._other_object(number)) is not None:
                return other
        for number, contents in self._contents.items():
            value = self._objects[number][-1]
            if not contents.are_in(value):
                return self._changed(number, value, "with other contents")
        if list(map(len, self._keys)) != self._sizes:
            return self._other_keys()
        return None

    def _other_object(self, number: int) -> Mismatch | None:
        _, holder, key, same = self._objects[number]
        now, contents = holder.get(key), self._contents.get(number)
        counts = self._entries[number].counts
        if counts is not None and type(same) in (int, type(None)) and not counts(now):
            return None
        # A container may have been changed before it was replaced: its contents at capture count.
        is_same = same_value(same, now) if contents is None else contents.are_in(now)
        if is_same:
            self._objects[number] = number, holder, key, now
            return None
        return self._changed(number, now, _named(now))

    def _changed(self, number: int, now: Any, actual: str) -> Mismatch:
        entry, same = self._entries[number], self._objects[number][-1]
        if entry.clause == "switches":
            pairs = zip(same.split("; "), now.split("; "), strict=True)
            return _mismatch("switches", entry.what, *next(p for p in pairs if p[0] != p[1]))
        if is_plain(same):
            return _mismatch(entry.clause, entry.what, _named(same), _named(now))
        expected = f"the {type(same).__name__} that was captured"
        if type(same) is type(now) and actual == _named(now):
            actual = f"another {type(now).__name__}"
        return _mismatch(entry.clause, entry.what, expected, actual)

    def _other_keys(self) -> Mismatch | None:
        for number, key_set in enumerate(self._key_sets):
            if len(key_set.keys) == self._sizes[number]:
                continue
            changed = self._known[number] ^ set(key_set.keys)
            if named := sorted(filter(key_set.reads, changed), key=str):
                is_there = named[0] in key_set.keys
                was, now = ("absent", "there") if is_there else ("there", "absent")
                return _mismatch(key_set.clause, f"{key_set.what}{named[0]}", was, now)
            self._sizes[number], self._known[number] = len(key_set.keys), frozenset(key_set.keys)
        return None


class Guard:
    """The table of one graph.

    The modes must now be those of forward passes, but for the backend's state of numerics, such as
    TE's FP8 recipe: that of capture is ``captured_numerics``, and ``numerics`` returns the current
    one. ``autocast`` is the autocast dtype of backward passes.
    """

    def __init__(
        self,
        inputs: Inputs,
        addresses: Addresses,
        *,
        objects: Iterable[Entry],
        key_sets: Iterable[KeySet],
        hooks: Hooks,
        captured_numerics: Any,
        numerics: Callable[[], Any],
        device_type: str,
        autocast: torch.dtype | None,
    ) -> None:
        self.inputs, self.addresses = inputs, addresses
        self._objects, self._hooks = Objects(objects, key_sets), hooks
        self._device_type, self._autocast = device_type, autocast
        self._numerics = numerics
        self._modes = (*self._read_modes()[:-1], captured_numerics)

    def broken(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Mismatch | None:
        """What forbids a forward replay with these arguments, or None."""
        mismatch = self.inputs.broken(args, kwargs)
        if mismatch is None and (now := self._read_modes()) != self._modes:
            mismatch = self._other_mode(now)
        mismatch = mismatch or self._objects.broken() or self._hooks.broken()
        return mismatch or self.addresses.broken(forward=True)

    def broken_in_backward(self) -> Mismatch | None:
        if (now := autocast_of(self._device_type)) != self._autocast:
            subject = f"torch.autocast for {self._device_type} in the backward pass"
            return _mismatch("autocast", subject, _switch(self._autocast), _switch(now))
        return self.addresses.broken(forward=False)

    def _read_modes(self) -> tuple[Any, ...]:
        """In the order of ``_MODES``: what Python code follows, and a replay does not."""
        return (
            autocast_of(self._device_type),
            torch.is_autocast_enabled(self._device_type) and torch.is_autocast_cache_enabled(),
            torch.are_deterministic_algorithms_enabled(),
            torch.get_default_dtype(),
            _around(),
            self._numerics(),
        )

    def _other_mode(self, now: tuple[Any, ...]) -> Mismatch | None:
        for name, before, after in zip(_MODES, self._modes, now, strict=True):
            if before != after:
                autocast = f"torch.autocast for {self._device_type}"
                subject = {"autocast": autocast, "fp8": "the FP8 state"}.get(name, name)
                return _mismatch(name, subject, _switch(before), _switch(after))
        return None


def _around() -> str:
    """What operations of this thread go through in Python: modes of torch, vmap and the like."""
    transform, hooks = _transform(), _saved_tensors_hooks(False)
    if not (transform or hooks or _function_modes() or _dispatch_modes()):
        return "none"
    modes = (*_get_current_function_mode_stack(), *_get_current_dispatch_mode_stack())
    names = [type(one).__name__ for one in modes if not isinstance(one, DeviceContext)]
    # Those of libraries, such as torch's checkpoint, give back what they got.
    if hooks and package_of(getattr(hooks[0], "__module__", None)) not in LIBRARIES:
        names.append("saved_tensors_hooks")
    return ", ".join([*names, *([str(transform.key())] if transform else ())]) or "none"


def autocast_of(device_type: str) -> torch.dtype | None:
    """The dtype of ``torch.autocast`` now; None if it is off."""
    if not torch.is_autocast_enabled(device_type):
        return None
    return torch.get_autocast_dtype(device_type)


def _mismatch(clause: str, subject: str, expected: str, actual: str) -> Mismatch:
    return Mismatch(clause, subject, expected, actual, CAUSES.get(clause, _REPLACED))


def _hooked(name: str, hook: Callable[..., Any]) -> Mismatch:
    """A hook that was added, or one of transformers that has to record something now."""
    if is_idle(hook) is False:
        what = f"the output of module {name}"
        return _mismatch("recorded", what, "not recorded", "recorded by transformers")
    return _mismatch("hooks", f"module {name}", "without hooks", f"with {describe(hook)}")


def _named(value: Any) -> str:
    name = ""
    with suppress(Exception):  # Of a dictionary whose keys are its attributes.
        name = str(getattr(value, "name", ""))
    return "none" if value is None else name or described(value)


def _switch(value: Any) -> str:
    if isinstance(value, bool):
        return "on" if value else "off"
    return "off" if value is None else str(value)


def described(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"a {value.dtype} tensor of shape {tuple(value.shape)}"
    # The values of an object's tensors would be read on the host.
    text = "" if is_dataclass(value) else repr(value)
    return text if 0 < len(text) < 60 else f"a {type(value).__name__}"


def _fields(tensor: torch.Tensor) -> tuple[Any, ...]:
    return tuple(tensor.shape), tensor.dtype, tensor.stride(), tensor.device, tensor.requires_grad
