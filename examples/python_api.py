"""A training loop on megatron-core's Python API alone, with layerwise graphs under Megatron-FSDP.

Under torchrun on GPUs; by itself (two processes, tapes) without GPU and TE. --eager: no graphs.
"""

import sys
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel
from megatron.core.distributed import DistributedDataParallelConfig, finalize_model_grads
from megatron.core.distributed.fsdp.mcore_fsdp_adapter import FullyShardedDataParallel
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.num_microbatches_calculator import init_num_microbatches_calculator
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.cuda_graphs import TECudaGraphHelper

import megatron_cg
from megatron_cg.tape.launch import run_processes

GPU = torch.cuda.is_available()
SEQUENCE, BATCH, MICROBATCHES, STEPS, WARMUP = 64, 2, 2, 8, 3


def build() -> tuple[Any, Any]:
    """The model under Megatron-FSDP, and its optimizer."""
    config = TransformerConfig(
        num_layers=4, hidden_size=128, num_attention_heads=4, add_bias_linear=False, bf16=True,
        params_dtype=torch.bfloat16, calculate_per_token_loss=True, use_te_rng_tracker=GPU,
        gradient_accumulation_fusion=False, persist_layer_norm=False,
        cuda_graph_impl="transformer_engine", cuda_graph_modules=["attn", "mlp"],
    )  # fmt: skip
    config.finalize_model_grads_func = finalize_model_grads
    spec = get_gpt_decoder_block_spec(config, use_transformer_engine=GPU)
    gpt = GPTModel(config, spec, vocab_size=256, max_sequence_length=SEQUENCE)
    ddp = DistributedDataParallelConfig(
        use_megatron_fsdp=True, use_distributed_optimizer=True, overlap_grad_reduce=True,
        overlap_param_gather=True, data_parallel_sharding_strategy="optim_grads_params",
        # Graphs read unsharded parameters where they lay at capture: both keep them there.
        fsdp_double_buffer=True, fsdp_db_use_persist_buf_on_alloc_fail=True,
    )  # fmt: skip
    model = FullyShardedDataParallel(config, ddp, gpt.bfloat16().cuda())
    # Megatron's clipping knows CUDA tensors only.
    adam = OptimizerConfig(lr=1e-3, bf16=True, use_distributed_optimizer=True, clip_grad=float(GPU))
    return model, get_megatron_optimizer(adam, [model])


def forward_step(data: Any, model: Any) -> tuple[torch.Tensor, Any]:
    """Losses of the tokens of the next microbatch, and how Megatron's schedule sums them."""
    block, places = next(data), torch.arange(SEQUENCE, device="cuda").expand(BATCH, -1)
    # TE's attention is causal without a mask; megatron-core's own, on the CPU, is given one.
    mask = None if GPU else torch.ones(BATCH, 1, SEQUENCE, SEQUENCE).tril() < 0.5
    losses = model(block[:, :-1], places, mask, labels=block[:, 1:].contiguous()).float()
    count = torch.tensor(losses.numel(), dtype=torch.int, device="cuda")
    return losses, lambda out: (out.sum(), count, {"loss": out.detach().mean()})


def train() -> None:
    """Train some steps in an initialised process group, and print rank 0's losses."""
    torch.manual_seed(1)
    parallel_state.initialize_model_parallel()
    tensor_parallel.model_parallel_cuda_manual_seed(1, te_rng_tracker=GPU)
    rank, world, size = dist.get_rank(), dist.get_world_size(), BATCH * MICROBATCHES
    init_num_microbatches_calculator(rank, None, size * world, BATCH, world)
    model, optimizer = build()
    shape: Any = {"seq_length": SEQUENCE, "micro_batch_size": BATCH}
    text = torch.randint(256, (world, STEPS * MICROBATCHES, BATCH, SEQUENCE + 1))
    data, helper = iter(text[rank].cuda()), None
    if "--eager" not in sys.argv:
        megatron_cg.enable(backend="te" if GPU else "tape")
        helper = TECudaGraphHelper([model], model.config, **shape, optimizers=[optimizer])
    for step in range(STEPS):
        if helper and step == WARMUP:
            helper.create_cudagraphs()
        model.zero_grad_buffer()
        optimizer.zero_grad()
        losses = get_forward_backward_func()(
            forward_step_func=forward_step, data_iterator=data, model=[model],
            num_microbatches=MICROBATCHES, **shape,
        )  # fmt: skip
        optimizer.step()  # A step ends here.
        if rank == 0:
            print(f"step {step} losses {[float(item['loss']) for item in losses]}", flush=True)
    if helper:
        helper.delete_cuda_graphs()


if __name__ == "__main__":
    if GPU:
        dist.init_process_group("nccl")
        torch.cuda.set_device(dist.get_node_local_rank())
        train()
        dist.destroy_process_group()
    else:
        run_processes(train)
