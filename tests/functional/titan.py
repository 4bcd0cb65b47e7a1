"""The standalone example with debug models of torchtitan 0.3.0, sharded by its own functions.

    python -m torch.distributed.run --nproc-per-node 2 -m tests.functional.titan llama3 \
        --compare --sequence 512

Without a GPU, two processes train over gloo, with SDPA. torchtitan 0.3.0 was written for a newer
torch than 2.11: what these models need of it is in :func:`with_names_of_newer_torch`.
"""

from __future__ import annotations

import argparse
import sys
from functools import cache, partial
from importlib import import_module
from typing import Any

import torch
from torch.distributed import fsdp

from megatron_cg.examples import standalone_transformer as example

MODELS = ("llama3", "deepseek_v3")
"""Packages below ``torchtitan.models``."""


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
    """Whatever torchtitan needs here."""
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


def build(name: str, args: argparse.Namespace, device: str) -> tuple[Any, Any]:
    """Three layers of a debug model in BF16, and its optimizer."""
    prepare(device)
    from torchtitan.config import CompileConfig, ParallelismConfig, TrainingConfig
    from torchtitan.distributed import ParallelDims, utils
    from torchtitan.models.common import attention

    parallelism = ParallelismConfig(spmd_backend="partial_dtensor")
    utils.set_spmd_backend(parallelism.spmd_backend)
    dims = ParallelDims.from_config(parallelism, torch.distributed.get_world_size())
    dims.build_mesh()
    spec = import_module(f"torchtitan.models.{name}").model_registry("debugmodel")
    spec.model.layers = spec.model.layers[:3]
    for layer in spec.model.layers if device == "cpu" else ():
        # torch has no backward pass of flex_attention there.
        layer.attention.inner_attention = attention.ScaledDotProductAttention.Config()
    with torch.device("meta"):
        model = spec.model.build()
    training = TrainingConfig(seq_len=args.sequence, local_batch_size=args.batch)
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
    with torch.no_grad():
        model.init_weights(buffer_device=None)
    model.train()
    for module in model.modules() if device == "cpu" else ():
        if isinstance(module, fsdp.FSDPModule):
            module.set_force_sum_reduction_for_comms(True)  # Gloo cannot scale as it reduces.
    model.register_forward_pre_hook(with_documents)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-3)


if __name__ in {"__main__", "__mp_main__"}:  # The second one in processes of its own.
    example.build = partial(build, sys.argv[1])
if __name__ == "__main__":
    example.main(["--sharding", "fsdp2", *sys.argv[2:]])
