"""Attention of packed sequences in graphs, ``--cg-pack-sequences``.

The boundaries of a pack reach a layer in a ``PackedSeqParams``: a tensor with one element more than
the pack has sequences, and the length of the longest sequence as a number. A graph takes only
tensors, each of one shape.

Note [One form for all packs]
    ``GPTModel.forward`` repeats the last boundary until there are as many boundaries as the pack
    with the most sequences has. Repeated boundaries are sequences without tokens. The longest
    sequence is said to be as long as the pack. Eager passes get this form too. So attention chooses
    the same kernels there as in a graph, and the table of rotary angles has one shape.

Note [A pack in a graph]
    For a replay the pack is replaced by its boundaries (``units.py``), an input of the
    graph. In the captured region the pack is made again from that input.

Note [Positions in a pack]
    Megatron's unfused rotary embedding splits a pack at boundaries that it reads on the host. Here
    a token's position is found on the device, and its angles are the same. Positions count from the
    start of the sequence, as in Transformer Engine's fused kernel. Megatron's function counts from
    the start of the pack if the table has as many rows as the pack has tokens (megatron-core
    0.19.2). In this form that is always so. The table of mRoPE has a row for each token of the
    pack, so models with mRoPE are refused.

Note [Next tokens in a pack]
    Multi-token prediction shifts tokens by one in each sequence. Megatron's function reads two
    boundaries on the host for each of them, also for sequences without tokens. The one here reads
    none.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial, wraps
from inspect import signature
from typing import Any

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.enums import CudaGraphModule
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.transformer_layer import TransformerLayer
from torch import nn

from megatron_cg.errors import ConfigurationError, Violation
from megatron_cg.integrations.megatron.masks import ObservedInputs
from megatron_cg.integrations.megatron.units import BOUNDARIES, PACK
from megatron_cg.upstream.patch import Undo, all_of, put_over
from megatron_cg.upstream.symbols import Symbol

_ROPE = "megatron.core.models.common.embeddings.rope_utils"
_LAYER = "megatron.core.transformer.transformer_layer:TransformerLayer"
_FORWARD = Symbol(
    "megatron-core",
    "megatron.core.models.gpt.gpt_model:GPTModel.forward",
    "what passes a pack on to the layers",
)
_OF_PACKS = Symbol(
    "megatron-core",
    f"{_ROPE}:_apply_rotary_pos_emb_thd",
    "the unfused rotary embedding of packs",
    fingerprints=("fd266e7d8e432dd6",),
)
_OF_SEQUENCES = Symbol(
    "megatron-core",
    f"{_ROPE}:_apply_rotary_pos_emb_bshd",
    "the unfused rotary embedding of whole sequences",
    parameters=("t", "freqs", "rotary_interleaved", "mla_rotary_interleaved", "mscale"),
)
_SHIFT = Symbol(
    "megatron-core",
    "megatron.core.transformer.multi_token_prediction:_roll_tensor_packed_seq",
    "what shifts the tokens of a pack",
    fingerprints=("b126ba7dc2e75713",),
)
_SAMPLES = Symbol(
    "megatron-core", f"{_LAYER}.get_layer_static_inputs", "the sample inputs of a capture"
)
_REGION = Symbol(
    "megatron-core", f"{_LAYER}._te_cuda_graph_capture", "the part of a layer that its graph holds"
)
RELIES_ON = (_FORWARD, _OF_PACKS, _OF_SEQUENCES, _SHIFT, _SAMPLES, _REGION)

_MROPE = Violation(
    "pack-sequences-mrope",
    "--cg-pack-sequences in a model with mRoPE",
    "its table of angles has a row for each token of the pack, and with this flag positions begin "
    "anew in each sequence",
    "drop --cg-pack-sequences and leave attn out of --cuda-graph-modules",
)
_asked_for: list[int] = []
"""The most sequences of a pack, of each call of :func:`fix_packs` that is not undone."""


@dataclass
class FixedPack(PackedSeqParams):  # type: ignore[misc]
    """A pack in the form that all packs have; see the first note."""

    @property
    def boundaries(self) -> torch.Tensor:
        """Int32 ``[most sequences + 1]``: where sequences begin, and the end of the last."""
        starts: torch.Tensor = self.cu_seqlens_q
        return starts


def fix_packs(most: int) -> Undo:
    """Give packs of up to ``most`` sequences one form, in all models; returns the undo.

    A pack of more sequences stays as it is, and so does one with padding between sequences or
    spread over context-parallel ranks. Graphs do not hold their attention.

    Raises UpstreamChangedError if a function that this replaces has another body. A model
    with mRoPE raises ConfigurationError when it is called with a pack.
    """
    replaced = ((_OF_PACKS, _rotate), (_SHIFT, _shift))
    if not _asked_for:
        for symbol, _ in replaced:
            symbol.require_known_body()
    old = _FORWARD.find()
    parameters = signature(old)

    @wraps(old)
    def forward(*args: Any, **kwargs: Any) -> Any:
        given = parameters.bind(*args, **kwargs)
        pack, tokens = (given.arguments.get(name) for name in (PACK, "input_ids"))
        model = args[0]
        if pack is not None and tokens is not None and model.config.context_parallel_size == 1:
            if model.position_embedding_type == "mrope":
                raise ConfigurationError([_MROPE])
            given.arguments[PACK] = _fixed(pack, tokens.numel(), most)
        return old(*given.args, **given.kwargs)

    def changes() -> Iterator[Undo]:
        yield put_over(*_FORWARD.place(), forward)
        for symbol, ours in replaced:
            yield put_over(*symbol.place(), partial(ours, symbol.find()))
        _asked_for.append(most)
        yield partial(_asked_for.remove, most)

    return all_of(changes())


def most_sequences() -> int | None:
    """What :func:`fix_packs` was called with last; None if nothing is left to undo."""
    return _asked_for[-1] if _asked_for else None


def packs_as_inputs(layers: Sequence[nn.Module], inputs: ObservedInputs) -> Undo:
    """Capture attention with the boundaries of packs as an input, where layers get packs.

    Call it before sample inputs are made, and undo it after the graphs are deleted. Without
    :func:`fix_packs` it changes nothing.
    """
    most = most_sequences()
    if most is None:
        return lambda: None
    return all_of(
        undo
        for layer in layers
        if isinstance(layer, TransformerLayer) and not inputs.is_never_given(layer, PACK)
        for undo in _changes(layer, most)
    )


def _changes(layer: Any, most: int) -> Iterator[Undo]:
    samples = partial(_samples, layer, layer.get_layer_static_inputs, most)
    yield put_over(layer, "get_layer_static_inputs", samples)
    yield put_over(
        layer, "_te_cuda_graph_capture", partial(_region, layer, layer._te_cuda_graph_capture)
    )


def _samples(
    layer: Any, make: Callable[..., dict[str, Any]], most: int, *sizes: Any, **named: Any
) -> Any:
    made = make(*sizes, **named)
    modules = layer.config.cuda_graph_modules
    if (not modules or CudaGraphModule.attn in modules) and not isinstance(
        layer.self_attention, IdentityOp
    ):
        hidden = made["hidden_states"]
        device = hidden.device
        ends = torch.full((most + 1,), _tokens(layer, hidden), dtype=torch.int32, device=device)
        ends[0] = 0
        made[BOUNDARIES] = ends
    return made


def _region(layer: Any, run: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    boundaries = kwargs.pop(BOUNDARIES, None)
    if boundaries is not None:
        hidden = args[0] if args else kwargs["hidden_states"]
        kwargs[PACK] = _of(boundaries, _tokens(layer, hidden))
    return run(*args, **kwargs)


def _tokens(layer: Any, hidden: torch.Tensor) -> int:
    """Tokens of the pack that ``[tokens of this rank, 1, hidden size]`` belongs to."""
    config = layer.config
    ranks = config.tensor_model_parallel_size if config.sequence_parallel else 1
    return int(hidden.shape[0] * hidden.shape[1] * ranks)


def _of(boundaries: torch.Tensor, tokens: int) -> FixedPack:
    return FixedPack(
        qkv_format="thd",
        cu_seqlens_q=boundaries,
        cu_seqlens_kv=boundaries,
        max_seqlen_q=tokens,
        max_seqlen_kv=tokens,
    )


def _fixed(pack: Any, tokens: int, most: int) -> Any:
    if isinstance(pack, FixedPack):  # by a later call of fix_packs, which captures expect
        return pack
    starts = pack.cu_seqlens_q
    padded = (pack.cu_seqlens_q_padded, pack.cu_seqlens_kv_padded)
    others = (pack.local_cp_size, pack.cp_group, pack.total_tokens)
    fits = (
        pack.qkv_format == "thd"
        and pack.cu_seqlens_kv is starts
        and all(given is None or given is starts for given in padded)
        and not pack.pad_between_seqs
        and all(given is None for given in others)
        # Several samples in one pack: a MoE layer takes them apart again, and a replay would not.
        and (pack.tokens_per_sample or tokens) >= tokens
        and len(starts) <= most + 1
    )
    if not fits:
        return pack
    return _of(torch.cat([starts, starts[-1:].expand(most + 1 - len(starts))]), tokens)


def _rotate(
    old: Callable[..., torch.Tensor],
    t: torch.Tensor,
    cu_seqlens: torch.Tensor,
    freqs: torch.Tensor,
    **options: Any,
) -> torch.Tensor:
    """Rotate queries or keys of a pack, ``[tokens, heads, width]``, by ``[positions, 1, 1, d]``.

    A context-parallel rank has two parts of each sequence; Megatron's function knows which.
    """
    if options["cp_group"].size() > 1:
        return old(t, cu_seqlens, freqs, **options)
    del options["cp_group"]
    places = torch.arange(t.shape[0], device=t.device)
    sequence = torch.bucketize(places, cu_seqlens, right=True) - 1
    angles = freqs[places - cu_seqlens[sequence]]
    rotated: torch.Tensor = _OF_SEQUENCES.find()(t.unsqueeze(1), angles, **options)
    return rotated.squeeze(1)


def _shift(
    old: Callable[..., tuple[torch.Tensor, torch.Tensor]], tensor: torch.Tensor, *how: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """Move ``[..., tokens]`` one token to the left in each sequence; a last token becomes 0.

    Returns the moved tensor and its sum. What is behind the last sequence stays.
    """
    shifts, dims, pack, group = how
    if group is not None and group.size() > 1:
        return old(tensor, *how)
    starts = pack.cu_seqlens_q
    places = torch.arange(tensor.shape[-1] + 1, device=tensor.device)
    sequence = torch.bucketize(places, starts, right=True)
    moved = torch.roll(tensor, shifts, dims).masked_fill(sequence[1:] != sequence[:-1], 0)
    moved = moved.where(places[:-1] < starts[-1], tensor)
    return moved, moved.sum()
