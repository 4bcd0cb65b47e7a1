"""Simulates the GPUs of a plan on a machine that has none.

Inside :func:`simulated_gpus` every request for a CUDA device gets the meta device. Its tensors have
no memory. Streams and events complete at once. Process groups have their real sizes, and their
collectives do nothing. Megatron (0.19.2) builds its model there and wraps it with Megatron-FSDP as
on GPUs. Leaving the block undoes everything.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace
from typing import Any

import torch

from megatron_cg.errors import MegatronCGError
from megatron_cg.tools.cpu.fakes import cuda_leads_to, cuda_names, no_context, replaced

HOPPER = (9, 0)
"""The compute capability that Megatron's rules see: that of an H100 or H200."""


class SizesError(MegatronCGError):
    """Megatron cannot make process groups of these sizes; the text is Megatron's own."""


@contextmanager
def simulated_gpus(environment: Mapping[str, str] | None = None) -> Iterator[None]:
    """Redirect CUDA's names to the meta device, and answer queries about the GPU.

    Args:
        environment: variables of the run, to set in the block. On exit all others are restored
            too, including those that Megatron sets itself.
    """
    saved = dict(os.environ)
    properties = SimpleNamespace(
        major=HOPPER[0], minor=HOPPER[1], multi_processor_count=132, name="NVIDIA H200"
    )
    names = cuda_names() | {
        "get_device_properties": lambda *_a: properties,
        "get_device_capability": lambda *_a: HOPPER,
    }
    os.environ.pop("CUDA_DEVICE_MAX_CONNECTIONS", None)
    os.environ.update({**(environment or {}), "RANK": "0", "WORLD_SIZE": "1"})
    try:
        with cuda_leads_to(torch.device("meta"), names):
            yield
    finally:
        for name in set(os.environ) - set(saved):
            del os.environ[name]
        os.environ.update(saved)


@contextmanager
def process_groups(args: Any) -> Iterator[Any]:
    """Rank 0's process groups of a run with these Megatron arguments; yields the collection.

    Makes the calls of ``megatron.training.initialize._initialize_distributed`` (0.19.2), on torch's
    ``fake`` backend. Raises SizesError for errors that Megatron finds only there.
    """
    from megatron.core import parallel_state
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.tensor_parallel import random
    from torch.testing._internal.distributed.fake_pg import FakeStore

    # Gives collectives kernels for meta tensors; a fake group has none (torch 2.11).
    importlib.import_module("torch.distributed._tools.fake_collectives")
    with ExitStack() as stack:
        torch.distributed.init_process_group(
            "fake", store=FakeStore(), rank=0, world_size=args.world_size
        )
        stack.callback(torch.distributed.destroy_process_group)
        stack.enter_context(_of_rank_0(parallel_state))
        stack.callback(parallel_state.destroy_model_parallel)
        try:
            parallel_state.initialize_model_parallel(
                args.tensor_model_parallel_size,
                args.pipeline_model_parallel_size,
                args.virtual_pipeline_model_parallel_size,
                context_parallel_size=args.context_parallel_size,
                hierarchical_context_parallel_sizes=args.hierarchical_context_parallel_sizes,
                expert_model_parallel_size=args.expert_model_parallel_size,
                num_distributed_optimizer_instances=args.num_distributed_optimizer_instances,
                expert_tensor_parallel_size=args.expert_tensor_parallel_size,
                order="tp-cp-ep-pp-dp" if args.use_tp_pp_dp_mapping else "tp-cp-ep-dp-pp",
                create_gloo_process_groups=False,
            )
        except (AssertionError, RuntimeError) as error:
            raise SizesError(" ".join(str(error).split())) from error
        if parallel_state._INTRA_DISTRIBUTED_OPTIMIZER_INSTANCE_GROUP is None:
            # Megatron builds it from the other groups; only one of those exists here.
            size = args.world_size // args.num_distributed_optimizer_instances
            group = torch.distributed.new_group(range(size))
            parallel_state._INTRA_DISTRIBUTED_OPTIMIZER_INSTANCE_GROUP = group
        for name in ("_CUDA_RNG_STATE_TRACKER", "_CUDA_RNG_STATE_TRACKER_INITIALIZED"):
            stack.callback(setattr, random, name, getattr(random, name))
        random.initialize_rng_tracker(force_reset=True)
        # Nothing is drawn, so there are no states to draw from.
        stack.enter_context(replaced(random.CudaRNGStatesTracker, "fork", no_context))
        yield ProcessGroupCollection.use_mpu_process_groups()


def group_of_rank_0(sizes: Sequence[int], mask: Sequence[bool]) -> list[int]:
    """The ranks that differ from rank 0 only in the dimensions of ``mask``, in order.

    ``sizes`` are the sizes of all dimensions; the first varies fastest with the rank.
    """
    ranks, stride = [0], 1
    for size, inside in zip(sizes, mask, strict=True):
        if inside:
            ranks = [rank + stride * index for index in range(size) for rank in ranks]
        stride *= size
    return ranks


@contextmanager
def _of_rank_0(parallel_state: Any) -> Iterator[None]:
    """Make only the groups of rank 0, and gather objects from one rank.

    All ranks are alike, so a plan takes as long for tens of thousands of ranks as for two. Relied
    on: megatron-core 0.19.2, ``parallel_state.generate_masked_orthogonal_rank_groups``: it lists
    every group of a kind and also creates those that do not contain its caller.
    """

    def groups(_world_size: int, sizes: Sequence[int], mask: Sequence[bool]) -> list[list[int]]:
        return [group_of_rank_0(sizes, mask)]

    def all_gather_object(found: list[Any], value: Any, group: Any = None) -> None:
        found[:] = [value] * len(found)

    with (
        replaced(parallel_state, "generate_masked_orthogonal_rank_groups", groups),
        replaced(torch.distributed, "all_gather_object", all_gather_object),
    ):
        yield
