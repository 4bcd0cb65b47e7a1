"""Fakes of the Transformer Engine modules in Megatron's layers.

Constructors and parameters match the originals (transformer-engine 2.20.2): names, order, shapes
and dtypes. So the Megatron classes derived from them, and Megatron-FSDP's buckets, are the same as
on a GPU. Anything without a fake raises :class:`NotLikened`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, cast

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

    def _parameter(self, name: str, shape: tuple[int, ...], dtype: Any, device: Any) -> None:
        self.register_parameter(name, nn.Parameter(torch.empty(shape, dtype=dtype, device=device)))


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
        **_settings: Any,
    ) -> None:
        super().__init__()
        self.in_features, self.out_features = in_features, out_features
        self.tp_group, self.tp_size, self.parallel_mode = tp_group, tp_size, parallel_mode
        if parallel_mode == "column":
            self.out_features //= tp_size
        elif parallel_mode == "row":
            self.in_features //= tp_size
        self.sequence_parallel = tp_size > 1 and sequence_parallel
        self.fuse_wgrad_accumulation = fuse_wgrad_accumulation
        self.use_bias, self.return_bias = bias, return_bias
        dtype = params_dtype or torch.get_default_dtype()
        self._norm_parameters(dtype, device)
        self._parameter("weight", (self.out_features, self.in_features), dtype, device)
        if bias:
            self._parameter("bias", (self.out_features,), dtype, device)
        else:
            self.bias = torch.Tensor().to(dtype=dtype)

    def _norm_parameters(self, dtype: torch.dtype, device: Any) -> None:
        """The parameters before the weight."""

    def forward(self, inp: Tensor, is_first_microbatch: bool | None = None) -> Any:
        """As TE's: the output, together with the bias if requested."""
        return self._with_bias(self._product(inp))

    def _product(self, inp: Tensor) -> Tensor:
        out: Tensor = functions.applied(
            functions.Linear,
            inp,
            self.weight,
            self.bias if self.use_bias and not self.return_bias else None,
            self._parallel(),
        )
        return out

    def _parallel(self) -> functions.Parallel:
        return functions.Parallel(
            self.parallel_mode,
            self.tp_size,
            self.sequence_parallel,
            self.fuse_wgrad_accumulation,
        )

    def _with_bias(self, out: Tensor) -> Any:
        return (out, self.bias) if self.return_bias else out


class LayerNormLinear(Linear):
    """``module/layernorm_linear.py``."""

    def __init__(self, *args: Any, normalization: str = "LayerNorm", **settings: Any) -> None:
        if settings.get("return_layernorm_output"):
            raise refused("return_layernorm_output")
        # Set before nn.Module's __init__: creating the parameters reads it.
        vars(self)["normalization"] = normalization
        super().__init__(*args, **settings)

    def _norm_parameters(self, dtype: torch.dtype, device: Any) -> None:
        self._parameter("layer_norm_weight", (self.in_features,), dtype, device)
        if self.normalization != "RMSNorm":
            self._parameter("layer_norm_bias", (self.in_features,), dtype, device)
        else:
            self.layer_norm_bias = None

    def _product(self, inp: Tensor) -> Tensor:
        out: Tensor = functions.applied(
            functions.NormLinear,
            inp,
            self._parallel(),
            self.layer_norm_weight,
            self.layer_norm_bias,
            self.weight,
            self.bias if self.use_bias and not self.return_bias else None,
        )
        return out


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
        return_bias: bool = False,
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
        dtype = params_dtype or torch.get_default_dtype()
        for index in range(num_gemms):
            shape = (self.out_features, self.in_features)
            self._parameter(f"weight{index}", shape, dtype, device)
            if bias:
                self._parameter(f"bias{index}", (self.out_features,), dtype, device)

    def forward(self, inp: Tensor, m_splits: Any, is_first_microbatch: Any = None) -> Tensor:
        """As TE's, for any split of the tokens."""
        if self.use_bias:
            raise refused("biases of experts in a graph")
        weights = [getattr(self, f"weight{index}") for index in range(self.num_gemms)]
        if isinstance(m_splits, Tensor):  # counts on the device
            rows, _ = functions.applied(GroupedGemm, inp, m_splits, SETTINGS, None, None, *weights)
            return cast(Tensor, rows)
        out: Tensor = functions.applied(
            functions.GroupedLinear, inp, self.fuse_wgrad_accumulation, *weights
        )
        return out


class RMSNorm(nn.Module):
    """``ops/basic/rmsnorm.py`` by way of ``module/rmsnorm.py``."""

    has_bias = False

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
        names = ("weight", "bias") if self.has_bias else ("weight",)
        for name in names:
            parameter = nn.Parameter(
                torch.empty(normalized_shape, dtype=params_dtype, device=device)
            )
            parameter.sequence_parallel = bool(sequence_parallel)  # type: ignore[attr-defined]
            self.register_parameter(name, parameter)

    def forward(self, inp: Tensor) -> Tensor:
        """The input's shape."""
        bias = self.bias if self.has_bias else None
        out: Tensor = functions.applied(functions.Norm, inp, self.weight, bias)
        return out


class LayerNorm(RMSNorm):
    """``ops/basic/layer_norm.py`` by way of ``module/layernorm.py``."""

    has_bias = True


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
        q, k, v = _laid_out(query, key, value)
        out: Tensor = functions.applied(functions.FusedAttention, q, k, v, self.deterministic)
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


class CudaRNGStatesTracker:
    """``distributed.py``: knows names but holds no random state, because nothing is drawn."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Forget all states."""
        self.states_: dict[str, Any] = {}
        self.seeds_: set[int] = set()

    def get_states(self) -> dict[str, Any]:
        """The states."""
        return self.states_

    def set_states(self, states: dict[str, Any]) -> None:
        """Set these states."""
        self.states_ = states

    def add(self, name: str, seed: int) -> None:
        """Register ``name``."""
        self.states_[name] = seed

    @contextmanager
    def fork(self, name: str = "model-parallel-rng") -> Iterator[None]:
        """Does nothing, because nothing is drawn."""
        yield


def apply_rotary_pos_emb(t: Tensor, freqs: Tensor, **_settings: Any) -> Tensor:
    """``attention/rope.py``, fused."""
    out: Tensor = functions.applied(functions.Rotary, t, freqs)
    return out


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
