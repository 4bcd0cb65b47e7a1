"""What a unit's passes depend on and leave behind, observed while the backend warms it up.

Every pass is observed by what is cheap: collectives, the memory of parameters, inputs written in
place, buffers replaced. A module of a class that this package does not know is a stranger: then
the passes of the warmup run under a dispatch mode (``operations.py``) and a profile function
(``python_state.py``), and each thing they read, write or leave has a row in the table of
``replay/guard.py``, or the capture ends with its name.

Note [A made-up pass must leave no trace]
    Warmup and capture run the unit's own code on made-up inputs. All memory that it writes is
    restored after the capture, and so is Python state. Frozen parameters may be as large as the
    model, so those of one unit at a time are copied, and restored right after its pass.

Note [What a graph cannot write]
    A graph writes to addresses. If a module makes another tensor its buffer, the graph writes to
    the tensor of the capture, and the module never sees the new values. If a module writes into an
    input, the graph writes into its own copy, and the caller never sees the new values.

Note [Which warmup pass counts]
    Code may behave differently in its first pass, such as when it fills a cache. So the last pass
    before the capture shows what replays would miss.
"""

import inspect
import weakref
from collections import Counter
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn.modules import module as torch_module

from megatron_cg.capture.operations import (
    Operations,
    Use,
    bytes_in,
    collectives_so_far,
    holder_of,
    key_of,
    overlap,
    recomputed_draws_refused,
    seeds_refused,
)
from megatron_cg.capture.python_state import (
    KNOWN,
    Change,
    PythonState,
    attribute,
    is_known,
    tensor_hooks_observed,
)
from megatron_cg.capture.transaction import frozen_kept
from megatron_cg.errors import CaptureError
from megatron_cg.fsdp.sharding import REPLACED
from megatron_cg.replay.borders import local, ranks_of_meshes
from megatron_cg.replay.guard import GLOBAL_HOOKS, SDPA, Addresses, Entry, KeySet, Switches, Watched
from megatron_cg.replay.unit import Unit
from megatron_cg.restore import Restores, values_kept
from megatron_cg.upstream.backward_pass import in_backward_pass
from megatron_cg.upstream.patch import add_observer, combine_undos

_MARK = "grad_added_to_main_grad"


class Observer:
    """Observes the passes of one unit in a capture.

    ``args`` and ``kwargs`` are its samples. ``borrowed`` are those that are the model's own
    tensors, which a graph writes itself. ``watched`` is other memory that the graph addresses: of
    unsharded parameters, since the sharded ones of the time between steps are in no graph.
    """

    def __init__(
        self,
        unit: Unit,
        args: Sequence[torch.Tensor],
        kwargs: Mapping[str, torch.Tensor],
        borrowed: Iterable[torch.Tensor],
        watched: Iterable[Watched] = (),
    ) -> None:
        self._unit, self._error = unit, unit.refused
        self._device_type = args[0].device.type
        own = {id(tensor) for tensor in borrowed}
        labels = [f"number {index}" for index in range(len(args))]
        labels[: len(unit.inputs)] = unit.inputs[: len(args)]
        self._samples = dict([*zip(labels, args, strict=True), *kwargs.items()])
        self._inputs = {name: t for name, t in self._samples.items() if id(t) not in own}
        self._paths = {module: path for path, module in unit.layer.named_modules()}
        self._buffers = [
            (owner._buffers, name, buffer, attribute(path, name))
            for owner, path in self._paths.items()
            for name, buffer in owner._buffers.items()
            if buffer is not None
        ]
        self._versions: dict[str, int] = {}
        self._pass, self._undo = ExitStack(), Restores()
        self._before = 0
        self._changes: list[Change] = []
        self._of_hooks: list[Change] = []
        self._of_backward: list[Change] = []
        self._state: PythonState | None = None
        self._operations = Operations(unit.layer)
        self.addresses = Addresses(watched)
        self.collectives = unit.collectives
        """Whether the unit's graph contains collectives; final once it is captured."""
        self.entries: list[Entry] = []
        """The rows for all that the code of strange modules reads."""
        self._writes: list[torch.UntypedStorage] = []
        self._attributes = [
            (Entry(vars(owner), name, "attribute", f"attribute {attribute(path, name)}"), value)
            for owner, path in self._paths.items()
            for name, value in vars(owner).items()
            if isinstance(value, torch.Tensor) and is_known(owner) and owner in unit.graphed
        ]
        known = KNOWN if unit.sets_attributes else KNOWN | {"torch"}
        if any(not is_known(module, known) for module in unit.graphed):
            graphed = {self._paths.get(module, "?"): module for module in unit.graphed}
            self._state = PythonState(graphed)
            self._refuse_global_hooks()

    @property
    def asks_for_gradients(self) -> bool:
        """Whether code of strange modules may do something else for an input without gradient."""
        return self._state is not None and self._state.asks_for_gradients

    def key_sets(self) -> list[KeySet]:
        """What strange modules may not get later; known code reads nothing that somebody adds."""
        if self._state is None:
            return []
        names, kinds = self._state.own_names, ("module", "parameter", "buffer")
        strange = [m for m in self._unit.graphed if m in self._paths and not is_known(m)]
        found: list[tuple[nn.Module, str, Any, Any]]
        found = [(m, kind, getattr(m, f"_{kind}s"), None) for m in strange for kind in kinds]
        found += [(m, "attribute", vars(m), names) for m in strange]
        return [
            KeySet(keys, kind, f"{kind} {attribute(self._paths[m], '')}", reads)
            for m, kind, keys, reads in found
        ]

    def begun(self, *, forward: bool, warmup: bool) -> None:
        """A pass begins, after the hooks that come before it."""
        self.addresses.note(forward=forward)
        if self._state is not None and forward and not warmup:
            self._conclude(self._state)
        if forward:
            self._versions = {name: version_of(t) for name, t in self._inputs.items()}
            self._pass.enter_context(frozen_kept(self._unit.graphed))
        elif warmup:
            self._pass.enter_context(recomputed_draws_refused(self._unit, self._device_type))
            self._pass.enter_context(self._several_passes_refused())
        if self._state is not None and warmup:
            self._pass.enter_context(self._observed(self._state, forward))
        self._before = collectives_so_far()

    def ended(self, *, forward: bool) -> None:
        """It has ended. Raises CaptureError for what a graph cannot do."""
        self.collectives = self.collectives or collectives_so_far() > self._before
        self._pass.close()
        if forward:
            self._refuse_writes()
        else:
            self._refuse_marked_weights()

    def stop(self) -> None:
        """Stop observing a pass that failed. Safe to call twice."""
        with suppress(CaptureError):  # Another error is under way.
            self._pass.close()

    def restore(self) -> None:
        """Restore what passes have changed; nobody observes any more. Safe to call twice."""
        self._undo.close()

    @contextmanager
    def kept(self) -> Iterator[None]:
        """Restore on exit what a pass changes besides buffers and frozen parameters."""
        with ExitStack() as stack:
            if self._state is not None:
                stack.enter_context(self._state.kept())
                writes = (("memory that it writes to", bytes_in(s)) for s in self._writes)
                stack.enter_context(values_kept(writes))
            yield

    def forget_passes(self) -> None:
        """Hold samples and notes no longer: the unit is captured."""
        # What the passes have replaced is a result, such as a module's last loss.
        self.entries += [row for row, one in self._attributes if row.holder.get(row.key) is one]
        self._attributes = []
        self._samples, self._inputs, self._changes = {}, {}, []
        self._operations = Operations(self._unit.layer)

    @contextmanager
    def _observed(self, state: PythonState, forward: bool) -> Iterator[None]:
        """See Note [Which warmup pass counts]: each pass replaces what the last one showed."""
        is_first = not state.names
        if is_first:
            parameters = {key_of(parameter) for parameter in self._unit.layer.parameters()}
            self._operations = Operations(self._unit.layer, parameters)
            self._undo.callback(self._operations.restore)
        with ExitStack() as stack:
            stack.callback(self._operations.restore_parameters)
            if forward:
                self._operations.forget()
                stack.enter_context(seeds_refused(self._unit, self._device_type, state.values()))
                self._of_hooks.clear()
                stack.enter_context(tensor_hooks_observed(state, self._of_hooks.append))
            self._operations.notes_reads = forward
            stack.enter_context(self._operations)
            state.begin()
            try:
                yield
            finally:
                state.end()
                if is_first:
                    self._undo.callback(state.restorer())
        changes = [*state.changes()]
        if forward:
            self._changes, self._of_backward = changes, []
        else:
            self._of_backward = [c for c in changes if not isinstance(c.after, torch.Tensor)]

    def _conclude(self, state: PythonState) -> None:
        """The warmup is over: refuse what has no row, and make the rows."""
        self._refuse_changes()
        self._refuse_leftovers()
        self.entries = list(state.entries())
        if "scaled_dot_product_attention" in state.names:
            self.entries.append(Entry(Switches(SDPA), "", "switches", "the kernels of SDPA"))
        for row in self.entries:
            if hasattr(type(row.holder.get(row.key)), "__next__"):
                raise self._error(
                    f"reads {row.what}, an iterator",
                    "A replay runs no Python, so it would not go on. Pass its values as arguments.",
                )
        replaced = {(id(change.holder), change.key) for change in self._changes}
        self.entries = [e for e in self.entries if (id(e.holder), e.key) not in replaced]
        layer = self._unit.layer
        tensors = [*self._samples.values(), *layer.parameters(), *layer.buffers()]
        reached = {key_of(tensor) for tensor in tensors} | ranks_of_meshes(layer)
        # What the last forward pass read that is no sample, parameter or buffer.
        for key, (memory, use) in self._operations.reads.items():
            if key in reached or memory.expired():
                continue
            ways = list(state.ways(partial(_holds, key=key)))
            if not ways and use.package in KNOWN:
                continue
            self._refuse_foreign(key, use, reached=bool(ways))
            self.entries += [entry for way in ways for entry in way]
            names = [(way[-1].holder.get(way[-1].key), way[-1].what) for way in ways]
            self.addresses.add(Watched(tensor, what, REPLACED) for tensor, what in names)
        self.addresses.note(forward=True)
        # What known code writes elsewhere is its own affair, such as how many rows it had.
        uses = (use for use in self._operations.writes if use.package not in KNOWN)
        written = {key_of(use.tensor): use.tensor for use in uses}
        self._writes = [
            tensor.untyped_storage() for key, tensor in written.items() if key not in reached
        ]

    def _refuse_foreign(self, key: int, use: Use, *, reached: bool) -> None:
        where = f"({use.operation} in {use.place})" if use.place else f"({use.operation})"
        replaced = [c for c in self._changes if _holds(c.before, key=key)]
        if replaced:
            raise self._error(
                f"keeps state in {replaced[0].what}: it reads what an earlier pass has set there",
                "Keep it in a buffer and write into that, such as self.state.copy_(...), or pass "
                "it as an argument and return the new one.",
            )
        if use.requires_grad:
            raise self._error(
                f"uses a tensor that needs a gradient and is no parameter of it {where}",
                "A graph returns no gradient for it. Pass it as an argument, or make it a "
                "parameter of the unit.",
            )
        on_host = use.device_type == "cpu" and self._device_type != "cpu"
        if on_host and use.tensor.dim():
            raise self._error(f"reads a tensor of the host {where}", "Keep it on the device.")
        if not reached:
            raise self._error(
                f"reads a tensor of shape {tuple(use.tensor.shape)} that is no argument, parameter "
                f"or buffer {where}, and where its code gets it from is unknown",
                "Pass it as an argument, or keep it in a buffer.",
            )

    def _refuse_changes(self) -> None:
        if self._of_hooks:
            raise self._error(
                f"registers a hook on a tensor in its forward pass that changes "
                f"{self._of_hooks[0].what}",
                "A replay does not call it. Let hooks on tensors compute gradients and no more.",
            )
        if self._of_backward:
            raise self._error(
                f"changes {self._of_backward[0].what} in its backward pass",
                "A replay runs no Python, so it would stay as it was at capture. Count outside of "
                "the unit.",
            )
        owners = {id(vars(module)) for module in self._unit.graphed}
        for change in self._changes:
            if not isinstance(change.after, torch.Tensor) or id(change.holder) not in owners:
                raise self._error(
                    f"changes {change.what} in its forward pass",
                    "A replay runs no Python, so it would stay as it was at capture. Return the "
                    "value, set a tensor as an attribute of the module, or count outside of the "
                    "unit.",
                )
            if not self._unit.sets_attributes:
                raise self._error(
                    f"sets {change.what} in its forward pass",
                    "A replay would not set it. Return the value, or write into a buffer.",
                )

    def _refuse_leftovers(self) -> None:
        kept = {
            key_of(value)
            for module in self._unit.graphed
            for value in vars(module).values()
            if isinstance(value, torch.Tensor)
        }
        left = [memory for memory in self._operations.left() if memory._cdata not in kept]
        held = holder_of(left)
        if held is not None:
            raise self._error(
                f"keeps a tensor of its forward pass in {held}",
                "A replay would not put its own there. Return it, or set it as an attribute of "
                "the module.",
            )

    @contextmanager
    def _several_passes_refused(self) -> Iterator[None]:
        """Refuse an input or weight to which a backward pass and one inside it add gradients."""
        counts = Counter[str]()
        with ExitStack() as undo:
            for name, leaf in (*self._samples.items(), *self._unit.layer.named_parameters()):
                if leaf.requires_grad:
                    count = partial(lambda name, _gradient: counts.update([name]), name)
                    undo.callback(leaf.register_hook(count).remove)
            yield
        several = [name for name, count in counts.items() if count > 1]
        if several:
            raise self._error(
                f"adds to the gradient of {several[0]} in {counts[several[0]]} backward passes, of "
                "which one runs inside the other",
                "A graph returns their sum, which rounds otherwise beside other microbatches. Take "
                "use_reentrant=False in torch.utils.checkpoint, or use it in one of them only.",
            )

    def _refuse_writes(self) -> None:
        """See Note [What a graph cannot write]."""
        for owner, name, buffer, label in self._buffers:
            if owner.get(name) is not buffer:
                raise self._error(
                    f"replaces its buffer {label} by another tensor in its forward pass, but a "
                    "graph always writes to the tensor of the capture",
                    f"Write into the buffer instead, such as self.{name}.copy_(...).",
                )
        writes = [use.tensor for use in self._operations.writes]
        for label, tensor in self._inputs.items():
            counted = version_of(tensor) != self._versions[label]
            if counted or any(overlap(tensor, write) for write in writes):
                raise self._error(
                    f"writes into its argument {label}, but a graph would write into its own copy",
                    "Return the new values instead, keep them in a buffer, or write into a clone.",
                )
        for label, weight in self._unit.layer.named_parameters():
            is_written = any(overlap(weight, write) for write in writes)
            if is_written and weight.requires_grad:
                raise self._error(
                    f"writes into its trainable parameter {label} in its forward pass",
                    "Passes on made-up inputs would change it. Write after the optimizer's step.",
                )
            self._unit.written.update([weight] * is_written)

    def _refuse_marked_weights(self) -> None:
        """Refuse a layer that writes a weight's gradient into ``main_grad`` by itself.

        With gradient-accumulation fusion it does so, and sets a mark from Python at which
        Megatron's and Megatron-FSDP's hooks look. A replay would not set it, and what its graph
        returns as the gradient is a placeholder.
        """
        named = self._unit.layer.named_parameters()
        marked = [(name, weight) for name, weight in named if getattr(weight, _MARK, False)]
        for _, weight in marked:
            setattr(weight, _MARK, False)
        if marked:
            raise CaptureError(
                f"{self._unit.name} writes the gradient of {marked[0][0]} into main_grad by itself "
                f"(gradient-accumulation fusion; {len(marked)} such weights), so a replay would "
                "return a placeholder instead. Add --no-gradient-accumulation-fusion, or build the "
                "layer with fuse_wgrad_accumulation=False."
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


def _holds(value: Any, *, key: int | None) -> bool:
    return isinstance(value, torch.Tensor) and key_of(value) == key


class StaticInputs:
    """Observes whole training steps to find the inputs of layers, by name, that never change.

    For example, a rotary table is computed once and passed to every layer in every step. A graph
    that is captured with a synthetic sample needs a copy of the table into the graph's own memory
    before each replay. A graph that is captured with the table itself needs no copy.

    Note [A borrowed input is never written]
        TE copies an input at another address into the static input (``Graphed.forward``). Here that
        would overwrite the model's own table. So the guard forbids the replay if a borrowed input
        is not at the captured address; see ``replay/guard.py``.
    """

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
        return combine_undos(add_observer(layer, self._called) for layer in self._layers)

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
