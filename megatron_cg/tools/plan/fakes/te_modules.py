"""Fakes of the Transformer Engine modules in Megatron's layers.

Constructors and parameters match the originals (transformer-engine 2.20.2): names, order, shapes
and dtypes. So the Megatron classes derived from them, and Megatron-FSDP's buckets, are the same as
on a GPU. Anything without a fake raises :class:`NotLikened`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from megatron_cg.errors import MegatronCGError
from megatron_cg.moe.grouped_gemm import GroupedGemm
from megatron_cg.tools.cpu.grouped_linear import SETTINGS
from megatron_cg.tools.plan.fakes import functions
from megatron_cg.tools.plan.trace import launched


class NotLikened(MegatronCGError):
    """The model uses a part of Transformer Engine that cannot be planned."""


def refused(what: str) -> NotLikened:
    """The error for such a part."""
    return NotLikened(f"a model with {what} cannot be planned yet: there is no fake of it.")


class TransformerEngineBaseModule(nn.Module):
    """``module/base.py``: the attributes that Megatron and Megatron-FSDP read of TE modules."""

    def __init__(self, name: str | None = None) -> None:
        super().__init__()
        self.name = name
        self.fp8_meta: dict[str, Any] = {}
        self.primary_weights_in_fp8 = False
        self.save_original_input = False

    def set_tensor_parallel_group(self, group: Any) -> None:
        """Keep the group."""
        self.tp_group = group

    def need_backward_dw(self) -> bool:
        """Weight gradients are never delayed: the rules refuse that."""
        return False

    def _add_parameters(self, dtype: Any, device: Any, **shapes: tuple[int, ...]) -> None:
        for name, shape in shapes.items():
            empty = torch.empty(shape, dtype=dtype or torch.get_default_dtype(), device=device)
            self.register_parameter(name, nn.Parameter(empty))


class Linear(TransformerEngineBaseModule):
    """``module/linear.py``."""

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        sequence_parallel: bool = False,
        fuse_wgrad_accumulation: bool = False,
        tp_group: Any = None,
        tp_size: int = 1,
        bias: bool = True,
        return_bias: bool = False,
        params_dtype: torch.dtype | None = None,
        parallel_mode: str | None = None,
        device: Any = "meta",
        normalization: str | None = None,
        **_settings: Any,
    ) -> None:
        super().__init__()
        self.in_features = in_features // (tp_size if parallel_mode == "row" else 1)
        self.out_features = out_features // (tp_size if parallel_mode == "column" else 1)
        self.tp_group, self.tp_size, self.parallel_mode = tp_group, tp_size, parallel_mode
        self.sequence_parallel = tp_size > 1 and sequence_parallel
        self.fuse_wgrad_accumulation = fuse_wgrad_accumulation
        self.use_bias, self.return_bias, self.normalization = bias, return_bias, normalization
        shapes: dict[str, tuple[int, ...]] = {}
        if normalization is not None:
            shapes["layer_norm_weight"] = (self.in_features,)
        if normalization not in (None, "RMSNorm"):
            shapes["layer_norm_bias"] = (self.in_features,)
        shapes["weight"] = (self.out_features, self.in_features)
        if bias:
            shapes["bias"] = (self.out_features,)
        else:
            self.bias = torch.Tensor().to(dtype=params_dtype)
        self._add_parameters(params_dtype, device, **shapes)

    def forward(self, inp: Tensor, is_first_microbatch: bool | None = None) -> Any:
        """As TE's: the output, together with the bias if requested."""
        parallel = functions.Parallel(
            self.parallel_mode, self.tp_size, self.sequence_parallel, self.fuse_wgrad_accumulation
        )
        bias = self.bias if self.use_bias and not self.return_bias else None
        norm = (getattr(self, f"layer_norm_{name}", None) for name in ("weight", "bias"))
        out = functions.applied(functions.Linear, inp, parallel, *norm, self.weight, bias)
        return (out, self.bias) if self.return_bias else out


class LayerNormLinear(Linear):
    """``module/layernorm_linear.py``."""

    def __init__(self, *args: Any, normalization: str = "LayerNorm", **settings: Any) -> None:
        if settings.get("return_layernorm_output"):
            raise refused("return_layernorm_output")
        super().__init__(*args, normalization=normalization, **settings)


class GroupedLinear(TransformerEngineBaseModule):
    """``module/grouped_linear.py``: ``weight0`` to ``weightN`` of the local experts."""

    def __init__(
        self,
        num_gemms: int,
        in_features: int,
        out_features: int,
        *,
        fuse_wgrad_accumulation: bool = False,
        tp_size: int = 1,
        bias: bool = True,
        params_dtype: torch.dtype | None = None,
        parallel_mode: str | None = None,
        device: Any = "meta",
        single_grouped_weight: bool = False,
        **_settings: Any,
    ) -> None:
        super().__init__()
        if single_grouped_weight:
            raise refused("one tensor for all experts' weights")
        self.num_gemms = num_gemms
        self.in_features = in_features // (tp_size if parallel_mode == "row" else 1)
        self.out_features = out_features // (tp_size if parallel_mode == "column" else 1)
        self.fuse_wgrad_accumulation = fuse_wgrad_accumulation
        self.use_bias = bias
        shapes: dict[str, tuple[int, ...]] = {}
        for index in range(num_gemms):
            shapes[f"weight{index}"] = (self.out_features, self.in_features)
            if bias:
                shapes[f"bias{index}"] = (self.out_features,)
        self._add_parameters(params_dtype, device, **shapes)

    def forward(self, inp: Tensor, m_splits: Any, is_first_microbatch: Any = None) -> Tensor:
        """As TE's, for any split of the tokens; a tensor has the counts on the device."""
        if self.use_bias:
            raise refused("biases of experts in a graph")
        weights = [getattr(self, f"weight{index}") for index in range(self.num_gemms)]
        if isinstance(m_splits, Tensor):
            given = (m_splits, SETTINGS, None, None)
            return functions.applied(GroupedGemm, inp, *given, *weights)[0]
        fused = self.fuse_wgrad_accumulation
        return functions.applied(functions.GroupedLinear, inp, fused, *weights)


class RMSNorm(nn.Module):
    """``ops/basic/rmsnorm.py`` by way of ``module/rmsnorm.py``."""

    names: tuple[str, ...] = ("weight",)

    def __init__(
        self,
        normalized_shape: int,
        eps: float = 1e-5,
        device: Any = "meta",
        params_dtype: torch.dtype | None = None,
        sequence_parallel: bool | None = None,
        **_settings: Any,
    ) -> None:
        super().__init__()
        for name in self.names:
            empty = torch.empty(normalized_shape, dtype=params_dtype, device=device)
            parameter = nn.Parameter(empty)
            parameter.sequence_parallel = bool(sequence_parallel)  # type: ignore[attr-defined]
            self.register_parameter(name, parameter)

    def forward(self, inp: Tensor) -> Tensor:
        """The input's shape."""
        return functions.applied(functions.Norm, inp, self.weight, self._parameters.get("bias"))


class LayerNorm(RMSNorm):
    """``ops/basic/layer_norm.py`` by way of ``module/layernorm.py``."""

    names = ("weight", "bias")


class DotProductAttention(TransformerEngineBaseModule):
    """``attention/dot_product_attention``, with cuDNN's fused attention as its backend."""

    deterministic = False
    """Whether ``NVTE_ALLOW_NONDETERMINISTIC_ALGO`` is 0; set by the planner."""

    def __init__(
        self,
        num_attention_heads: int,
        kv_channels: int | tuple[int, int],
        cp_group: Any = None,
        softmax_type: str = "vanilla",
        return_max_logit: bool = False,
        **_settings: Any,
    ) -> None:
        super().__init__()
        self.refusal: NotLikened | None = None
        if softmax_type != "vanilla" or return_max_logit:
            self.refusal = refused("a softmax offset or the largest logits of attention")
        if cp_group is not None and cp_group.size() > 1:
            self.refusal = refused("context parallel attention")

    def forward(self, query: Tensor, key: Tensor, value: Tensor, *_rest: Any, **_more: Any) -> Any:
        """Takes q [s, b, h, d], and k and v in the same form; returns [s, b, h * e]."""
        if self.refusal is not None:
            raise self.refusal
        given = _laid_out(query, key, value)
        out = functions.applied(functions.FusedAttention, *given, self.deterministic)
        return out.view(out.shape[0], out.shape[1], -1)


def _laid_out(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """``get_qkv_layout`` (``dot_product_attention/utils.py``): copies tensors of unknown layout.

    Of the layouts in one tensor, Megatron's q, k and v can have only heads side by side
    (``sbh3d``), if nothing changed them since they were split.
    """
    parts = (q, k, v)
    if (
        len({id(part.untyped_storage()) for part in parts}) == 1
        and len({(part.shape, part.stride()) for part in parts}) == 1
        and all(part.storage_offset() == i * q.shape[-1] for i, part in enumerate(parts))
    ):
        return parts
    return q.contiguous(), k.contiguous(), v.contiguous()


def apply_rotary_pos_emb(t: Tensor, freqs: Tensor, **_settings: Any) -> Tensor:
    """``attention/rope.py``, fused."""
    return functions.applied(functions.Rotary, t, freqs)


def general_gemm(
    A: Tensor,
    B: Tensor,
    out_dtype: torch.dtype | None = None,
    layout: str = "TN",
    out: Tensor | None = None,
    **_settings: Any,
) -> tuple[Any, ...]:
    """``cpp_extensions/gemm.py``: a new tensor; TE's own workspace is not in the graph's pool."""
    launched(1)
    if out is None:
        inner_a, inner_b = A.reshape(-1, A.shape[-1]), B.reshape(-1, B.shape[-1])
        width = inner_a.shape[0] if layout[0] == "T" else inner_a.shape[1]
        rows = inner_b.shape[0] if layout[1] == "N" else inner_b.shape[1]
        shape = (*B.shape[:-1], width) if layout[1] == "N" else (rows, width)
        out = B.new_empty(shape, dtype=out_dtype or B.dtype)
    return out, None, None, None
