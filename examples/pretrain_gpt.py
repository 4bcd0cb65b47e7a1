"""Pretrain a GPT model, or a hybrid (Mamba) model with --hybrid-layer-pattern, with Megatron.

A plain script on ``megatron.training.pretrain`` (megatron-core 0.19): it knows nothing of CUDA
graphs or of megatron_cg, and takes Megatron's own arguments and no others. Data, tensor, expert
and context parallel; no pipeline. With --sft or --dataloader-inter-document-masking each sample or
document of a sequence attends to itself alone; without context parallelism.

    torchrun --nproc-per-node 2 -m megatron_cg examples/pretrain_gpt.py --mock-data ...
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import torch
from megatron.core import mpu
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig, MockGPTDataset
from megatron.core.enums import ModelType
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.utils import (
    flatten_batch_for_packed_sequences,
    get_batch_on_this_cp_rank,
    get_batch_on_this_tp_rank,
)
from megatron.training import get_args, get_timers, get_tokenizer, pretrain
from megatron.training.argument_utils import (
    gpt_config_from_args,
    hybrid_config_from_args,
    pretrain_cfg_container_from_args,
)
from megatron.training.arguments import parse_and_validate_args
from megatron.training.datasets.sft_dataset import SFTDataset
from megatron.training.training import update_seqlen_stats_from_cu_seqlens
from megatron.training.utils import get_blend_and_blend_per_split, is_hybrid_model

Batch = dict[str, Any]


def read_batch(data_iterator: Iterator[Batch]) -> Batch:
    """One microbatch on the GPU: tensor rank 0 reads and sends it, context ranks take a part."""
    args = get_args()
    batch: Batch = {}
    tensor_rank = mpu.get_tensor_model_parallel_rank()
    if tensor_rank == 0:
        batch = {
            name: value.cuda(non_blocking=True) if isinstance(value, torch.Tensor) else value
            for name, value in next(data_iterator).items()
        }
    whole = get_batch_on_this_tp_rank(
        batch,
        has_cu_seqlens=args.sft or args.dataloader_inter_document_masking,
        is_hybrid_cp=False,
        create_attention_mask_in_dataloader=args.create_attention_mask_in_dataloader,
        broadcast_src_rank=mpu.get_tensor_model_parallel_src_rank(),
        broadcast_group=mpu.get_tensor_model_parallel_group(),
        cp_size=args.context_parallel_size,
        tp_rank=tensor_rank,
        micro_batch_size=args.micro_batch_size,
        seq_length=args.seq_length,
        mtp_on_this_rank=False,
    )
    group = mpu.get_context_parallel_group()
    flat = flatten_batch_for_packed_sequences(whole)
    part: Batch = get_batch_on_this_cp_rank(flat, is_hybrid_cp=False, cp_group=group)
    return part


def pack_of(batch: Batch) -> PackedSeqParams | None:
    """Where the samples of a pack begin, and the length of the longest; None for no pack."""
    if batch.get("cu_seqlens") is None:
        return None
    starts, longest = batch["cu_seqlens"].squeeze(0), int(batch["max_seqlen"].item())
    update_seqlen_stats_from_cu_seqlens(starts)
    return PackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=starts,
        cu_seqlens_kv=starts,
        max_seqlen_q=longest,
        max_seqlen_kv=longest,
        tokens_per_sample=get_args().seq_length,
    )


def masked_loss(loss_mask: torch.Tensor, output: torch.Tensor) -> tuple[Any, ...]:
    """Summed token loss (float32), counted tokens (int32), and both of them for the log."""
    mask = loss_mask.reshape(-1).float()
    loss = torch.sum(output.reshape(-1).float() * mask)
    tokens = mask.sum().detach().to(torch.int)
    return loss, tokens, {"lm loss": torch.stack((loss.detach(), tokens.to(loss.dtype)))}


def forward_step(data_iterator: Iterator[Batch], model: torch.nn.Module) -> tuple[Any, Any]:
    """Run the model on one microbatch; gives the per-token losses and how to sum them."""
    timer = get_timers()("batch-generator", log_level=2)
    timer.start()
    batch = read_batch(data_iterator)
    timer.stop()
    inputs = (batch["tokens"], batch["position_ids"], batch.get("attention_mask"))
    named = {name: batch[name] for name in ("labels", "loss_mask")}
    output = model(*inputs, **named, packed_seq_params=pack_of(batch))
    return output, partial(masked_loss, batch["loss_mask"])


def build_datasets(samples: Sequence[int | None]) -> list[Any]:
    """Train, validation and test sets of at least ``samples`` samples each."""
    args = get_args()
    blend, blend_per_split = get_blend_and_blend_per_split(args)
    config = GPTDatasetConfig(
        random_seed=args.seed,
        sequence_length=args.seq_length,
        blend=blend,
        blend_per_split=blend_per_split,
        split=args.split,
        path_to_cache=args.data_cache_path,
        tokenizer=get_tokenizer(),
        reset_position_ids=args.reset_position_ids,
        reset_attention_mask=args.reset_attention_mask,
        eod_mask_loss=args.eod_mask_loss,
        create_attention_mask=args.create_attention_mask_in_dataloader,
        inter_document_masking=args.dataloader_inter_document_masking,
        context_parallel_size=args.context_parallel_size,
    )
    kind = SFTDataset if args.sft else MockGPTDataset if args.mock_data else GPTDataset
    reads = mpu.get_tensor_model_parallel_rank() == 0
    builder = BlendedMegatronDatasetBuilder(kind, samples, lambda: reads, config)
    datasets: list[Any] = builder.build()
    return datasets


# Megatron calls an unmarked provider on tensor rank 0 only, and then the builder's barriers wait
# for the other ranks for ever.
build_datasets.is_distributed = True  # type: ignore[attr-defined]


def main() -> None:
    """Parse Megatron's command line, build the model's configuration, train."""
    args = parse_and_validate_args()
    model = hybrid_config_from_args(args) if is_hybrid_model(args) else gpt_config_from_args(args)
    container = pretrain_cfg_container_from_args(args, model)
    pretrain(container, build_datasets, ModelType.encoder_or_decoder, forward_step)


if __name__ == "__main__":
    main()
