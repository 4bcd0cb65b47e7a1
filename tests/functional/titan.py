"""The standalone example with debug models of torchtitan 0.3.0, sharded by its own functions.

    python -m torch.distributed.run --nproc-per-node 2 -m tests.functional.titan llama3 \
        --compare --sequence 512

``llama3:tp2`` has tensor and sequence parallel of 2 besides, and FSDP2 over the other ranks;
``llama3:simple_fsdp`` and ``llama3:simple_fsdp:tp2`` have SimpleFSDP instead, which torchtitan's
package leaves out: its repository has ``torchtitan/experiments/graph_trainer/simple_fsdp.py``.

Without a GPU, ``--processes`` (2) train over gloo, with SDPA. torchtitan 0.3.0 was written for a
newer torch than 2.11: what these models need of it is in :func:`with_names_of_newer_torch`.
"""

import argparse
import sys
from contextlib import nullcontext
from functools import cache, partial
from importlib import import_module
from typing import Any

import torch
from torch.distributed import fsdp
from torch.distributed.tensor import DTensor

from megatron_cg.examples import standalone_transformer as example
from megatron_cg.examples.standalone_transformer import batch_of

MODELS = (
    *("llama3", "llama3:tp2", "llama3:simple_fsdp", "llama3:simple_fsdp:tp2"),
    *("deepseek_v3", "deepseek_v3:tp2"),
)
"""Packages below ``torchtitan.models``, and how they are laid out."""


def with_names_of_newer_torch() -> None:
    """A class that other backends of torchtitan use, and an argument's default as a keyword."""
    if not hasattr(fsdp, "DataParallelMeshDims"):
        fsdp.DataParallelMeshDims = type("DataParallelMeshDims", (), {})  # type: ignore[attr-defined]
        from torchtitan.models.common import attention

        make = attention._compiled_create_block_mask

        def create(*args: Any, separate_full_blocks: bool, **options: Any) -> Any:
            assert separate_full_blocks
            return make(*args, **options)

        attention._compiled_create_block_mask = create


@cache
def prepare(device: str) -> None:
    import torchtitan.tools.utils

    torchtitan.tools.utils.device_type = device
    with_names_of_newer_torch()


def with_documents(model: Any, args: tuple[torch.Tensor]) -> tuple[Any, ...]:
    """Tokens, positions and a mask for documents that begin at each space.

    torchtitan's ``Trainer.post_dataloading_process`` makes such a mask, of the positions of its
    data loader.
    """
    (tokens,) = args
    numbers = torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens)
    begins = (tokens == ord(" ")) | (numbers == 0)
    positions = numbers - torch.where(begins, numbers, 0).cummax(1).values
    return tokens, positions, model.get_attention_masks(positions) if tokens.is_cuda else None


def whole(_model: Any, _args: Any, logits: Any) -> torch.Tensor:
    """The logits of all words, which tensor-parallel ranks have a part of each."""
    result: torch.Tensor = logits.full_tensor() if isinstance(logits, DTensor) else logits
    return result


def batch_of_group(
    make: Any, group: Any, args: argparse.Namespace, number: int, device: str
) -> torch.Tensor:
    """Tensor-parallel ranks train on one batch."""
    tokens: torch.Tensor = make(args, number, device)
    torch.distributed.broadcast(tokens, group=group, group_src=0)
    return tokens


def under_simple_fsdp(model: Any, dims: Any) -> tuple[Any, Any]:
    """As ``torchtitan.experiments.graph_trainer`` does; and what keeps weights as they are."""
    from torchtitan.experiments.graph_trainer import simple_fsdp

    if dims.tp_enabled:
        model.parallelize(dims)
    policy = simple_fsdp.MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    model = simple_fsdp.data_parallel(model, dims.get_mesh("fsdp"), "fully_shard", policy)
    return model, simple_fsdp.disable_active_parametrization


def build(kind: str, args: argparse.Namespace, device: str) -> tuple[Any, Any]:
    """Three layers of a debug model in BF16, and its optimizer."""
    prepare(device)
    name, *options = kind.split(":")
    from torchtitan.config import CompileConfig, ParallelismConfig, TrainingConfig
    from torchtitan.distributed import ParallelDims, utils
    from torchtitan.models.common import attention

    parallelism = ParallelismConfig(
        spmd_backend="partial_dtensor", tensor_parallel_degree=2 if "tp2" in options else 1
    )
    utils.set_spmd_backend(parallelism.spmd_backend)
    dims = ParallelDims.from_config(parallelism, torch.distributed.get_world_size())
    dims.build_mesh()
    spec = import_module(f"torchtitan.models.{name}").model_registry("debugmodel")
    spec.model.layers = spec.model.layers[:3]
    for layer in spec.model.layers if device == "cpu" else ():
        # torch has no backward pass of flex_attention there.
        layer.attention.inner_attention = attention.ScaledDotProductAttention.Config()
    if dims.tp_enabled:
        sharding = import_module(f"torchtitan.models.{name}.sharding")
        experts = {} if name == "llama3" else {"enable_ep": False}
        getattr(sharding, f"set_{name}_sharding_config")(spec.model, enable_sp=True, **experts)
        make = partial(batch_of_group, batch_of, dims.get_mesh("tp").get_group())
        example.batch_of = make
    with torch.device("meta"):
        model = spec.model.build()
    training = TrainingConfig(seq_len=args.sequence, local_batch_size=args.batch)
    gathers: Any = nullcontext
    if "simple_fsdp" in options:
        model, gathers = under_simple_fsdp(model, dims)
    else:
        model = spec.parallelize_fn(
            model,
            parallel_dims=dims,
            training=training,
            parallelism=parallelism,
            compile_config=CompileConfig(),
            ac_config=None,
            dump_folder="",
        )
    torch.manual_seed(args.seed)
    model.to_empty(device=device)
    with torch.no_grad(), gathers():
        model.init_weights(buffer_device=None)
    model.train()
    for module in model.modules() if device == "cpu" else ():
        if isinstance(module, fsdp.FSDPModule):
            module.set_force_sum_reduction_for_comms(True)  # Gloo cannot scale as it reduces.
    model.register_forward_pre_hook(with_documents)
    model.register_forward_hook(whole)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-3)


if __name__ in {"__main__", "__mp_main__"}:  # The second one in processes of its own.
    example.build = partial(build, sys.argv[1])
if __name__ == "__main__":
    example.main(["--sharding", "fsdp2", *sys.argv[2:]])
