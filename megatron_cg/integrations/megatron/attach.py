"""What a graphed layer of Megatron runs instead of its forward, and the same as plain Python.

``GraphableMegatronModule._te_cuda_graph_capture`` runs exactly the captured region and returns what
the graph returns, as long as Megatron's capturing flag is set.

Note [The replay replaces forward]
    Megatron's ``GraphableMegatronModule.__call__`` returns ``_te_cuda_graph_replay(...)`` without
    going through ``torch.nn.Module.__call__``: no hook fires, and under Megatron-FSDP nothing is
    unsharded. Here ``_should_call_te_cudagraph`` of the layer returns False, so its call continues
    to ``nn.Module.__call__``. FSDP's hooks run there, and between them ``_te_cuda_graph_replay``
    runs instead of the forward. Both overrides are attributes of the instance: the class and
    layers without graphs do not change.

Note [Shapes that a region notes]
    With ``moe_preprocess`` the dispatcher notes sizes of its input inside the graph, as plain
    attributes, and reads them behind it (megatron-core 0.19.2, ``hidden_shape_before_permute``). A
    replay notes nothing. So after a pass of another shape, such as an evaluation with a larger
    batch, they are set before each replay.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from torch import nn

from megatron_cg.integrations.own_gradients import own_gradient
from megatron_cg.replay.eager_passes import Prepared, replay_instead
from megatron_cg.replay.guard import Mismatch
from megatron_cg.replay.guard.inputs import NOT_INPUTS, described
from megatron_cg.replay.mismatch_policy import MismatchPolicy
from megatron_cg.replay.unit import ManualHook, Unit
from megatron_cg.upstream.capturing_flag import capturing_flag, is_running_region, not_capturing
from megatron_cg.upstream.patch import Undo, all_of, put_over, set_attribute
from megatron_cg.upstream.symbols import Symbol

_LAYER = "megatron.core.transformer.module:GraphableMegatronModule"
RELIES_ON = (
    Symbol(
        "megatron-core",
        _LAYER,
        "a layer with graphs",
        attributes=("cuda_graphs", "cuda_graph_manual_hooks"),
    ),
    Symbol("megatron-core", f"{_LAYER}._should_call_te_cudagraph", "what __call__ asks"),
    Symbol("megatron-core", f"{_LAYER}._te_cuda_graph_replay", "the replay"),
    Symbol(
        "megatron-core",
        f"{_LAYER}._te_cuda_graph_capture",
        "the part of a layer that its graph holds",
    ),
)

PACK = "packed_seq_params"
"""The keyword by which a layer gets the boundaries of packed sequences, in an object."""
BOUNDARIES = "cu_seqlens"
"""The keyword of a graph that has them as an input; see ``integrations/megatron/packs.py``."""
_HIDDEN = "hidden_states"
_NOTED = ("hidden_shape", "hidden_shape_before_permute", "num_out_tokens", "capacity")


def run_region(
    layer: nn.Module,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    *,
    as_captured: bool = False,
) -> Any:
    """Return what the graph of ``layer`` would return for these arguments, with autograd as usual.

    FSDP's hooks on modules inside the region run as in an eager pass. With ``as_captured``, experts
    run the operations that a graph would hold; see :func:`is_capturing`.
    """
    target: Any = layer
    inputs = {name: value for name, value in kwargs.items() if name not in NOT_INPUTS}
    with capturing_flag(), nullcontext() if as_captured else not_capturing():
        return target._te_cuda_graph_capture(*args, **inputs)


def attach_replay(
    unit: Unit, before_replay: Sequence[ManualHook], mismatches: MismatchPolicy, *, direct: bool
) -> Callable[[], None]:
    """Make ``unit`` replay its graphs in training and run eagerly in evaluation; returns the undo.

    Args:
        unit: a ``GraphableMegatronModule`` whose ``cuda_graphs`` are set.
        before_replay: (fn, arguments) run before each replay; see
            :attr:`megatron_cg.fsdp.transform.UnitHooks.before_replay`.
        mismatches: the mismatch policy of the unit's session.
        direct: whether the graph takes the layer's arguments. If not, code of the layer runs before
            it.
    """
    target: Any = unit.layer
    notes, noted = _noted_in(target)

    def prepare(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Prepared:
        if is_running_region():  # the captured region is the layer's whole forward
            return None
        notes.update(noted)
        if not direct:
            missed = _not_passed_on(args, kwargs)
            return missed or partial(target._te_cuda_graph_replay, *args, **kwargs)
        kwargs = _pack_as_tensor(kwargs)
        return _no_tensor(args, kwargs) or partial(replay, args, kwargs)

    def replay(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        is_replay = target.cuda_graphs[0].is_replay
        if args:
            args = (own_gradient(args[0], is_replay), *args[1:])
        elif _HIDDEN in kwargs:
            kwargs = {**kwargs, _HIDDEN: own_gradient(kwargs[_HIDDEN], is_replay)}
        return target._te_cuda_graph_replay(*args, **kwargs)

    def changes() -> Iterator[Undo]:
        yield replay_instead(target, prepare, mismatches)
        yield put_over(target, "_should_call_te_cudagraph", _never)
        yield set_attribute(target, "cuda_graph_manual_hooks", list(before_replay))

    return all_of(changes())


def _noted_in(layer: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """The attributes of the layer's dispatcher, and those noted in the pass that was captured."""
    dispatcher = getattr(getattr(layer, "mlp", None), "token_dispatcher", None)
    attributes: dict[str, Any] = vars(dispatcher) if dispatcher is not None else {}
    values = {name: attributes.get(name) for name in _NOTED}
    return attributes, {k: v for k, v in values.items() if isinstance(v, int | tuple)}


def _pack_as_tensor(kwargs: Mapping[str, Any]) -> Mapping[str, Any]:
    """A pack's boundaries instead of the pack, if it has the form of all packs."""
    boundaries = getattr(kwargs.get(PACK), "boundaries", None)
    if boundaries is None:
        return kwargs
    return {**kwargs, PACK: None, BOUNDARIES: boundaries}


def _no_tensor(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Mismatch | None:
    """Find an argument that is not a tensor. At capture each was a tensor or was not given.

    Megatron's replay would fail with "CUDA graph accepts only Tensor inputs".
    """
    positional = ((f"number {index}", value) for index, value in enumerate(args))
    for name, value in (*positional, *kwargs.items()):
        if value is not None and not isinstance(value, torch.Tensor):
            return Mismatch(
                "object",
                f"argument {name}",
                "not given",
                described(value),
                "A graph takes only tensors. Inference contexts run eagerly, and so do packed "
                "sequences without --cg-pack-sequences N, or a pack of more than N sequences or "
                "with padding between them.",
            )
    return None


def _not_passed_on(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Mismatch | None:
    """Find what the rest of the layer would read, for a graph that begins behind attention.

    Megatron's replay runs attention with all arguments, and the rest of the layer with attention's
    output alone. The router would count padding, and balance the samples of a pack as one.
    """
    hidden = args[0] if args else kwargs.get(_HIDDEN)
    sample = getattr(kwargs.get(PACK), "tokens_per_sample", None)
    samples = hidden.shape[0] // sample if sample and hidden is not None else 1
    for name, value in (
        ("argument padding_mask", kwargs.get("padding_mask")),
        (f"{PACK}.tokens_per_sample", sample if samples > 1 else None),
    ):
        if value is not None:
            return Mismatch(
                "structure",
                name,
                "not given",
                described(value),
                "Megatron does not pass it on to the part of the layer that its graph holds.",
            )
    return None


def _never(*_args: Any, **_kwargs: Any) -> bool:
    return False
