"""The rules for Megatron's flags, applied to a model that was built in Python."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from megatron_cg.arguments.megatron import run_of
from megatron_cg.arguments.schema import Environment, GraphArguments
from megatron_cg.arguments.validation import violations
from megatron_cg.errors import ConfigurationError, HookError
from megatron_cg.fsdp.fsdp_model import find_megatron_fsdp
from megatron_cg.moe.install import bound_of, counts_on_device, peer_memory_of


def check_model(model: Any, optimizer: Any, given: GraphArguments, backend: str) -> None:
    """Raise for a model that cannot be graphed, with every reason.

    Args:
        model: megatron-core's ``FullyShardedDataParallel`` around one model.
        optimizer: its ``config`` is read, if it has one.
        given: this package's own settings.
        backend: the name of the capture backend.

    Raises:
        ConfigurationError: a rule is broken.
        HookError: there is no ``MegatronFSDP``, or the model's config does not ask for graphs.
    """
    fsdp: Any = find_megatron_fsdp(model)
    if fsdp is None:
        raise HookError(
            f"{type(model).__name__} holds no MegatronFSDP: wrap the model in "
            "megatron.core.distributed.fsdp.mcore_fsdp_adapter.FullyShardedDataParallel first."
        )
    optimizer_config = getattr(optimizer, "config", None)
    run = run_of(with_decoder(model), model.config, fsdp.ddp_config, optimizer_config)
    if run.cuda_graph_impl == "none":
        raise HookError(
            "cuda_graph_impl of the model's config is none: build it with "
            'TransformerConfig(cuda_graph_impl="transformer_engine", cuda_graph_modules=["attn"]).'
        )
    if counts_on_device(fsdp):
        bound = bound_of(fsdp)
        rows = bound.factor if bound is not None else None
        exchange: Any = "nccl" if peer_memory_of(fsdp) is None else "peer"
        given = replace(given, cg_grouped_gemm="torch", cg_moe_rows=rows, cg_moe_exchange=exchange)
    broken = violations(run, given, Environment.read(backend))
    if broken:
        raise ConfigurationError(broken)


def with_decoder(model: Any) -> Any:
    """The module inside all wrappers that has the decoder, or None."""
    from megatron.core.utils import get_attr_wrapped_model

    try:
        return get_attr_wrapped_model(model, "decoder", allow_none=False, return_model_obj=True)
    except RuntimeError:
        return None
