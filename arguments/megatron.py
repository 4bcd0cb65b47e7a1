"""Reads the settings of a run from Megatron: from its namespace, or from a model's configs.

Relied on: megatron-core 0.19.2, the namespace of ``megatron.training.arguments``, as returned by
``parse_args`` or as modified by ``validate_args``; the fields of ``TransformerConfig``,
``DistributedDataParallelConfig`` and ``OptimizerConfig``, which have the same names;
``decoder.layers`` of its models, and ``HybridModel``'s ``hybrid_layer_pattern``. What
``validate_args`` derives from other flags is derived here too, so all of them give the same
:class:`RunArguments`. Read by ``getattr`` is what it deletes after using it, or what 0.19.2 lacks.
"""

import argparse
import dataclasses
import logging
import re
from collections.abc import Iterable
from typing import Any

from megatron_cg.arguments import schema
from megatron_cg.arguments.layers import decoder_symbols
from megatron_cg.arguments.rules import notices, violations
from megatron_cg.errors import ConfigurationError
from megatron_cg.upstream.symbols import changed

logger = logging.getLogger(__name__)

PACKING = {
    "sft": "enable_offline_packing",
    "rl_use_sequence_packing": "enable_in_batch_packing",
    "dataloader_inter_document_masking": "inter_document_masking",
}
"""Megatron's flags, and what does the same in the dataset's config of Megatron-Bridge."""
_FIELDS = [field.name for field in dataclasses.fields(schema.RunArguments)]

_NOT_IN_CONFIGS = (
    *("hybrid_layer_pattern", "hybrid_override_pattern", "encoder_num_layers", "te_rng_tracker"),
    *("spec", "heterogeneous_layers_config_path", "heterogeneous_layers_config_encoded_json"),
    *(*PACKING, "optimizer_cuda_graph", "optimizer_cpu_offload"),
)
"""Flags of megatron.training, and those of an optimizer, which a model may not have."""


def add_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add the group ``megatron_cg`` with a flag for each field of GraphArguments.

    Returns ``parser``, with a ``--help`` that argparse can format.
    """
    for action in parser._actions:  # Texts of megatron-core 0.19.2 and 0.20 have "10%)" and "% m".
        action.help = action.help and re.sub(r"%(?![(%s])(?<!%%)", "%%", action.help)
    group = parser.add_argument_group(title="megatron_cg")
    for field in dataclasses.fields(schema.GraphArguments):
        group.add_argument(
            schema.flag_of(field.name),
            default=field.default,
            help=field.metadata["help"],
            **field.metadata["argparse"],
        )
    return parser


def wants_graphs(namespace: argparse.Namespace) -> bool:
    """Whether the run asks for layerwise graphs under Megatron-FSDP.

    Reads no more than it needs. So a run without graphs cannot fail here because of a setting that
    only graphs need.
    """
    if not getattr(namespace, "use_megatron_fsdp", False):
        return False
    return schema.RunArguments(use_megatron_fsdp=True, **_graph_settings(namespace)).wants_graphs


def read_graph(namespace: argparse.Namespace) -> schema.GraphArguments:
    given = {
        field.name: getattr(namespace, field.name)
        for field in dataclasses.fields(schema.GraphArguments)
        if hasattr(namespace, field.name)
    }
    if "cg_layers" in given:
        given["cg_layers"] = tuple(given["cg_layers"])
    return schema.GraphArguments(**given)


def read_run(namespace: argparse.Namespace) -> schema.RunArguments:
    """Megatron's settings, with the same derivations as in ``validate_args``.

    Raises UpstreamChangedError when a required attribute of Megatron is missing.
    """
    recipe, kernels = _get(namespace, "fp8_recipe"), _get(namespace, "attention_backend")
    derived = {
        **_graph_settings(namespace),
        **_layer_settings(namespace),
        **_recompute_settings(namespace),
        "megatron_fsdp_version": getattr(namespace, "megatron_fsdp_version", None) or 1,
        "fsdp_double_buffer": _any(
            namespace, "fsdp_double_buffer", "nccl_ub", "megatron_fsdp_max_pool_double_buffer"
        ),
        "moe_router_load_balancing_type": tuple(
            scope_names(_get(namespace, "moe_router_load_balancing_type"))
        ),
        "expert_tensor_parallel_size": _get(namespace, "expert_tensor_parallel_size")
        or _get(namespace, "tensor_model_parallel_size"),
        "sequence_parallel": _get(namespace, "sequence_parallel")
        and _get(namespace, "tensor_model_parallel_size") > 1,
        "moe_router_padding_for_quantization": _any(
            namespace, "moe_router_padding_for_quantization", "moe_router_padding_for_fp8"
        ),
        "moe_use_grouped_tensor": bool(getattr(namespace, "moe_use_grouped_tensor", None)),
        "fp8_recipe": str(getattr(recipe, "value", recipe)),
        "attention_backend": str(getattr(kernels, "name", kernels or "auto")),
        "packs_sequences": _any(namespace, *PACKING),
        "rotates_positions": getattr(namespace, "position_embedding_type", None)
        not in (None, "learned_absolute", "relative", "none"),
        "micro_batch_size": getattr(namespace, "micro_batch_size", None) or 1,
    }
    unchanged = {name: _get(namespace, name) for name in _FIELDS if name not in derived}
    return schema.RunArguments(**unchanged, **derived)


def validate(
    namespace: argparse.Namespace,
    environment: schema.Environment | None = None,
    defaults: schema.GraphArguments = schema.GraphArguments(),  # noqa: B008
) -> None:
    """Check a run before Megatron's ``validate_args``; notices go to the log of rank 0.

    ``namespace`` is what Megatron's ``parse_args`` returns. ``environment`` is that of this process
    if None. ``defaults`` are those of our flags, which a run without graphs may have.

    Raises ConfigurationError with every violation at once. Raises nothing for a run that neither
    asks for layerwise graphs under Megatron-FSDP nor uses our flags about them. Raises
    UpstreamChangedError as :func:`read_run` does.
    """
    graph = read_graph(namespace)
    others = dataclasses.replace(defaults, cg_record=graph.cg_record)
    if not wants_graphs(namespace) and graph == others:
        return
    run = read_run(namespace)
    environment = environment or schema.Environment.read(schema.BACKENDS[graph.cg_backend])
    broken = violations(run, graph, environment)
    if broken:
        raise ConfigurationError(broken)
    if getattr(namespace, "rank", 0) == 0:
        for line in notices(run, environment):
            logger.warning("megatron_cg: %s", line)


def _get(namespace: argparse.Namespace, name: str) -> Any:
    try:
        return getattr(namespace, name)
    except AttributeError as error:
        raise changed(
            "megatron-core",
            f"args.{name}",
            "an attribute of the parsed arguments, or a field of the configs",
        ) from error


def _any(namespace: argparse.Namespace, *names: str) -> bool:
    """Whether one of the attributes is set; all of them must exist."""
    values = [_get(namespace, name) for name in names]
    return any(values)


def _graph_settings(namespace: argparse.Namespace) -> dict[str, Any]:
    """Implementation and scopes, from the current and the deprecated flags."""
    implementation = _get(namespace, "cuda_graph_impl")
    if getattr(namespace, "external_cuda_graph", None):
        implementation = "transformer_engine"
    elif getattr(namespace, "enable_cuda_graph", None):
        implementation = "local"
    given = getattr(namespace, "cuda_graph_scope_deprecated", None)
    modules = scope_names(_get(namespace, "cuda_graph_modules") if given is None else given)
    if "full_iteration" in modules and implementation in ("none", "local"):
        implementation = "full_iteration"
    return {
        "cuda_graph_impl": implementation,
        "cuda_graph_modules": tuple(name for name in modules if name in schema.SCOPES),
    }


def scope_names(modules: Any) -> list[str]:
    """Scope names from both the input and the output of ``normalize_cuda_graph_modules``."""
    if modules is None:
        return []
    if isinstance(modules, str):
        return re.findall(r"\w+", modules)
    entries: Iterable[Any] = modules if isinstance(modules, Iterable) else [modules]
    return [getattr(entry, "name", entry) for entry in entries]


def _layer_settings(namespace: argparse.Namespace) -> dict[str, Any]:
    pattern = _get(namespace, "hybrid_layer_pattern") or _get(namespace, "hybrid_override_pattern")
    num_layers = _get(namespace, "num_layers") or _get(namespace, "encoder_num_layers")
    frequency = _get(namespace, "moe_layer_freq")
    return {
        "hybrid_layer_pattern": pattern,
        "num_layers": num_layers if pattern is None else len(decoder_symbols(pattern)),
        "custom_layers": _any(
            namespace,
            "spec",
            "heterogeneous_layers_config_path",
            "heterogeneous_layers_config_encoded_json",
        ),
        "moe_layer_freq": frequency if isinstance(frequency, int) else tuple(frequency),
    }


def _recompute_settings(namespace: argparse.Namespace) -> dict[str, Any]:
    """Megatron's config sets the default modules and converts deprecated flags to modules."""
    granularity = _get(namespace, "recompute_granularity")
    modules = _get(namespace, "recompute_modules")
    modules = ["core_attn"] if modules is None else list(modules)
    if getattr(namespace, "recompute_activations", None):
        granularity = "selective"
    if _get(namespace, "moe_layer_recompute") and granularity != "full":
        granularity = "selective"
        modules.append("moe")
    return {"recompute_granularity": granularity, "recompute_modules": tuple(modules)}


def run_of(
    model: Any, config: Any, ddp_config: Any, optimizer_config: Any = None
) -> schema.RunArguments:
    """The settings of a model under Megatron-FSDP that was built in Python.

    ``model`` is megatron-core's, without its wrappers; it has ``decoder``. Raises
    UpstreamChangedError when a field of the configs is missing.
    """
    run = run_of_configs(optimizer_config, ddp_config, config)
    return dataclasses.replace(run, **_layers(model), use_megatron_fsdp=True)


def run_of_configs(*configs: Any, **others: Any) -> schema.RunArguments:
    """The same of configs that Megatron may not have completed yet (``__post_init__``).

    Where two have a field, the last counts. ``others`` are flags that none of them has.
    """
    flags = argparse.Namespace(**dict.fromkeys(_NOT_IN_CONFIGS))
    for fields in filter(None, configs):
        vars(flags).update(vars(fields))
    flags.num_experts = _get(flags, "num_moe_experts")
    flags.cuda_graph_scope_deprecated = _get(flags, "cuda_graph_scope")
    # Both configs have a switch for it.
    flags.fp8_param_gather = _any(flags, "fp8_param", "fp8_param_gather")
    vars(flags).update(others)
    return read_run(flags)


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
