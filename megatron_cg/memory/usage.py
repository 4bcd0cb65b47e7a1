"""Who holds memory that an eager run would not hold, or not all the time, in bytes.

Every storage is counted once, for the first holder that has it. With the allocator's snapshot,
memory that is held is counted apart from memory that is only *addressed*, through a weak reference
into a graph's pool.

Relied on: TE 2.20.2, ``transformer_engine/pytorch/graph.py``: the variables of
``release_static_state``, which each graphed callable keeps in its closure ``helpers``.
megatron-core 0.19.2 and megatron-fsdp 0.6.1: ``ParamAndGradBuffer.parameter_groups`` with their
buffers and allocators, and ``utils.get_global_memory_buffer``, which holds double buffers.
torch 2.11: the fields of ``torch.cuda.memory_snapshot()``.
"""

from __future__ import annotations

import importlib
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from megatron_cg.memory.pools import PoolUse, held_addresses, pools
from megatron_cg.memory.release import gradient_copies
from megatron_cg.upstream.closures import cells_of

if TYPE_CHECKING:
    from megatron_cg.capture.session import Session

logger = logging.getLogger(__name__)

INPUTS, OUTPUTS = "static inputs", "static outputs"
GRAD_OUTPUTS, GRAD_INPUTS = "static grad outputs", "static grad inputs"
_STATIC = {
    "static_input_surface": INPUTS,
    "static_outputs": OUTPUTS,
    "static_grad_outputs": GRAD_OUTPUTS,
    "static_grad_inputs": GRAD_INPUTS,
}
"""TE's variables of a graphed callable."""
_TAPE = {"inputs": INPUTS, "outputs": OUTPUTS, "grad_outputs": GRAD_OUTPUTS} | {
    "grad_inputs": GRAD_INPUTS
}


@dataclass
class Row:
    """Memory of one holder and one kind, in bytes."""

    holder: str
    kind: str
    held: int = 0
    addressed: int = 0
    """Memory that the allocator may give to others."""
    tensors: int = 0


@dataclass(frozen=True)
class MemoryReport:
    """All holders, and the allocator's pools if there is a GPU."""

    rows: tuple[Row, ...]
    pools: tuple[PoolUse, ...] = ()

    @property
    def held(self) -> int:
        """Bytes held, over all rows."""
        return sum(row.held for row in self.rows)

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "rows": [vars(row) for row in self.rows],
            "pools": [pool.as_dict() for pool in self.pools],
        }

    def text(self) -> str:
        """A readable table in MiB; rows of one kind are summed over layers."""
        merged = _merged(self.rows)
        lines = [f"{'holder':<34}{'what':<34}{'held MiB':>12}{'addressed':>12}{'tensors':>9}"]
        lines += [
            f"{row.holder:<34}{row.kind:<34}{_mib(row.held):>12}{_mib(row.addressed):>12}"
            f"{row.tensors:>9}"
            for row in merged
        ]
        lines += [pool.text() for pool in self.pools]
        return "\n".join(lines)


@dataclass
class Tally:
    """Counts storages, each once.

    Args:
        is_held: whether the memory at an address is in use; None means that all of it is.
    """

    is_held: Callable[[int], bool] | None = None
    _rows: dict[tuple[str, str], Row] = field(default_factory=dict)
    _seen: set[int] = field(default_factory=set)

    def add(self, holder: str, kind: str, tensors: Iterable[torch.Tensor | None]) -> None:
        """Count the storages of ``tensors`` that were not counted yet."""
        for tensor in tensors:
            storage = tensor.untyped_storage() if tensor is not None else None
            if storage is None or not storage.nbytes() or storage.data_ptr() in self._seen:
                continue
            # By address: a weak reference of TE is another storage object on the same memory.
            self._seen.add(storage.data_ptr())
            row = self._rows.setdefault((holder, kind), Row(holder, kind))
            row.tensors += 1
            if self.is_held is None or self.is_held(storage.data_ptr()):
                row.held += storage.nbytes()
            else:
                row.addressed += storage.nbytes()

    def rows(self) -> tuple[Row, ...]:
        """All rows, in the order in which holders were added."""
        return tuple(self._rows.values())


def report(session: Session) -> MemoryReport:
    """Count the memory of a session's graphs and of its Megatron-FSDP.

    The session may be in any phase; without graphs, only the buffers are counted.
    """
    segments = torch.cuda.memory_snapshot() if torch.cuda.is_available() else []
    tally = Tally(held_addresses(segments) if segments else None)
    fsdp = session._sharding.megatron_fsdp
    # First: the model's memory that a graph only reads does not belong to the graph.
    if fsdp is not None:
        _add_fsdp(tally, fsdp)
    else:
        tally.add("model", "parameters", session._sharding.wrapped.parameters())
    for unit in session._units:
        for graph in getattr(unit.layer, "cuda_graphs", ()):
            for kind, tensors in static_tensors(graph).items():
                # Graphs do not own the parameters among them.
                own = (t for t in tensors if t is not None and not isinstance(t, nn.Parameter))
                tally.add(unit.name, kind, own)
    return MemoryReport(tally.rows(), tuple(pools(segments)))


def log_report(session: Session, when: str) -> None:
    """Log a report, if debug messages are logged."""
    if logger.isEnabledFor(logging.DEBUG):
        logger.debug("memory %s:\n%s", when, report(session).text())


def static_tensors(graph: Any) -> dict[str, Sequence[torch.Tensor | None]]:
    """Tensors of a graphed callable by kind: TE's, the tape's, or one of them behind its guard.

    Empty for a callable that was reset or is of another type.
    """
    inner = vars(graph).get("graph", graph)
    recorded = vars(inner).get("_recorded")
    if recorded is not None:
        return {kind: getattr(recorded, name) for name, kind in _TAPE.items()}
    helpers = _closure(inner).get("helpers")
    cells = _closure(getattr(helpers, "release_static_state", None))
    return {kind: cells[name] for name, kind in _STATIC.items() if name in cells}


def optimizer_tensors(optimizer: Any) -> Iterator[torch.Tensor]:
    """The states of a Megatron optimizer, chained or not, or of a torch one."""
    for chained in getattr(optimizer, "chained_optimizers", ()):
        yield from optimizer_tensors(chained)
    inner = getattr(optimizer, "optimizer", None)
    if inner is not None:
        yield from optimizer_tensors(inner)
        return
    for state in getattr(optimizer, "state", {}).values():
        for value in state.values() if isinstance(state, Mapping) else ():
            if isinstance(value, torch.Tensor):
                yield getattr(value, "_local_tensor", value)


def _add_fsdp(tally: Tally, fsdp: Any) -> None:
    store = fsdp.param_and_grad_buffer
    kinds = (
        ("model_weight_buffer", "weights"),
        ("transpose_weight_buffer", "weights, transposed"),
        ("main_weight_buffer", "main weights"),
        ("main_grad_buffer", "main gradients"),
        ("hfsdp_helper_wbuf", "weights of the inner group"),
        ("hfsdp_helper_wtbuf", "weights of the inner group, transposed"),
        ("hfsdp_helper_gbuf", "gradients of the inner group"),
    )
    for name, kind in kinds:
        buffers = (getattr(group, name, None) for group in store.parameter_groups)
        tally.add("FSDP", kind, (getattr(buffer, "data", None) for buffer in buffers))
    tally.add("FSDP", "gradients cast for the optimizer", gradient_copies(fsdp))
    for (name, _), tensor in _pooled_buffers(fsdp).items():
        owner, asymmetric, _ = name.partition("_not_fit_in_fixed_pool")
        kind = "persistent buffers" if asymmetric else "double buffers"
        tally.add("FSDP", f"{kind}, {owner.rstrip('_0123456789')}", [tensor])
    for allocator in _allocators(store):
        buckets = getattr(allocator, "buckets", {}).values()
        tally.add("FSDP", "buckets gathered or reduced now", (bucket.data for bucket in buckets))
    tally.add("FSDP", "gradients left on parameters", (p.grad for p in store.params))


def _pooled_buffers(fsdp: Any) -> dict[tuple[str, torch.dtype], torch.Tensor]:
    """Buffers of FSDP's fixed pools by name and dtype, of all models of this process."""
    home = type(fsdp).__module__.rpartition(".")[0]
    utils = importlib.import_module(f"{home}.utils")
    buffers: dict[tuple[str, torch.dtype], torch.Tensor] = utils.get_global_memory_buffer().buffer
    return {key: tensor for key, tensor in buffers.items() if key[0].startswith(("fsdp", "hsdp"))}


def _allocators(store: Any) -> list[Any]:
    """The allocators of temporary buckets of ``store``, each once."""
    found = [store.weight_alloc, store.transpose_weight_alloc, store.main_grad_alloc]
    found.append(getattr(store, "hsdp_grad_comm_alloc", None))
    for group in store.parameter_groups:
        buffers = (group.model_weight_buffer, group.main_grad_buffer, group.hsdp_comm_gbuf)
        found += [getattr(buffer, "temporary_bucket_allocator", None) for buffer in buffers]
    found += [getattr(allocator, "backup_allocator", None) for allocator in found]
    return list({id(one): one for one in found if one is not None}.values())


def _closure(function: Any) -> dict[str, Any]:
    """The values of the function's closure variables, by name."""
    return {name: cell.cell_contents for name, cell in cells_of(function).items()}


def _merged(rows: Iterable[Row]) -> list[Row]:
    """Rows of layers, summed by kind."""
    found: dict[tuple[str, str], Row] = {}
    for row in rows:
        holder = "graphs" if row.kind in _STATIC.values() else row.holder
        total = found.setdefault((holder, row.kind), Row(holder, row.kind))
        total.held += row.held
        total.addressed += row.addressed
        total.tensors += row.tensors
    return list(found.values())


def _mib(nbytes: int) -> str:
    return f"{nbytes / 2**20:,.1f}"
