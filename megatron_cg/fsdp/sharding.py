"""How a model is sharded, as a capture sees it: what any way is, and Megatron-FSDP's own.

Each way of sharding is a :class:`Sharding`; :func:`shardings_of` finds the ones of a model.
Megatron-FSDP is megatron-core's or the standalone package. Others: ``fully_shard/``, ``units/``.

Note [Gradients that outlive their step]
    ``ParamAndGradBuffer.update_main_grads`` casts each gradient shard to the main weights' dtype
    for the optimizer. ``zero_grad`` frees these copies before the next forward pass, unless
    ``megatron_fsdp_cuda_graph_mode`` is set. Megatron sets it for every ``--cuda-graph-impl``
    except ``none`` (``megatron.training.training``), since a full-iteration graph holds their
    addresses. The graph of a layer never uses them: ``finish_grad_sync`` creates them after all
    replays of a step, and the optimizer reads them before the next. In this mode they take memory
    in addition to all activations of the next step. No other code reads the field.
"""

import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

from torch import nn
from torch.distributed.fsdp import FSDPModule

from megatron_cg.errors import Violation
from megatron_cg.extensions import sharding_by_fsdp2, sharding_by_v2
from megatron_cg.fsdp import roles
from megatron_cg.hooks import HookRecord, is_idle, module_hooks
from megatron_cg.replay.guard import Watched, is_quantized
from megatron_cg.replay.unit import Unit
from megatron_cg.upstream.patch import Undo, replace_function, set_attribute
from megatron_cg.upstream.symbols import changed

if TYPE_CHECKING:
    from megatron_cg.units.unsharded import OtherLeaves

_NEEDED = (
    "_replace_param_with_raw_if_needed",
    "is_param_fsdp_distributed",
    "synchronize_param_gather",
    "start_param_sync",
    "synchronize_gradient_reduce",
    "param_and_grad_buffer",
    "all_gather_pipeline",
)
RELIES_ON = (
    *roles.fsdp_class("MegatronFSDP", *_NEEDED, "_training_state", "zero_grad_buffer"),
    *roles.fsdp_class("MegatronFSDP", "data_parallel_sharding_strategy"),
    *roles.fsdp_class("AllGatherPipeline", "all_gather_params", "bucket_status", "buffer"),
    *roles.fsdp_class("AllGatherPipeline", "param_gather_event_map", "wait_bucket_ready"),
    *roles.fsdp_class("ParamAndGradBuffer", "double_buf_units", "ddp_config"),
    *roles.fsdp_class("ParamAndGradBuffer", "param_to_param_group", "parameter_groups"),
    *roles.fsdp_class("ParamAndGradBuffer", "optimizer_named_parameters"),
    *roles.fsdp_class("ParameterGroup", "fsdp_unit_id", "main_grad_buffer"),
    *roles.fsdp_class("ParameterGroup", "transpose_weight_buffer"),
    *roles.fsdp_function("fp8_create_transpose_cache", "what transposes a quantized weight"),
)
_KEEP_ADDRESSES = (
    ("fsdp_double_buffer", "unsharded parameters are allocated anew in each step, and move"),
    (
        "fsdp_db_use_persist_buf_on_alloc_fail",
        "a unit that does not fit the double buffers falls back to a buffer that moves",
    ),
)
_ANEW = (
    "its memory was freed and allocated anew, or the bucket was given the other of the two buffers."
)
_KEEPS = "megatron_fsdp_cuda_graph_mode"
_GATHERED_ONCE = ("optim", "optim_grads")
"""Where unsharded weights stay until ``finish_grad_sync`` forgets them, which it does only with
``overlap_param_gather`` (megatron-fsdp 0.6.1). Megatron's own optimizer gathers them itself."""

REPLACED = (
    "Something replaced or freed this memory after capture. Keep it in place, or delete the graphs "
    "first and capture again."
)


class Sharding:
    """How one model is sharded; its members here are those of a model that nothing shards."""

    name: str
    """What users call it, for messages."""
    wrapped: nn.Module
    """The module whose hooks shard the model; the model itself if there is none."""
    network: nn.Module
    """The module in which units are named."""
    megatron_fsdp: Any = None
    """The ``MegatronFSDP``, whose bookkeeping the fast path shortens; None for anything else."""
    groups: Sequence[Any] = ()
    """Megatron-FSDP v2's groups of parameters, for which the same is done."""
    counts_gradients = False
    """Whether gradients are reduced as soon as all parameters of a bucket have got theirs; see
    ``replay/guarded_graph.py``."""
    varies_sums = False
    """Whether autograd sums a gradient with ``grad_dtype`` in another dtype in some passes."""
    moved = REPLACED
    """Why a parameter may have moved after capture, and what to do instead."""

    def refusals(self, units: Mapping[str, nn.Module]) -> Iterable[Violation]:
        """Every reason why one of these modules, by name, cannot be captured."""
        return ()

    def is_distributed(self, module: nn.Module) -> bool:
        """Whether weights of this module are DTensors in its forward pass."""
        return False

    def is_unit(self, module: nn.Module) -> bool:
        """Whether the sharding gathers and frees the parameters of this module by themselves."""
        return False

    def unit_hooks(self, unit: Unit) -> roles.UnitHooks:
        """The current hooks of a unit, for the backend. Changes nothing.

        Here there are no capture-time hooks: all but those of :meth:`owns_hook` are the user's.

        Raises HookError if a user's hook would not run as intended.
        """
        for record in self._of_user(unit.layer):
            roles.check_hook_of_unit(unit.layer, record, unit.name)
        for module in unit.graphed:
            if module is not unit.layer:
                for record in self._of_user(module):
                    home = getattr(record.fn, "__module__", "")
                    # Those of ``parallelize_module`` are a part of what the module computes.
                    if not home.startswith("torch.distributed.tensor.") and not is_idle(record.fn):
                        raise roles.never_called(unit.name, module, record)
        return roles.UnitHooks({key: {} for key in roles.CAPTURE_TIME_KEYS})

    def owns_hook(self, hook: Callable[..., Any]) -> bool:
        """Whether a hook on a module belongs to the sharding."""
        return False

    def hoists_hook(self, hook: Callable[..., Any]) -> bool:
        """Whether such a hook inside of a unit runs around the unit while there are graphs.

        Otherwise no module in a unit may be a unit.
        """
        return False

    def observe_step(self, units: Collection[nn.Module]) -> Undo:
        """Learn from a step before capture, until the returned function is called."""
        return lambda: None

    def stable_memory(self, layers: Sequence[nn.Module]) -> Undo:
        """Make unsharded parameters of ``layers`` keep their addresses; returns the undo.

        Called between two steps, on all ranks. Issues no collective.
        """
        return lambda: None

    def capturing(self, layers: Sequence[nn.Module]) -> AbstractContextManager[None]:
        """Inside the block, ``layers`` hold unsharded parameters, and hooks can be called alone.

        Issues no collective on entry.
        """
        return nullcontext()

    def other_leaves(self, layers: Sequence[nn.Module]) -> "OtherLeaves | None":
        """What ``layers`` hold during a capture if their gradient accumulators must stay.

        None: they get new ones. A sharding reduces gradients by hooks of its own, elsewhere.
        """
        return None

    def watched_memory(self, layer: nn.Module, graphed: Sequence[nn.Module]) -> Iterator[Watched]:
        """Parameters and buffers of ``graphed`` whose addresses the layer's graph holds.

        Called inside of :meth:`capturing`. Here all of them.
        """
        names = {id(module): f"{name}." if name else "" for name, module in layer.named_modules()}
        kinds = (("parameter", self.moved), ("buffer", REPLACED))
        for module in graphed:
            for kind, moved in kinds:
                for name, tensor in getattr(module, f"named_{kind}s")(recurse=False):
                    yield Watched(tensor, f"{kind} {names[id(module)]}{name}", moved)

    def gradients(self) -> Iterator[tuple[str, Any]]:
        """What the optimizer gets for each parameter, if anything, the last parameter first.

        All ranks call it, behind the last backward pass of a step.
        """
        for name, parameter in reversed(list(self.network.named_parameters())):
            for attribute in ("grad", "decoupled_grad"):
                yield name, getattr(parameter, attribute, None)

    def gradient_owners(self) -> Iterable[tuple[Any, str]]:
        """What may hold a gradient between steps besides modules' parameters: object, attribute."""
        return ()

    def states_kept(self, modules: Iterable[nn.Module]) -> AbstractContextManager[None]:
        """Restore what a pass without hooks through ``modules`` changes in the sharding."""
        return nullcontext()

    def prepare_backward(self, layer: nn.Module) -> bool:
        """Let weights of a unit in its forward pass hold what its backward pass reads, if they can.

        Returns whether they do. Issues no collective.
        """
        return not any(map(is_quantized, layer.parameters()))

    def _of_user(self, module: nn.Module) -> Iterator[HookRecord]:
        return (record for record in module_hooks(module) if not self.owns_hook(record.fn))


def find_megatron_fsdp(model: nn.Module) -> nn.Module | None:
    """The ``MegatronFSDP`` that ``model`` is or contains (either package's), or None.

    Raises UpstreamChangedError when it lacks a member that capture relies on.
    """
    for module in model.modules():
        is_one = type(module).__name__ == "MegatronFSDP"
        distribution = roles.fsdp_package_of(type(module).forward) if is_one else None
        if distribution is None:
            continue
        for name in _NEEDED:
            if not hasattr(module, name):
                raise changed(distribution, f"MegatronFSDP.{name}", "a member of the wrapped model")
        return module
    return None


def is_sharded_by_v2(module: nn.Module) -> bool:
    """Whether Megatron-FSDP v2 shards this module by itself."""
    kinds: tuple[Any, ...] = type(module).__mro__
    return any(
        kind.__name__ == "FsdpModule" and roles.fsdp_package_of(kind.__init__) is not None
        for kind in kinds
    )


def root_of(model: nn.Module) -> nn.Module | None:
    """The ``MegatronFSDP`` in a model, or the first module that its version 2 shards, or None.

    Raises UpstreamChangedError if the former lacks a member that we rely on.
    """
    return next(filter(is_sharded_by_v2, model.modules()), None) or find_megatron_fsdp(model)


def shardings_of(model: nn.Module, *, fsdp2: bool = True) -> Iterator[Sharding]:
    """How ``model`` or modules in it are sharded, by Megatron-FSDP of either version and by FSDP2.

    Raises ExtensionMissingError for a ``fully_shard`` without its extension.
    """
    if any(map(is_sharded_by_v2, model.modules())):
        yield sharding_by_v2(model)
    if (fsdp := find_megatron_fsdp(model)) is not None:
        yield MegatronFsdp(fsdp)
    if fsdp2 and any(isinstance(module, FSDPModule) for module in model.modules()):
        yield sharding_by_fsdp2(model)


def of_megatron(model: nn.Module) -> Sharding | None:
    """The sharding of a model by Megatron-FSDP, of either version, or None; see :func:`root_of`.

    Raises ExtensionMissingError for version 2 without its extension.
    """
    return next(shardings_of(model, fsdp2=False), None)


class MegatronFsdp(Sharding):
    """See :class:`megatron_cg.fsdp.sharding.Sharding`. ``fsdp`` is the ``MegatronFSDP``."""

    name = "Megatron-FSDP"
    counts_gradients = True

    def __init__(self, fsdp: Any) -> None:
        self.megatron_fsdp = fsdp
        self.wrapped, self.network = fsdp, fsdp.module

    def refusals(self, units: Mapping[str, nn.Module]) -> Iterator[Violation]:
        """Units that are no FSDP units, that would move, or that keep old weights."""
        config = self.megatron_fsdp.ddp_config
        for name, reason in _KEEP_ADDRESSES:
            if not getattr(config, name):
                yield Violation(
                    name.replace("_", "-"),
                    f"fully_shard_model was called without {name}=True",
                    f"{reason}, and a replayed graph reads memory that was freed",
                    f"fully_shard_model(..., {name}=True)",
                )
        strategy = config.data_parallel_sharding_strategy
        if strategy in _GATHERED_ONCE and not config.overlap_param_gather:
            yield Violation(
                "old-weights",
                f"fully_shard_model was called with zero_dp_strategy={strategy!r} and "
                "overlap_param_gather=False",
                "megatron-fsdp 0.6.1 then never gathers what the optimizer has changed: each rank "
                "computes with old weights of the others, without graphs too",
                "fully_shard_model(..., overlap_param_gather=True)",
            )
        for name, module in units.items():
            if not self.is_unit(module):
                yield Violation(
                    "no-fsdp-unit",
                    f"unit {name} is a {type(module).__name__}",
                    "Megatron-FSDP gathers parameters of whole FSDP units, and this is none",
                    f"fully_shard_model(..., fsdp_unit_modules=[{type(module).__name__}]), or name "
                    "the FSDP unit around it",
                )

    def is_unit(self, module: nn.Module) -> bool:
        """Whether its class is one of ``fsdp_unit_modules``."""
        return isinstance(module, tuple(self.megatron_fsdp.fsdp_unit_modules))

    def gradients(self) -> Iterator[tuple[str, Any]]:
        """Those in the buffers too, which an optimizer's step attaches in a loop of one's own."""
        yield from super().gradients()
        fsdp, store = self.megatron_fsdp, self.megatron_fsdp.param_and_grad_buffer
        if not fsdp.is_param_fsdp_distributed:
            fsdp.synchronize_gradient_reduce()
            for name, parameter in reversed(store.optimizer_named_parameters):
                own = parameter.orig_param
                buffer = store.parameter_groups[store.param_to_param_group[own]].main_grad_buffer
                if buffer is not None:
                    yield name, buffer.get_item(buffer.param_idx[own], only_shard=True)

    def unit_hooks(self, unit: Unit) -> roles.UnitHooks:
        return roles.unit_hooks(unit)

    def owns_hook(self, hook: Callable[..., Any]) -> bool:
        return roles.fsdp_package_of(hook) is not None

    @contextmanager
    def capturing(self, layers: Sequence[nn.Module]) -> Iterator[None]:
        with ExitStack() as stack:
            stack.enter_context(self.states_kept(self.wrapped.modules()))
            stack.enter_context(raw_parameters(self.megatron_fsdp))
            parameters = {p: None for layer in layers for p in layer.parameters()}
            stack.callback(gather_alone(self.megatron_fsdp, parameters))
            yield

    def watched_memory(self, layer: nn.Module, graphed: Sequence[nn.Module]) -> Iterator[Watched]:
        """Buffers, and parameters whose addresses a graph holds.

        If FSDP points all parameters of a bucket at the bucket together, the first parameter stands
        for all of them; see Note [One address a bucket].
        """
        store = self.megatron_fsdp.param_and_grad_buffer
        together = self.megatron_fsdp.data_parallel_sharding_strategy == "optim_grads_params"
        seen: set[int] = set()
        for one in super().watched_memory(layer, graphed):
            group = store.param_to_param_group.get(one.tensor)
            if group is not None and not (together and group in seen):
                unit = store.parameter_groups[group].fsdp_unit_id
                name = f"{one.name} (bucket {group} of FSDP unit {unit})"
                moved = f"The FSDP buffer of unit {unit} (bucket {group}) moved: {_ANEW}"
                yield Watched(one.tensor, name, moved)
                seen.add(group)
            elif group is None:
                yield one

    def prepare_backward(self, layer: nn.Module) -> bool:
        """Create the transposes of quantized weights, as before a backward pass.

        Megatron-FSDP releases them after the forward pass, or creates them again in the same place.
        It gathers those of MXFP8.
        """
        store = self.megatron_fsdp.param_and_grad_buffer
        quantized = [parameter for parameter in layer.parameters() if is_quantized(parameter)]
        groups = (store.parameter_groups[store.param_to_param_group[one]] for one in quantized)
        if any(group.transpose_weight_buffer is not None for group in groups):
            return False
        for parameter in quantized:
            sys.modules[type(self.megatron_fsdp).__module__].fp8_create_transpose_cache(parameter)
        return True

    @contextmanager
    def states_kept(self, modules: Iterable[nn.Module]) -> Iterator[None]:
        with ExitStack() as stack:
            for module in modules:
                if (state := getattr(module, "_training_state", None)) is not None:
                    stack.callback(setattr, module, "_training_state", state)
            yield


@contextmanager
def raw_parameters(fsdp: Any) -> Iterator[None]:
    """Give the modules their raw parameters, as in a forward pass, and undo it on exit.

    Between steps Megatron-FSDP replaces the parameters with sharded DTensors. A replay passes raw
    ones to autograd, and the post-accumulate-grad hooks are registered on them. On exit, this waits
    for the all-gathers that capture prefetched and releases their buckets.
    """
    was_distributed = bool(fsdp.is_param_fsdp_distributed)
    fsdp._replace_param_with_raw_if_needed()
    try:
        yield
    finally:
        # Its reset does the same, but with a warning that lists every bucket.
        pipeline = fsdp.all_gather_pipeline
        for bucket, bwd in list(pipeline.param_gather_event_map):
            pipeline.wait_bucket_ready(bucket, bwd)
        # A gather that failed at its start left nothing to wait for, and reset would fail on it.
        for key, status in pipeline.bucket_status.items():
            if status.name == "COMMUNICATING":
                pipeline.bucket_status[key] = type(status).READY_TO_USE
        fsdp.synchronize_param_gather()
        if not was_distributed:
            fsdp.start_param_sync()


def gather_alone(fsdp: Any, parameters: Iterable[nn.Parameter]) -> Callable[[], None]:
    """Disable prefetch if ``parameters`` cover only some of the units that share two buffers.

    Megatron-FSDP's hooks also gather the next unit, into the other buffer. If that unit is not
    captured, no hook releases it at capture, and the unit after it finds no buffer. ``parameters``
    are the raw ones. Returns the undo.
    """
    pipeline = fsdp.all_gather_pipeline
    store = pipeline.buffer
    groups = {store.param_to_param_group.get(parameter) for parameter in parameters} - {None}
    captured = {store.parameter_groups[group].fsdp_unit_id for group in groups}
    if captured.issuperset(store.double_buf_units):
        return lambda: None
    gather = pipeline.all_gather_params

    def alone(params: Any, prefetch: bool = False, **options: Any) -> None:
        gather(params, prefetch=False, **options)

    return replace_function(pipeline, "all_gather_params", alone)


def let_gradients_go(fsdp: Any) -> Callable[[], None]:
    """Let ``zero_grad`` free the gradient copies of each step, as in a run without graphs.

    See Note [Gradients that outlive their step]. ``fsdp`` is the ``MegatronFSDP``; version 2 has no
    such copies. Returns the undo.
    """
    if not hasattr(fsdp, "param_and_grad_buffer"):
        return lambda: None
    return set_attribute(fsdp.param_and_grad_buffer.ddp_config, _KEEPS, False)
