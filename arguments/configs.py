"""The settings of a model that was built in Python, read from its configs.

Relied on: megatron-core 0.19.2, the fields of ``TransformerConfig``,
``DistributedDataParallelConfig`` and ``OptimizerConfig``; ``decoder.layers`` of its models with
``is_moe_layer`` and ``self_attention`` of a ``TransformerLayer``; ``HybridModel``'s
``hybrid_layer_pattern``. Values that Megatron's parser would derive from flags are read from the
model.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from megatron_cg.arguments.layout import decoder_symbols
from megatron_cg.arguments.schema import RunArguments, dtype_name
from megatron_cg.upstream.symbols import changed

DISTRIBUTED: Mapping[str, str] = {
    "data_parallel_sharding_strategy": "data_parallel_sharding_strategy",
    "megatron_fsdp_main_grads_dtype": "megatron_fsdp_main_grads_dtype",
    "megatron_fsdp_grad_comm_dtype": "megatron_fsdp_grad_comm_dtype",
    "fsdp_double_buffer": "fsdp_double_buffer",
    "fsdp_db_use_persist_buf_on_alloc_fail": "fsdp_db_use_persist_buf_on_alloc_fail",
    "fp8_param_gather": "fp8_param_gather",
    "keep_fp8_transpose_cache": "keep_fp8_transpose_cache",
    "delay_wgrad_compute": "delay_wgrad_compute",
}
"""Fields of :class:`RunArguments`, each with its field of ``DistributedDataParallelConfig``.

A switch that ``TransformerConfig`` has too is on if one is on.
"""

OPTIMIZER = ("optimizer_cuda_graph",)
"""Fields that ``OptimizerConfig`` has under the same name."""

ELSEWHERE: Mapping[str, str] = {
    "use_megatron_fsdp": "a model that is wrapped in MegatronFSDP uses it",
    **dict.fromkeys(OPTIMIZER, "a field of OptimizerConfig, read from the optimizer's config"),
    "hybrid_layer_pattern": "an argument of HybridModel, read from the model",
    "gradient_ranks": "sizes of process groups; for a model those of this process",
    "custom_layers": "flags that name a layer spec; the layers are read from the model instead",
    "moe_routing_trace_path": "a flag of megatron.training",
    "sft": "of megatron.training's data loader; other loops pack sequences themselves",
    "rl_use_sequence_packing": "of megatron.training's reinforcement learning",
    "dataloader_inter_document_masking": "of megatron.training's data loader",
    "micro_batch_size": "of megatron.training's data loader",
}
"""The other fields, with the reason why neither config has them."""

TRANSFORMER: Mapping[str, str] = {
    **{
        field.name: field.name
        for field in dataclasses.fields(RunArguments)
        if field.name not in (*DISTRIBUTED, *ELSEWHERE)
    },
    "num_experts": "num_moe_experts",
    "fp8_param_gather": "fp8_param",
    "delay_wgrad_compute": "delay_wgrad_compute",
    "te_rng_tracker": "use_te_rng_tracker",
}
"""Fields of :class:`RunArguments`, each with its field of ``TransformerConfig``."""


def run_of(model: Any, config: Any, ddp_config: Any, optimizer_config: Any = None) -> RunArguments:
    """The settings of a model under Megatron-FSDP, in the form that the rules read.

    Args:
        model: megatron-core's model without its wrappers; it has ``decoder``.
        config: its ``TransformerConfig``.
        ddp_config: Megatron-FSDP's ``DistributedDataParallelConfig``.
        optimizer_config: the optimizer's ``OptimizerConfig``, if it has one.

    Raises UpstreamChangedError when a field of the two configs is missing.
    """
    values = {ours: _get(config, "TransformerConfig", name) for ours, name in TRANSFORMER.items()}
    for ours, name in DISTRIBUTED.items():
        value = _get(ddp_config, "DistributedDataParallelConfig", name)
        values[ours] = values.get(ours) or value
    values["cuda_graph_modules"] = tuple(scope.name for scope in values["cuda_graph_modules"])
    values["recompute_modules"] = tuple(values["recompute_modules"] or ("core_attn",))
    values["fp8_recipe"] = str(getattr(values["fp8_recipe"], "value", values["fp8_recipe"]))
    balancing = values["moe_router_load_balancing_type"]
    values["moe_router_load_balancing_type"] = (
        (balancing,) if isinstance(balancing, str) else tuple(balancing)
    )
    for name in ("megatron_fsdp_main_grads_dtype", "megatron_fsdp_grad_comm_dtype"):
        values[name] = dtype_name(values[name])
    frequency = values["moe_layer_freq"]
    values["moe_layer_freq"] = frequency if isinstance(frequency, int) else tuple(frequency)
    if optimizer_config is not None:
        values |= {name: _get(optimizer_config, "OptimizerConfig", name) for name in OPTIMIZER}
    return RunArguments(**{**values, **_layers(model)}, use_megatron_fsdp=True)


def _get(config: Any, kind: str, name: str) -> Any:
    try:
        return getattr(config, name)
    except AttributeError as error:
        raise changed("megatron-core", f"{kind}.{name}", "a field of the config") from error


def _layers(model: Any) -> dict[str, Any]:
    """The kinds of layers, from the model itself: a spec may differ from the config."""
    pattern = getattr(model, "hybrid_layer_pattern", None)
    if pattern is not None:
        return {"hybrid_layer_pattern": pattern, "num_layers": len(decoder_symbols(pattern))}
    layers = list(getattr(getattr(model, "decoder", None), "layers", ()))
    if not layers or not all(_is_plain(layer) for layer in layers):
        return {"custom_layers": True}
    return {
        "num_layers": len(layers),
        "moe_layer_freq": tuple(int(layer.is_moe_layer) for layer in layers),
    }


def _is_plain(layer: Any) -> bool:
    """Whether a layer is attention followed by an MLP or experts, as the rules assume."""
    parts = [getattr(layer, name, None) for name in ("self_attention", "mlp")]
    has_parts = all(p is not None and type(p).__name__ != "IdentityOp" for p in parts)
    return has_parts and hasattr(layer, "is_moe_layer")
