"""Main gradients and main weights, attached and copied from a table.

Note [From a table]
    Megatron-FSDP computes in every step which slice of which buffer belongs to which parameter.
    Here each slice is cut once and reused as long as its buffer is the same tensor. Megatron-FSDP
    makes the DTensors around the slices, in the first step. If one is not there, its own function
    runs. Its copies would be allocated beside the graphs' memory, and the allocator would keep that
    memory (2.4 GiB of the preset ``qwen3-moe``).

Note [Copies in borrowed memory]
    The copies that the optimizer reads live from the end of a step's last backward pass to the
    next ``zero_grad``. No graph runs in that time, so the copies may borrow the graphs' own memory
    (``memory/scratch.py``). Gradients that a script keeps longer are relocated before the next
    forward pass. Any other tensor in the same memory (``p.grad.detach()``, a local tensor) is
    overwritten by the next replay. Such tensors are detected before it, too late to save them: a
    warning follows, and no more memory is borrowed.
    Each parameter has a piece of its own: small pieces fit between other tensors, and one piece per
    bucket would need memory of its own (3.6 GiB more reserved, preset ``qwen3-moe``).
"""

import logging
from collections.abc import Callable
from contextlib import ExitStack
from itertools import chain
from operator import is_
from typing import Any

import torch

from megatron_cg.fastpath.part import NotApplicableError, float8_test
from megatron_cg.fsdp.roles import fsdp_class, fsdp_function
from megatron_cg.memory.scratch import IdlePool
from megatron_cg.ranges import in_range
from megatron_cg.upstream.patch import put_over, run_around

logger = logging.getLogger(__name__)

_ATTACH, _INSTALL = "update_main_grads", "copy_main_weights_to_model_weights"
REPLACES_ATTACHING = fsdp_function(
    f"ParamAndGradBuffer.{_ATTACH}",
    "what gives the optimizer its gradients",
    fingerprints=("bfef5848565df378",),
)
REPLACES_INSTALLING = fsdp_function(
    f"ParamAndGradBuffer.{_INSTALL}", "what copies main weights", fingerprints=("64c2878b6e09f195",)
)
RELIES_ON = (
    *REPLACES_ATTACHING,
    *REPLACES_INSTALLING,
    *fsdp_class("ParamAndGradBuffer", "optimizer_named_parameters", "dist_main_grad"),
    *fsdp_class("ParamAndGradBuffer", "use_decoupled_grad", "bucketing_policy"),
    *fsdp_class("ParamAndGradBuffer", "parameter_groups", "param_to_param_group"),
    *fsdp_class("DataParallelBuffer", "data", "get_item", "param_idx", "dtype"),
    *fsdp_class("DataParallelBuffer", "is_data_distributed"),
)


def install_main_gradients(fsdp: Any, scratch: IdlePool | None) -> Callable[[], None]:
    """Attach gradients to the optimizer's parameters from a table; returns the undo.

    ``scratch`` is memory for their copies, see Note [Copies in borrowed memory]; None: ordinary.
    """
    store = fsdp.param_and_grad_buffer
    table = _GradientTable(store, scratch)

    def relocate() -> None:
        if table.borrowed and fsdp.training and torch.is_grad_enabled():
            table.relocate()

    with ExitStack() as undo:
        undo.callback(put_over(store, _ATTACH, table))
        undo.callback(run_around(fsdp, "forward", before=relocate))
        return undo.pop_all().close


Kind = tuple[torch.device, torch.dtype, torch.dtype] | None
"""Device of gradients, and the dtypes they are cast from and to; None: they are read in place."""


class _GradientTable:
    """Replaces ``update_main_grads``."""

    def __init__(self, store: Any, scratch: IdlePool | None) -> None:
        self._store, self._original, self._scratch = store, store.update_main_grads, scratch
        self._read_from: list[tuple[Any, torch.Tensor]] = []
        """Each bucket's buffer of gradients, and the tensor that it was when it was read."""
        self._kinds: dict[Kind, _GradientsOfKind] = {}
        self.borrowed = False
        """Whether copies may be in memory that the next replay writes to."""

    @in_range("main gradients")
    def __call__(self) -> None:
        moved = any(buffer.data is not data for buffer, data in self._read_from)
        if (moved or not self._kinds) and not self._read():
            self._original()
            return
        attribute = "decoupled_grad" if self._store.use_decoupled_grad else "grad"
        for gradients in self._kinds.values():
            gradients.attach(attribute, self._scratch)
        self.borrowed = self._scratch is not None and self._scratch.borrows()

    def relocate(self) -> None:
        self.borrowed = False
        for gradients in self._kinds.values():
            gradients.relocate()
        held = self._scratch.still_held() if self._scratch is not None else 0
        if held and self._scratch is not None:
            self._scratch.stop_borrowing()
            logger.warning(
                "megatron_cg: at the start of a forward pass, at least %d tensors still share "
                "memory with the optimizer's gradients. The graphs use that memory now, so the "
                "values of these tensors are lost: clone what you want to keep. From now on, "
                "gradients have their own memory.",
                held,
            )

    def _read(self) -> bool:
        """Read which slice is each parameter's; False if a DTensor is not made yet."""
        store = self._store
        sharded = store.bucketing_policy.data_parallel_sharding_strategy != "no_shard"
        buffers: dict[int, Any] = {}
        kinds: dict[Kind, _GradientsOfKind] = {}
        for name, parameter in store.optimizer_named_parameters:
            original = parameter.orig_param
            number = store.param_to_param_group[original]
            group = store.parameter_groups[number]
            buffer, gradient = group.main_grad_buffer, store.dist_main_grad.get(name)
            if buffer is None:
                continue
            if gradient is None:
                return False
            buffers[number], data = buffer, buffer.data
            has_main_weights = group.main_weight_buffer is not None and not store.use_decoupled_grad
            casts = has_main_weights and parameter.dtype != data.dtype
            kind = (data.device, data.dtype, parameter.dtype) if casts else None
            piece = buffer.get_item(buffer.param_idx[original], only_shard=sharded)
            piece = piece.view(-1, *original.shape[1:])
            kinds.setdefault(kind, _GradientsOfKind(kind)).add(parameter, gradient, piece)
        self._kinds = kinds
        self._read_from = [(buffer, buffer.data) for buffer in buffers.values()]
        return True


class _GradientsOfKind:
    """Gradients that are all read in place, or all cast in the same way."""

    def __init__(self, kind: Kind) -> None:
        self._kind = kind
        self._parameters: list[Any] = []
        self._gradients: list[Any] = []
        """DTensors that Megatron-FSDP made. Their local tensors are None after ``zero_grad``."""
        self._pieces: list[torch.Tensor] = []
        """Their pieces of the bucket's buffer."""
        self._empty: list[Any] = []
        """Parameters of which this rank's shard is empty."""

    def add(self, parameter: Any, gradient: Any, piece: torch.Tensor) -> None:
        if not piece.numel():
            self._empty.append(parameter)
            return
        self._parameters.append(parameter)
        self._gradients.append(gradient)
        self._pieces.append(piece)

    def attach(self, attribute: str, scratch: IdlePool | None) -> None:
        pieces = self._pieces
        if self._kind is not None and pieces:
            pieces = self._copies(self._kind[-1], scratch)
        for parameter, gradient, piece in zip(
            self._parameters, self._gradients, pieces, strict=True
        ):
            gradient._local_tensor = piece
            setattr(parameter, attribute, gradient)
        for parameter in self._empty:
            setattr(parameter, attribute, None)

    def _copies(self, dtype: torch.dtype, scratch: IdlePool | None) -> list[torch.Tensor]:
        for gradient in self._gradients:
            # Release earlier copies of this step, if gradients are scaled after the reduction.
            gradient._local_tensor = None
        if scratch is None:
            copies = [torch.empty_like(piece, dtype=dtype) for piece in self._pieces]
        else:
            copies = scratch.empty(self._kind, self._pieces, dtype)
        torch._foreach_copy_(copies, self._pieces)
        return copies

    def relocate(self) -> None:
        for gradient in self._gradients if self._kind is not None else ():
            copy = gradient._local_tensor
            if copy is not None:
                gradient._local_tensor = copy.clone()


def install_main_weights(fsdp: Any) -> Callable[[], None]:
    """Copy main weights into model weights with one fused call per bucket; returns the undo.

    Raises NotApplicableError if weights are quantised, or if no buffer holds model weights.
    """
    store, is_float8 = fsdp.param_and_grad_buffer, float8_test(fsdp)
    if any(is_float8(p) for group in store.parameter_groups for p in group.params):
        raise NotApplicableError("primary weights are FP8, and quantised after each step")
    for group in store.parameter_groups:
        if group.main_weight_buffer is not None and group.model_weight_buffer is None:
            raise NotApplicableError(
                "parameters are not sharded, and no buffer holds model weights"
            )
    return put_over(store, _INSTALL, _WeightTable(store))


class _WeightTable:
    """Replaces ``copy_main_weights_to_model_weights``."""

    def __init__(self, store: Any) -> None:
        self._groups = [g for g in store.parameter_groups if g.main_weight_buffer is not None]
        self._cut_from: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._pieces: list[tuple[list[torch.Tensor], list[torch.Tensor]]] = []
        """The shards of each bucket's parameters, to copy to and from; no empty ones."""

    @torch.no_grad()
    def __call__(self) -> None:
        data = [(g.model_weight_buffer.data, g.main_weight_buffer.data) for g in self._groups]
        if not all(map(is_, chain(*data), chain(*self._cut_from))) or not self._pieces:
            self._cut_from, self._pieces = data, list(map(_cut, self._groups))
        for model, main in self._pieces:
            if model:
                torch._foreach_copy_(model, main)


def _cut(group: Any) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    model, main = group.model_weight_buffer, group.main_weight_buffer
    shard = bool(model.is_data_distributed or main.is_data_distributed)
    places = [main.param_idx[parameter] for parameter in group.params]
    pairs = [[buffer.get_item(at, only_shard=shard) for buffer in (model, main)] for at in places]
    targets = [to for to, _ in pairs if to.numel() > 0]
    return targets, [source.view(to.shape) for to, source in pairs if to.numel() > 0]
