"""What a unit's passes depend on and leave behind, observed while the backend warms it up.

Every pass is observed by what is cheap: collectives, the memory of parameters, inputs written in
place, buffers replaced. If a module is of a class that this package does not know, its code is
observed too, by the extension ``units`` (``units/code_observer.py``).

Note [A made-up pass must leave no trace]
    Warmup and capture run the unit's own code on made-up inputs. All memory that it writes is
    restored after the capture, and so is Python state. Frozen parameters may be as large as the
    model, so those of one unit at a time are copied, and restored right after its pass.

Note [Graphs with collectives]
    It is an error in NCCL if a collective is in a graph on one rank and not on another (NCCL user
    guide, "Using NCCL with CUDA Graphs"). So capture must know which graphs contain collectives,
    from the counters of the process groups. They belong to the process: if another thread calls a
    collective meanwhile, the unit is taken to hold some. All ranks take the union of what they saw
    (``Agreement.confirm``), so it then votes more often than it has to, on all ranks alike.

Note [Two graphs, two draws]
    Activation checkpointing restores the random state of the forward pass before it recomputes. A
    unit's forward and backward passes are two graphs, and each gets, at its replay, the generator's
    state of that moment, whatever was restored in the capture (torch 2.11). So dropout would drop
    other elements than in the forward graph, and gradients would be wrong without an error.
"""

import inspect
from collections import Counter
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from functools import partial
from operator import attrgetter
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn

from megatron_cg.backends.base import generators_of, tracked_states
from megatron_cg.errors import CaptureError, say
from megatron_cg.extensions import observe_code
from megatron_cg.replay.borders import local
from megatron_cg.replay.guard import Addresses, Entry, KeySet, Watched
from megatron_cg.replay.plain import attribute, is_known, users_parts
from megatron_cg.replay.unit import Unit
from megatron_cg.restore import device_generator, values_kept
from megatron_cg.upstream.patch import Undo, run_instead, wrap_method
from megatron_cg.upstream.symbols import Symbol
from megatron_cg.upstream.te import is_loaded

if TYPE_CHECKING:
    from megatron_cg.units.code_observer import CodeObserver

_FUSED = Symbol(
    "transformer_engine.pytorch.cpp_extensions.fused_attn:tex.fused_attn_fwd",
    "the kernel of fused attention, with dropout as its argument number 4",
)
RELIES_ON = (
    _FUSED,
    Symbol(
        "torch.distributed:ProcessGroup",
        "a group that counts its collectives",
        attributes=("_get_sequence_number_for_group",),
    ),
    Symbol(
        "torch.distributed.distributed_c10d:_world",
        "all groups of this process",
        attributes=("pg_map",),
    ),
)
_NOT_FUSED = "{add:--no-gradient-accumulation-fusion}"
_MARK = "grad_added_to_main_grad"
_NEEDS = SimpleNamespace(get=attrgetter("requires_grad"))
"""Whether a parameter, as a key, needs a gradient: a row like others."""


class PassObserver:
    """Observes the passes of one unit in a capture.

    ``args`` and ``kwargs`` are its samples. ``watched`` is other memory that the graph addresses:
    of unsharded parameters, since the sharded ones of the time between steps are in no graph.
    """

    def __init__(
        self,
        unit: Unit,
        args: Sequence[torch.Tensor],
        kwargs: Mapping[str, torch.Tensor],
        watched: Iterable[Watched] = (),
    ) -> None:
        self._unit, self._error = unit, unit.refused
        self._device_type = args[0].device.type
        self.labels = [f"number {index}" for index in range(len(args))]
        self.labels[: len(unit.inputs)] = unit.inputs[: len(args)]
        self._samples = dict([*zip(self.labels, args, strict=True), *kwargs.items()])
        self._paths = {module: path for path, module in unit.layer.named_modules()}
        self._graphed = frozenset(unit.graphed)
        self._buffers = [
            (owner._buffers, name, buffer, attribute(path, name))
            for owner, path in self._paths.items()
            for name, buffer in owner._buffers.items()
            if buffer is not None
        ]
        self._versions: dict[str, int] = {}
        self._pass = ExitStack()
        self._before = 0
        self.addresses = Addresses(watched)
        self.collectives = unit.collectives
        """Whether the unit's graph contains collectives; final once it is captured."""
        self._attributes = [
            (Entry(vars(owner), name, "attribute", f"attribute {attribute(path, name)}"), value)
            for owner, path in self._paths.items()
            for name, value in vars(owner).items()
            if isinstance(value, torch.Tensor) and is_known(owner) and owner in self._graphed
        ]
        self.code: CodeObserver | None = None
        """Observes modules whose classes are not known, or that hold a user's function."""
        modules = (unit.layer, *unit.graphed)
        users = (part for module in modules for part in users_parts(module))
        if any(not is_known(one, unit.known_packages) for one in modules) or any(users):
            self.code = observe_code(unit, self._samples, self.addresses)

    @property
    def asks_for_gradients(self) -> bool:
        """Whether unknown code may do something else for an input without gradient."""
        return self.code is not None and self.code.state.asks_for_gradients

    def begun(self, *, forward: bool, warmup: bool) -> None:
        """A pass begins, after the hooks that come before it."""
        self.addresses.note(forward=forward)
        if self.code is not None and forward and not warmup:
            self.code.conclude()
        if forward:
            self._versions = {name: version_of(t) for name, t in self._samples.items()}
            self._pass.enter_context(frozen_kept(self._unit.graphed))
        elif warmup:
            self._pass.enter_context(recomputed_draws_refused(self._unit, self._device_type))
            self._pass.enter_context(self._several_passes_refused())
        if self.code is not None and warmup:
            self._pass.enter_context(self.code.observed(forward=forward))
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

    def rows(self) -> tuple[list[Entry], list[KeySet]]:
        """The guard's rows of the module tree, and of what passes read besides.

        Forgets samples and notes: the unit is captured.
        """
        # What the passes have replaced is a result, such as a module's last loss.
        entries = [row for row, one in self._attributes if row.holder.get(row.key) is one]
        self._attributes, self._samples = [], {}
        tree = [row for owner, path in self._paths.items() for row in self._rows_of(path, owner)]
        if self.code is None:
            return [*tree, *entries], []
        self.code.forget()
        return [*tree, *self.code.entries, *entries], [*self.code.state.key_sets()]

    def _rows_of(self, path: str, owner: nn.Module) -> Iterator[Entry]:
        """Of a module in the unit: its mode and children; of one in the graph, all that it holds.

        A gradient that the graph computes and nobody needs is discarded. So parameters may need
        none later, unless code is asked to do something else then.
        """
        is_inside = owner in self._graphed
        # A compiled module has its mode, as all else, in the module below it.
        if (is_inside or owner is self._unit.layer) and "training" in vars(owner):
            what = f"training of a {type(owner).__name__}"
            yield Entry(vars(owner), "training", "training", what)
        for name, child in owner._modules.items():
            if child in self._graphed:
                yield Entry(owner._modules, name, "module", f"module {attribute(path, name)}")
        if not is_inside:
            return
        for clause, held in (("parameter", owner._parameters), ("buffer", owner._buffers)):
            for name in held:
                yield Entry(held, name, clause, f"{clause} {attribute(path, name)}")
        for name, parameter in owner._parameters.items():
            if parameter is not None and (self.asks_for_gradients or not parameter.requires_grad):
                what = f"requires_grad of {attribute(path, name)}"
                yield Entry(_NEEDS, parameter, "frozen", what)
        if self._unit.is_plain_module:  # Of others a new attribute is seen once a pass.
            yield Entry(vars(owner), "_compiled_call_impl", "forward", f"what compiles {path}")
        if owner is not self._unit.layer:  # The replay replaces the layer's own forward.
            yield Entry(vars(owner), "forward", "forward", f"own forward of {path}")

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
        """Refuse writes that a graph, which has the addresses of the capture, makes elsewhere."""
        for owner, name, buffer, label in self._buffers:
            if owner.get(name) is not buffer:
                raise self._error(
                    f"replaces its buffer {label} by another tensor in its forward pass, but a "
                    "graph always writes to the tensor of the capture",
                    f"Write into the buffer instead, such as self.{name}.copy_(...).",
                )
        writes = [] if self.code is None else self.code.writes()
        for label, tensor in self._samples.items():
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

        With gradient-accumulation fusion it sets a mark from Python, at which hooks look. A replay
        would not set it, and what its graph returns as the gradient is a placeholder.
        """
        named = self._unit.layer.named_parameters()
        marked = [(name, weight) for name, weight in named if getattr(weight, _MARK, False)]
        for _, weight in marked:
            setattr(weight, _MARK, False)
        if marked:
            raise CaptureError(
                f"{self._unit.name} writes the gradient of {marked[0][0]} into main_grad by itself "
                f"(gradient-accumulation fusion; {len(marked)} such weights), so a replay would "
                f"return a placeholder instead. To mend this, {say(_NOT_FUSED)}, or build the "
                "layer with fuse_wgrad_accumulation=False."
            )


def frozen_kept(modules: Iterable[nn.Module]) -> AbstractContextManager[None]:
    """Restore frozen parameters on exit: the modules' own code may have changed them.

    They must be unsharded. Quantized ones and other subclasses of tensors are skipped.
    """
    parameters = dict.fromkeys(p for m in modules for p in m.parameters(recurse=False))
    plain = (p for p in parameters if type(p.data) is torch.Tensor)
    return values_kept(("a frozen parameter", p) for p in plain if not p.requires_grad)


@contextmanager
def recomputed_draws_refused(unit: Unit, device_type: str) -> Iterator[None]:
    """Observe one backward pass of ``unit``; see Note [Two graphs, two draws].

    Raises CaptureError after it: a restored random state was another one at the next restoring.
    """
    generators = generators_read(unit, device_type)
    restored: list[torch.Tensor] = []
    drew: list[bool] = []

    def states() -> list[torch.Tensor]:
        tracked = filter(torch.is_tensor, tracked_states().values())
        return [*tracked, *(generator.get_state() for generator in generators)]

    def compare() -> None:
        drew.extend(not torch.equal(*pair) for pair in zip(restored, states(), strict=False))

    def note() -> None:
        restored[:] = states()

    with ExitStack() as undo:
        undo.callback(fused_attention_draws_only_dropout())
        for owner in (torch, torch.cuda):
            undo.callback(wrap_method(owner, "set_rng_state", before=compare, after=note))
        yield
    if any(drew):
        raise unit.refused(
            "recomputes activations and draws random numbers in that (full recompute or "
            "torch.utils.checkpoint around a dropout)",
            "Its forward and its backward graph would draw different ones, and gradients would be "
            "wrong. Set dropout to 0, take it out of what is recomputed, or drop the checkpoint.",
        )


def fused_attention_draws_only_dropout() -> Undo:
    """Let TE's fused attention not advance the generator without dropout, until the undo."""
    return run_instead(_FUSED, _attention) if is_loaded(_FUSED) else lambda: None


def _attention(kernel: Callable[..., Any], *args: Any) -> Any:
    states = [(one, one.get_state()) for one in device_generator()]
    result = kernel(*args)
    for generator, state in states if args[4] == 0.0 else ():
        generator.set_state(state)
    return result


def generators_read(unit: Unit, device_type: str) -> list[torch.Generator]:
    return [torch.default_generator, *device_generator(), *generators_of([unit.layer], device_type)]


def overlap(first: torch.Tensor, second: torch.Tensor) -> bool:
    """Whether two tensors may share memory, by the ranges of their addresses."""
    (begin, end), (start, stop) = _range(first), _range(second)
    return begin < stop and start < end


def _range(tensor: torch.Tensor) -> tuple[int, int]:
    tensor = local(tensor)
    span = 1 + sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
    begin = tensor.data_ptr()
    return begin, begin + span * tensor.element_size() * (tensor.numel() > 0)


def collectives_so_far() -> int:
    """A number that grows with each collective that this process calls, of whatever group.

    Point-to-point operations are not counted.
    """
    if not dist.is_initialized():
        return 0
    count, groups = 0, list[Any](dist.distributed_c10d._world.pg_map)
    for group in groups:
        # This rank may not be in the group, or the backend keeps no count.
        with suppress(RuntimeError):
            count += group._get_sequence_number_for_group()
    return count


def version_of(tensor: torch.Tensor) -> int:
    """How often the values were written in place; torch does not count it in inference mode."""
    return 0 if tensor.is_inference() else tensor._version


def positional_names(forward: Callable[..., Any], count: int, taken: Container[str]) -> list[str]:
    """Names of the first ``count`` positional arguments.

    ``number N`` where there is none that a keyword could have, or where a keyword has it already: a
    decorator may pass on the signature of what it decorates, and take other arguments.
    """
    named = inspect.Parameter.POSITIONAL_OR_KEYWORD
    parameters = inspect.signature(forward).parameters.values()
    names = [p.name if p.kind is named else None for p in parameters][:count]
    names += [None] * (count - len(names))
    return [f"number {n}" if one is None or one in taken else one for n, one in enumerate(names)]
