"""Packed sequences on the CPU: packs, and what megatron-core lacks there without TE."""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from itertools import pairwise
from typing import Any

import torch

from megatron_cg.tape.fakes import replaced


def pack_of(starts: Sequence[int], **fields: Any) -> Any:
    """Samples that begin at these tokens, the last with the end of the last, as Megatron's."""
    from megatron.core.packed_seq_params import PackedSeqParams

    ends = torch.tensor(starts, dtype=torch.int32)
    longest = max(end - start for start, end in pairwise(starts))
    given = {"cu_seqlens_q": ends, "cu_seqlens_kv": ends, "max_seqlen_q": longest}
    return PackedSeqParams(**({"qkv_format": "thd", "max_seqlen_kv": longest} | given | fields))


def pack_at_spaces(model: torch.nn.Module) -> None:
    """Let ``model`` get a pack in each pass: a sample ends behind each space of its tokens."""
    from megatron.core.models.common.language_module.language_module import LanguageModule

    def give(_model: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        (tokens,) = args[0].tolist()
        ends = [place for place, token in enumerate(tokens[:-1], 1) if token == ord(" ")]
        return args, kwargs | {"packed_seq_params": pack_of((0, *ends, len(tokens)))}

    for module in model.modules():
        if isinstance(module, LanguageModule):
            module.register_forward_pre_hook(give, with_kwargs=True)


def _samples_of(starts: torch.Tensor, tokens: int) -> torch.Tensor:
    places = torch.arange(tokens, device=starts.device)
    return torch.bucketize(places, starts, right=True)


def attention_of_packs(attention: Any) -> Any:
    """megatron-core's own attention, which takes packs as TE's does: ``[tokens, heads, width]``."""

    class Attention(attention):  # type: ignore[misc]
        def forward(self, *tensors: Any, packed_seq_params: Any = None, **named: Any) -> Any:
            if packed_seq_params is None:
                return super().forward(*tensors, **named)
            query, key, value = (tensor.unsqueeze(1) for tensor in tensors[:3])
            sample = _samples_of(packed_seq_params.cu_seqlens_q, len(query))
            others = sample[:, None] != sample[None, :]
            later = torch.ones_like(others).triu(1)
            mask = (others | later).reshape(1, 1, *others.shape)
            return super().forward(query, key, value, mask, **named)

    return Attention


def rotated_in_packs(
    tensor: torch.Tensor, starts: torch.Tensor, table: torch.Tensor, **_named: Any
) -> torch.Tensor:
    """As TE's kernel: each sample begins at the table's first row. Reads nothing on the host."""
    sample = _samples_of(starts, len(tensor)) - 1
    places = torch.arange(len(tensor), device=tensor.device) - starts[sample]
    return rotated(tensor.unsqueeze(1), table[places]).squeeze(1)


def rotated(tensor: torch.Tensor, table: torch.Tensor, **_named: Any) -> torch.Tensor:
    from megatron.core.models.common.embeddings import rope_utils

    made: torch.Tensor = rope_utils._apply_rotary_pos_emb_bshd(tensor, table)
    return made


@contextmanager
def packs_on_cpu() -> Iterator[None]:
    """Models that are built in the block take packs, with fused rotary positions."""
    from megatron.core.models import backends
    from megatron.core.models.common.embeddings import rope_utils

    attention = attention_of_packs(backends.DotProductAttention)
    with ExitStack() as stack:
        stack.enter_context(replaced(backends, "DotProductAttention", attention))
        name = "fused_apply_rotary_pos_emb"
        stack.enter_context(replaced(rope_utils, f"{name}_thd", rotated_in_packs))
        stack.enter_context(replaced(rope_utils, name, rotated))
        yield
