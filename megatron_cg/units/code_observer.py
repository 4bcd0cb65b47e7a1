"""Observes the code of modules whose classes this package does not know, while a unit warms up.

The passes of the warmup run under a dispatch mode (``operations.py``) and a profile function
(``python_state.py``). Each thing that they read, write or leave has a row in the guard
(``replay/guard.py``), or the capture ends with its name.

Note [Which warmup pass counts]
    Code may behave differently in its first pass, such as when it fills a cache. So the last pass
    before the capture shows what replays would miss.
"""

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn.modules import module as torch_module

from megatron_cg.fsdp.sharding import REPLACED
from megatron_cg.replay.borders import ranks_of_meshes
from megatron_cg.replay.guard import GLOBAL_HOOKS, SDPA, Addresses, Entry, KeySet, Switches, Watched
from megatron_cg.replay.plain import KNOWN, attribute, is_known
from megatron_cg.replay.unit import Unit
from megatron_cg.restore import Restores, values_kept
from megatron_cg.units.operations import (
    Operations,
    Use,
    bytes_in,
    holder_of,
    key_of,
    seeds_refused,
)
from megatron_cg.units.python_state import Change, PythonState, tensor_hooks_observed


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
        self._paths = {module: path for path, module in unit.layer.named_modules()}
        graphed = {self._paths.get(module, "?"): module for module in unit.graphed}
        self._state = PythonState(graphed)
        self._operations = Operations(unit.layer)
        self._undo = Restores()
        self._changes: list[Change] = []
        self._of_hooks: list[Change] = []
        self._of_backward: list[Change] = []
        self.entries: list[Entry] = []
        """The rows for all that the code reads."""
        self._writes: list[torch.UntypedStorage] = []
        self._refuse_global_hooks()

    @property
    def asks_for_gradients(self) -> bool:
        """Whether the code may do something else for an input without gradient."""
        return self._state.asks_for_gradients

    def key_sets(self) -> list[KeySet]:
        """What these modules may not get later; known code reads nothing that somebody adds."""
        names, kinds = self._state.own_names, ("module", "parameter", "buffer")
        unknown = [m for m in self._unit.graphed if m in self._paths and not is_known(m)]
        found: list[tuple[nn.Module, str, Any, Any]]
        found = [(m, kind, getattr(m, f"_{kind}s"), None) for m in unknown for kind in kinds]
        found += [(m, "attribute", vars(m), names) for m in unknown]
        return [
            KeySet(keys, kind, f"{kind} {attribute(self._paths[m], '')}", reads)
            for m, kind, keys, reads in found
        ]

    @contextmanager
    def observed(self, *, forward: bool) -> Iterator[None]:
        """Observe one pass, instead of the last; see Note [Which warmup pass counts]."""
        state, is_first = self._state, not self._state.names
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

    def conclude(self) -> None:
        """The warmup is over: refuse what has no row, and make the rows."""
        state = self._state
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
            self._addresses.add(Watched(tensor, what, REPLACED) for tensor, what in names)
        self._addresses.note(forward=True)
        # What known code writes elsewhere is its own affair, such as how many rows it had.
        uses = (use for use in self._operations.writes if use.package not in KNOWN)
        written = {key_of(use.tensor): use.tensor for use in uses}
        self._writes = [
            tensor.untyped_storage() for key, tensor in written.items() if key not in reached
        ]

    def writes(self) -> list[torch.Tensor]:
        """What operations of the last forward pass wrote to that they had not made."""
        return [use.tensor for use in self._operations.writes]

    @contextmanager
    def kept(self) -> Iterator[None]:
        """Restore on exit what a pass changes besides buffers and frozen parameters."""
        writes = (("memory that it writes to", bytes_in(s)) for s in self._writes)
        with self._state.kept(), values_kept(writes):
            yield

    def restore(self) -> None:
        """Restore what passes have changed; nobody observes any more. Safe to call twice."""
        self._undo.close()

    def forget(self) -> None:
        """Hold samples and notes no longer: the unit is captured."""
        self._samples, self._changes = {}, []
        self._operations = Operations(self._unit.layer)

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
