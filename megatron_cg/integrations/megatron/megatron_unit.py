"""Megatron's layers as units: scopes, the region that a graph holds, what a layer runs instead.

``GraphableMegatronModule._te_cuda_graph_capture`` runs exactly the captured region and returns what
the graph returns, as long as Megatron's capturing flag is set.

Note [The replay replaces forward]
    Megatron's ``GraphableMegatronModule.__call__`` returns ``_te_cuda_graph_replay(...)`` without
    going through ``torch.nn.Module.__call__``: no hook fires, and under Megatron-FSDP nothing is
    unsharded. Here ``_should_call_te_cudagraph`` of the layer returns False, so its call continues
    to ``nn.Module.__call__``. FSDP's hooks run there, and between them ``_te_cuda_graph_replay``
    runs instead of the forward.

Note [Shapes that a region notes]
    With ``moe_preprocess`` the dispatcher notes sizes of its input inside the graph, as plain
    attributes, and reads them behind it (megatron-core 0.19.2, ``hidden_shape_before_permute``). A
    replay notes nothing, so they are set before each: a pass of another shape may lie between.

Note [Buffers that Megatron makes larger]
    Attention and sequence parallelism take memory from Megatron's global buffers. A pass with a
    larger batch, as in evaluation, puts a larger buffer there, and graphs still use the old one.

Note [A mask that nobody reads]
    With ``--no-create-attention-mask-in-dataloader`` a layer is called with None. Megatron still
    captures it with a mask of (1, 1, s, s) bytes for each layer, 1 GiB at a sequence length of
    32,768 (``TransformerLayer.get_layer_static_inputs``), and makes another one, all zeros, for
    every replay (``_get_te_cuda_graph_replay_args``). TE's causal attention reads neither. An
    attention that does would take the zeros as "mask nothing" and silently train something else. A
    graph that is captured without the keyword computes what the eager layer computes for None.
    If a mask is passed later, or one that the graph has is not, the guard misses it and the pass
    runs eagerly: Megatron's zeros are not made for an attention that may read them.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any
from weakref import ref

import torch
from megatron.core.transformer import cuda_graphs
from megatron.core.transformer.attention import Attention
from megatron.core.transformer.enums import AttnMaskType, CudaGraphModule
from megatron.core.transformer.module import GraphableMegatronModule
from megatron.core.transformer.transformer_layer import TransformerLayer
from torch import nn

from megatron_cg.arguments.layers import LayerSelection
from megatron_cg.arguments.schema import WHOLE_LAYER, mtp_is_repeated
from megatron_cg.capture.observer import positional_names
from megatron_cg.errors import LEAVE_LAYER_OUT, HookError, say
from megatron_cg.integrations.megatron.packs import PACK, ObservedPacks, Packs
from megatron_cg.integrations.repeated_step import StepState
from megatron_cg.replay.borders import in_backward_pass
from megatron_cg.replay.guard import NOT_INPUTS, Mismatch, described
from megatron_cg.replay.guarded_graph import Prepared, replay_instead
from megatron_cg.replay.plain import is_known
from megatron_cg.replay.unit import ManualHook, Unit
from megatron_cg.upstream import patch
from megatron_cg.upstream.megatron import (
    LayerConfig,
    capturing_flag,
    is_running_region,
    not_capturing,
)
from megatron_cg.upstream.patch import Undo, combined_undo
from megatron_cg.upstream.symbols import Symbol

_SHARED = Symbol(
    "megatron.core.transformer.moe.shared_experts:SharedExpertState",
    "which stage of an overlapped shared expert is next",
    attributes=("IDLE",),
)


def shared_experts_idle(layers: Iterable[nn.Module]) -> None:
    """Let overlapped shared experts begin anew if a capture failed between two of their stages."""
    for module in (module for layer in layers for module in layer.modules()):
        if hasattr(module, "_overlap_state"):
            module._overlap_state = _SHARED.find().IDLE


class LayerScopes:
    """The captured scopes of each layer.

    Layers without one are taken off the lists of Megatron's ``helper``.
    """

    def __init__(self, helper: Any, selection: LayerSelection) -> None:
        self._config = helper.config
        self._of_run = list(self._config.cuda_graph_modules) or [WHOLE_LAYER]
        self._scopes: dict[nn.Module, list[Any]] = {}
        if helper.flattened_callables:
            by_name = {module.name: module for module in self._config.cuda_graph_modules}
            for index, layer in enumerate(helper.chunks_with_decoder[0].decoder.layers):
                names = selection.scopes(index, tuple(by_name))
                self._scopes[layer] = [by_name.get(name, name) for name in names]
        self._keep_captured(helper)

    def of(self, layer: nn.Module) -> list[Any]:
        """The scopes captured of one layer; those of the run for a layer of MTP."""
        return self._scopes.get(layer, self._of_run)

    def is_of_run(self, layer: nn.Module) -> bool:
        """Whether all scopes of the run are captured of this layer."""
        return self.of(layer) == self._of_run

    @combined_undo
    def give(self, layers: Sequence[Any]) -> Iterator[Undo]:
        """Let the configs of each of ``layers`` and of its MoE layer name the scopes captured."""
        for layer in layers:
            owners = () if self.is_of_run(layer) else (layer, getattr(layer, "mlp", None))
            for owner in owners:
                if (config := getattr(owner, "config", None)) is not None:
                    own = LayerConfig(config, cuda_graph_modules=[*self.of(layer)])
                    yield patch.set_attribute(owner, "config", own)

    def _keep_captured(self, helper: Any) -> None:
        """Without pipeline parallelism Megatron's helper has one list of layers."""
        repeated = mtp_is_repeated(self._config)
        every = zip(helper.flattened_callables, helper.flattened_callables_is_mtp, strict=True)
        wanted = ((layer, is_mtp) for layer, is_mtp in every if not (is_mtp and repeated))
        pairs = [(layer, is_mtp) for layer, is_mtp in wanted if self._is_captured(layer)]
        helper.flattened_callables = [layer for layer, _ in pairs]
        helper.flattened_callables_is_mtp = [is_mtp for _, is_mtp in pairs]
        helper.callables_per_chunk = [helper.flattened_callables]
        helper.callables_per_chunk_is_mtp = [helper.flattened_callables_is_mtp]
        helper.num_layers_per_chunk = [len(pairs)]

    def _is_captured(self, layer: nn.Module) -> bool:
        if self.is_of_run(layer):
            return True
        scopes = self.of(layer)
        view = LayerConfig(self._config, cuda_graph_modules=scopes)
        return bool(scopes) and bool(cuda_graphs._layer_is_graphable(layer, view))


def is_mtp(layer: Any) -> bool:
    return bool(getattr(layer, "is_mtp_layer", False))


def name_of(layer: Any) -> str:
    """Its number from 0. Layers of multi-token prediction have numbers of their own."""
    return f"{'MTP ' * is_mtp(layer)}layer {layer.layer_number - 1}"


MASK = "attention_mask"
_TRANSFORMER = "megatron.core.transformer.transformer_layer:TransformerLayer"
_SAMPLES = Symbol(
    f"{_TRANSFORMER}.get_layer_static_inputs",
    "where Megatron makes attention masks for captures",
    fingerprints=("79b27aa0a43a2949",),
)
_REPLAY_ARGS = Symbol(
    f"{_TRANSFORMER}._get_te_cuda_graph_replay_args",
    "where Megatron makes attention masks for replays",
)
_ATTENTION = Symbol(
    "megatron.core.transformer.attention:Attention",
    "an attention that is called with masks",
    attributes=("core_attention", "attn_mask_type"),
)
_OF_TE = "megatron.core.extensions.transformer_engine"
"""The module of Megatron's class around Transformer Engine's attention."""
_LAYER = "megatron.core.transformer.module:GraphableMegatronModule"
_BUFFERS = Symbol("megatron.core.parallel_state:_GLOBAL_MEMORY_BUFFER", "memory of all layers")
RELIES_ON = (
    *(_SAMPLES, _REPLAY_ARGS, _ATTENTION, _BUFFERS),
    Symbol("megatron.core.utils:GlobalMemoryBuffer", "what it is", attributes=("buffer",)),
    Symbol("megatron.core.transformer.cuda_graphs:_layer_is_graphable", "what has a scope"),
    Symbol(
        _LAYER,
        "a layer with graphs",
        attributes=("cuda_graphs", "cuda_graph_manual_hooks", "_get_submodules_under_cudagraphs"),
    ),
    Symbol(f"{_LAYER}._should_call_te_cudagraph", "what __call__ asks"),
    Symbol(f"{_LAYER}._te_cuda_graph_replay", "the replay"),
    Symbol(f"{_LAYER}._te_cuda_graph_capture", "the part of a layer that its graph holds"),
)

HIDDEN = "hidden_states"
_NOTED = ("hidden_shape", "hidden_shape_before_permute", "num_out_tokens", "capacity")


def units_of(layers: Sequence[Any], packs: Packs | None = None) -> list[Unit]:
    """Megatron's layers as the units of a capture, with names that differ; see :func:`name_of`.

    ``packs`` is what graphs of attention take of packed sequences.
    """
    names = [name_of(layer) for layer in layers]
    return [
        MegatronUnit(
            name if names.count(name) == 1 else f"{name}, captured as number {place}",
            layer,
            packs if takes_packs(layer) else None,
        )
        for place, (layer, name) in enumerate(zip(layers, names, strict=True))
    ]


def require_forward_of_megatron(layers: Iterable[Any]) -> None:
    """Raise HookError for a layer whose own ``forward`` its graph would not hold.

    Megatron's TransformerLayer captures parts of its forward, which it names one by one.
    """
    for layer in filter(lambda one: isinstance(one, TransformerLayer), layers):
        kinds, part = type(layer).__mro__, "_te_cuda_graph_capture"
        ours, theirs = (next(k for k in kinds if n in vars(k)) for n in (part, "forward"))
        is_below = kinds.index(theirs) < kinds.index(ours) and not is_known(theirs)
        found = f"{theirs.__qualname__} defines a forward" if is_below else ""
        for module in (layer, *_called_in_part(layer)):
            if "forward" in vars(module):
                found = f"somebody has replaced forward of a {type(module).__name__}"
        if found:
            raise HookError(
                f"{name_of(layer)}: {found}. A graph holds what {ours.__qualname__}.{part} runs, "
                "so replays would leave it out. Put the code into a forward hook of the layer, "
                f"which runs around each replay, or {say(LEAVE_LAYER_OUT)}."
            )


def _called_in_part(layer: Any) -> tuple[nn.Module, ...]:
    """The MoE layer in ``layer`` if its call begins in the graph and ends behind it."""
    inside = layer._get_submodules_under_cudagraphs()
    mlp = getattr(layer, "mlp", None)
    is_part = getattr(mlp, "router", None) in inside and mlp not in inside
    return (mlp,) if is_part and mlp is not None else ()


def takes_packs(layer: Any) -> bool:
    """Whether the graph of ``layer`` reads where samples of a pack begin: it holds attention."""
    scopes = layer.config.cuda_graph_modules
    return isinstance(layer, TransformerLayer) and (not scopes or CudaGraphModule.attn in scopes)


class MegatronUnit(Unit):
    """The region of one of Megatron's layers that its graph holds."""

    any_stride_of_one = True
    """Embeddings of one sequence are transposed: (s, 1, h) with the strides of (1, s, h)."""

    def __init__(self, name: str, layer: Any, packs: Packs | None = None) -> None:
        covered: Sequence[nn.Module] = layer._get_submodules_under_cudagraphs()
        graphed = (m for root in covered for m in root.modules() if m is not layer)
        super().__init__(
            name,
            layer,
            (*graphed, *_called_in_part(layer)),
            # torch does not count the collectives of these; see ``capture/observer.py``.
            collectives=layer.config.context_parallel_size > 1
            or layer.config.tensor_model_parallel_size > 1,
        )
        self._packs = packs
        self._is_direct = not isinstance(layer, TransformerLayer) or takes_packs(layer)
        """Whether no code of the layer runs before its graph; attention does, if not captured."""
        # Fused attention advances them without dropout too, and an eager pass that recomputes it
        # does so twice. Rules refuse what reads them (``recompute-of-attention``, Megatron's own).
        kind, parts = layer.config.recompute_granularity, layer.config.recompute_modules
        self.draws_as_eager = not kind or (kind == "selective" and "core_attn" not in parts)

    def leave_out(self, module: nn.Module | None) -> str:
        layer: Any = self.layer
        index = layer.layer_number - 1
        scopes = " ".join(scope.name for scope in layer.config.cuda_graph_modules)
        if not scopes:
            alone = (
                ", or leave the layer out: {flag:--cg-layers layer} takes ranges without {index}"
            )
            instead = "Name the scopes that do not hold it with {flag:--cuda-graph-modules}"
        else:
            held = "" if module is None else f" that holds the {type(module).__name__}"
            instead = f"Leave the scope{held} out of {{flag:--cuda-graph-modules {scopes}}}"
            alone = (
                "; or, for this layer alone, give that scope ranges without {index} in "
                "{flag:--cg-layers}"
            )
        return say(f"{instead}{'' if is_mtp(layer) else alone}.", index=index)

    def kept(self) -> AbstractContextManager[None]:
        return patch.undone_after(StepState().restore)

    def in_backward(self) -> AbstractContextManager[None]:
        return capturing_flag()

    def run(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """With autograd as usual.

        FSDP's hooks on modules inside the region run as in an eager pass, and so do experts: see
        :func:`is_capturing`.
        """
        layer: Any = self.layer
        inputs = {name: value for name, value in kwargs.items() if name not in NOT_INPUTS}
        with capturing_flag(), not_capturing():
            return layer._te_cuda_graph_capture(*args, **inputs)

    @combined_undo
    def attach(self, before_replay: Sequence[ManualHook]) -> Iterator[Undo]:
        target: Any = self.layer
        mlp = getattr(target, "mlp", None)
        notes: dict[str, Any] = getattr(getattr(mlp, "token_dispatcher", None), "__dict__", {})
        noted = {key: notes[key] for key in _NOTED if isinstance(notes.get(key), int | tuple)}

        def prepare(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Prepared:
            if is_running_region():  # the captured region is the layer's whole forward
                return None
            notes.update(noted)
            if (waits := target.cuda_graphs[0].waits()) is not None:
                return waits  # type: ignore[no-any-return]
            if self._packs is not None and kwargs.get(PACK) is not None:
                split = self._packs.split(kwargs)
                if isinstance(split, Mismatch):
                    return split
                kwargs = split
            missed = (_no_tensor if self._is_direct else _not_passed_on)(args, kwargs)
            return missed or partial(replay, *args, **kwargs)

        def replay(*args: Any, **kwargs: Any) -> Any:
            try:
                return target._te_cuda_graph_replay(*args, **kwargs)
            except BaseException:
                # What the graph left for the rest of a MoE layer; any later pass would take it.
                if (store := getattr(mlp, "cudagraph_tensor_store", None)) is not None:
                    store.clear()
                raise

        yield replay_instead(target, prepare)
        # Alive until the graphs are deleted; see Note [Buffers that Megatron makes larger].
        yield dict(getattr(_BUFFERS.find(), "buffer", {})).clear
        yield patch.replace_function(
            target, "_should_call_te_cudagraph", lambda *_args, **_kwargs: False
        )
        yield patch.set_attribute(target, "cuda_graph_manual_hooks", list(before_replay))


def _no_tensor(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Mismatch | None:
    """Find an argument that is not a tensor. At capture each was a tensor or was not given.

    Megatron's replay would fail with "CUDA graph accepts only Tensor inputs".
    """
    positional = ((f"number {index}", value) for index, value in enumerate(args))
    for name, value in (*positional, *kwargs.items()):
        if value is not None and not isinstance(value, torch.Tensor):
            why = (
                "A graph takes only tensors, so the pass runs eagerly. Packed sequences go into "
                "graphs only if all steps before the capture had packs of one form. Or "
                f"{say('leave attn out of {flag:--cuda-graph-modules}')}."
            )
            return Mismatch("object", f"argument {name}", "not given", described(value), why)
    return None


def _not_passed_on(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Mismatch | None:
    """Find what the rest of the layer would read, for a graph that begins behind attention.

    Megatron's replay runs attention with all arguments, and the rest of the layer with attention's
    output alone. The router would count padding, and balance the samples of a pack as one.
    """
    hidden = args[0] if args else kwargs.get(HIDDEN)
    sample = getattr(kwargs.get(PACK), "tokens_per_sample", None)
    samples = hidden.shape[0] // sample if sample and hidden is not None else 1
    padding, pack = "argument padding_mask", f"{PACK}.tokens_per_sample"
    found = {padding: kwargs.get("padding_mask"), pack: sample if samples > 1 else None}
    for name, value in found.items():
        if value is not None:
            why = "Megatron does not pass it on to the part of the layer that its graph holds."
            return Mismatch("structure", name, "not given", described(value), why)
    return None


class ObservedInputs:
    """Observes whole training steps: what layers are never given, and what needs no gradient."""

    def __init__(self, layers: Iterable[nn.Module]) -> None:
        self._layers = tuple(layers)
        self._none: set[tuple[nn.Module, str]] = set()
        self._given: set[tuple[nn.Module, str]] = set()
        self._differentiated: set[tuple[nn.Module, str]] = set()
        self._last: dict[str, ref[torch.Tensor]] = {}
        self._differ: set[str] = set()
        self.packs = ObservedPacks()

    def observe_step(self) -> Undo:
        return patch.combine_undos(patch.add_observer(one, self._called) for one in self._layers)

    def is_never_given(self, layer: nn.Module, name: str) -> bool:
        """Whether a layer was called with that keyword and its value was always None."""
        return (layer, name) in self._none - self._given

    def is_never_differentiated(self, layer: nn.Module, name: str) -> bool:
        """Whether a layer got that input, and it never needed a gradient."""
        return (layer, name) in self._given - self._differentiated

    def is_one(self, name: str) -> bool:
        """Whether all layers got one tensor by that name."""
        return name not in self._differ

    def _called(self, layer: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        if in_backward_pass():
            return  # recomputed, on inputs that were detached
        names = positional_names(layer.forward, len(args), kwargs)
        for name, value in (dict(zip(names, args, strict=True)) | dict(kwargs)).items():
            (self._none if value is None else self._given).add((layer, name))
            if name == PACK:
                self.packs.add(value)
            if getattr(value, "requires_grad", False):
                self._differentiated.add((layer, name))
            is_tensor = isinstance(value, torch.Tensor)
            if is_tensor and self._last.setdefault(name, ref(value))() is not value:
                self._differ.add(name)


@combined_undo
def without_unused_masks(layers: Sequence[nn.Module], inputs: ObservedInputs) -> Iterator[Undo]:
    """Capture layers without a mask that they never received, and replay with no made-up one.

    Call it before sample inputs are made, and undo it after the graphs are deleted.
    """
    for layer in layers:
        if not isinstance(layer, TransformerLayer):
            continue
        never_given = inputs.is_never_given(layer, MASK)
        if never_given:
            samples = partial(_samples, layer, layer.get_layer_static_inputs)
            yield patch.replace_function(layer, "get_layer_static_inputs", samples)
        if never_given or _may_read(layer.self_attention):
            replay = partial(_replay_args, layer._get_te_cuda_graph_replay_args)
            yield patch.replace_function(layer, "_get_te_cuda_graph_replay_args", replay)


def _may_read(attention: Any) -> bool:
    """Whether it may read a mask; Transformer Engine's does not where it is causal."""
    if not isinstance(attention, Attention):
        return False
    causal = attention.attn_mask_type in (AttnMaskType.causal, AttnMaskType.no_mask)
    return not (causal and type(attention.core_attention).__module__ == _OF_TE)


def _samples(layer: Any, make: Callable[..., dict[str, Any]], *args: Any, **kwargs: Any) -> Any:
    own = type(layer).get_layer_static_inputs is TransformerLayer.get_layer_static_inputs
    if own and _SAMPLES.unknown_body() is None:
        # Not even created: Megatron would hold the masks of all layers at the same time.
        return GraphableMegatronModule.get_layer_static_inputs(layer, *args, **kwargs)
    made = make(*args, **kwargs)
    made.pop(MASK, None)
    return made


def _replay_args(make: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    if kwargs.get(MASK, make) is None:
        del kwargs[MASK]
    return make(*args, **kwargs)
