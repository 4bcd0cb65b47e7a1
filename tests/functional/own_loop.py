"""Trains the runs of one group of ``loops.py``, one after the other, in processes that stay.

On GPUs ``torchrun --nproc-per-node 2 -m tests.functional.own_loop GROUP DIRECTORY``; on the CPU the
unit tests call :func:`train_all` in gloo's processes, with tapes as graphs. Each process writes
``rank<N>.json``: of each run the losses and gradient norms to the last bit, the counts of graphs,
and the error if there was one.
"""

import gc
import json
import os
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import num_microbatches_calculator as microbatches
from megatron.core import parallel_state, tensor_parallel
from megatron.core.distributed import DistributedDataParallelConfig, finalize_model_grads
from megatron.core.distributed.fsdp.mcore_fsdp_adapter import FullyShardedDataParallel
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_decoder_block_spec,
    get_gpt_mtp_block_spec,
)
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer import MLATransformerConfig, TransformerConfig
from megatron.core.transformer.cuda_graphs import TECudaGraphHelper
from megatron.core.transformer.moe.moe_logging import destroy_moe_metrics_tracker
from megatron.core.transformer.multi_token_prediction import MTPLossLoggingHelper

import megatron_cg
from megatron_cg.experts import row_bound
from megatron_cg.experts.install import experts_of
from megatron_cg.tape.fakes import replaced
from megatron_cg.tape.tape_backend import TapeBackend
from tests.functional import loops
from tests.functional.loops import GROUPS, Group, Run
from tests.unit.grouped_linear import in_place_of_te

GPU = torch.cuda.is_available()
VOCABULARY, SEED = 256, 1234
SEQUENCE = 128 if GPU else 16
MOE: dict[str, Any] = {
    "num_layers": 4 if GPU else 2,
    "hidden_size": 256 if GPU else 32,
    "num_attention_heads": 4,
    "ffn_hidden_size": 512 if GPU else 32,
    "num_moe_experts": 8 if GPU else 4,
    "moe_ffn_hidden_size": 256 if GPU else 32,
    "moe_router_topk": 2,
    "moe_router_load_balancing_type": "aux_loss",
    "moe_aux_loss_coeff": 1e-2,
    "normalization": "RMSNorm",
    "gated_linear_unit": True,
    "activation_func": torch.nn.functional.silu,
}


def make_config(group: Group, run: Run) -> TransformerConfig:
    shape = dict(MOE)
    latent = group.config.get("multi_latent_attention")
    kind = MLATransformerConfig if latent else TransformerConfig
    dtype = torch.bfloat16 if run.dtype == "bf16" else torch.float32
    graphs = run.driver != loops.EAGER
    shape |= {
        **dict.fromkeys(("attention_dropout", "hidden_dropout"), 0.0),
        **dict.fromkeys(("add_bias_linear", "gradient_accumulation_fusion"), False),
        **dict.fromkeys(("persist_layer_norm", "masked_softmax_fusion"), False),
        **dict.fromkeys(("params_dtype", "pipeline_dtype"), dtype),
        **dict.fromkeys(("use_te_rng_tracker", "moe_grouped_gemm"), GPU),
        "bf16": dtype is torch.bfloat16,
        "calculate_per_token_loss": group.fsdp_version == 1,
        "deterministic_mode": True,
        "cuda_graph_impl": "transformer_engine" if graphs else "none",
        "cuda_graph_modules": list(run.scopes),
        "cuda_graph_warmup_steps": loops.WARMUP,
        "moe_token_dispatcher_type": "alltoall",
        **group.config,
    }
    config = kind(**shape)
    config.finalize_model_grads_func = finalize_model_grads
    return config


def make_model(group: Group, config: TransformerConfig) -> torch.nn.Module:
    by_te = GPU and not group.local
    spec = get_gpt_decoder_block_spec(config, use_transformer_engine=by_te)
    if config.moe_grouped_gemm and not GPU:
        from tests.unit.grouped_linear import grouped_experts

        for layer in {id(layer.submodules): layer for layer in spec.layer_specs}.values():
            layer.submodules.mlp = grouped_experts(layer.submodules.mlp)
    mtp = None
    if config.mtp_num_layers:
        mtp = get_gpt_mtp_block_spec(config, spec, use_transformer_engine=by_te)
    model: torch.nn.Module = GPTModel(
        config,
        spec,
        vocab_size=VOCABULARY,
        max_sequence_length=SEQUENCE,
        position_embedding_type="rope",
        mtp_block_spec=mtp,
    )
    return model


def build(group: Group, run: Run) -> tuple[Any, Any]:
    config = make_config(group, run)
    model = make_model(group, config).to(config.params_dtype).cuda()
    is_v1 = group.fsdp_version == 1
    of_version: dict[str, Any] = {
        "fsdp_double_buffer": True,
        "fsdp_db_use_persist_buf_on_alloc_fail": True,
    }
    ddp = DistributedDataParallelConfig(
        use_megatron_fsdp=True,
        use_distributed_optimizer=is_v1,
        overlap_grad_reduce=True,
        overlap_param_gather=True,
        data_parallel_sharding_strategy="optim_grads_params",
        **(of_version if is_v1 else {"megatron_fsdp_version": 2}),
    )
    groups = {} if is_v1 else {"pg_collection": ProcessGroupCollection.use_mpu_process_groups()}
    wrapped = FullyShardedDataParallel(config, ddp, model, **groups)
    adam = OptimizerConfig(
        lr=1e-3,
        bf16=config.bf16,
        params_dtype=config.params_dtype,
        use_distributed_optimizer=is_v1,
        clip_grad=float(can_clip(group)),
    )
    return wrapped, get_megatron_optimizer(adam, [wrapped])


def can_clip(group: Group) -> bool:
    """Whether Megatron can: CUDA tensors only, and under v2 all of them on the same ranks."""
    return GPU and (group.fsdp_version == 1 or "expert_model_parallel_size" not in group.config)


def forward_step(data: Any, model: Any) -> tuple[torch.Tensor, Any]:
    """Losses of the tokens of the next microbatch, and how Megatron's schedule sums them."""
    block = next(data)
    places = torch.arange(SEQUENCE, device="cuda").expand(loops.BATCH, -1)
    # TE's attention is causal without a mask; megatron-core's own, on the CPU, is given one.
    mask = None if GPU else torch.ones(loops.BATCH, 1, SEQUENCE, SEQUENCE).tril() < 0.5
    losses = model(block[:, :-1], places, mask, labels=block[:, 1:].contiguous()).float()
    count = torch.tensor(losses.numel(), dtype=torch.int, device="cuda")
    return losses, lambda out: (out.sum(), count, {"loss": out.detach().double().sum()})


def train_step(model: Any, optimizer: Any, data: Iterator[torch.Tensor]) -> tuple[float, float]:
    """One step; the sum of this rank's losses, and the norm of the gradient or of its shard."""
    model.zero_grad_buffer()
    optimizer.zero_grad()
    losses = get_forward_backward_func()(
        forward_step_func=forward_step,
        data_iterator=data,
        model=[model],
        num_microbatches=loops.MICROBATCHES,
        seq_length=SEQUENCE,
        micro_batch_size=loops.BATCH,
    )
    _, norm, _ = optimizer.step()
    return sum(float(item["loss"]) for item in losses), float(norm or local_norm(optimizer))


def local_norm(optimizer: Any) -> float:
    """The norm of this rank's shards of the gradient, where Megatron cannot compute the whole."""
    total = torch.zeros((), dtype=torch.float64, device="cuda" if GPU else "cpu")
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter.grad is not None:
                grad = parameter.grad
                shard = grad.to_local() if hasattr(grad, "to_local") else grad
                total += shard.double().square().sum()
    return float(total.sqrt())


def tokens() -> Iterator[torch.Tensor]:
    generator = torch.Generator().manual_seed(SEED + parallel_state.get_data_parallel_rank())
    while True:
        yield torch.randint(VOCABULARY, (loops.BATCH, SEQUENCE + 1), generator=generator).cuda()


Step = Callable[[], tuple[float, float]]


def with_helper(model: Any, optimizer: Any, step: Step, steps: int) -> tuple[list[Any], Any]:
    """Megatron's capture helper as a loop of one's own uses it, after ``enable()``."""
    helper = TECudaGraphHelper(
        model=[model],
        config=model.config,
        seq_length=SEQUENCE,
        micro_batch_size=loops.BATCH,
        optimizers=[optimizer],
    )
    done = []
    for number in range(steps):
        if number == loops.WARMUP:
            helper.create_cudagraphs()
            helper.cuda_graph_set_manual_hooks()
        done.append(step())
    counters = megatron_cg.counters()[-1]
    helper.delete_cuda_graphs()
    return done, counters


def train(group: Group, run: Run, steps: int) -> dict[str, Any]:
    with ExitStack() as undo:
        if group.fsdp_version == 2:  # before the model is built
            megatron_cg.enable()
            undo.callback(megatron_cg.disable)
        if run.scopes == loops.EXPERTS:
            undo.enter_context(dropless(group))
        return train_model(group, run, steps)


@contextmanager
def dropless(group: Group) -> Iterator[None]:
    """Models that are built in the block may have dropless experts, and recompute, in graphs."""
    with ExitStack() as undo:
        if not GPU:
            undo.enter_context(in_place_of_te())
            # A small model has fewer rows than a grouped GEMM computes at a time.
            undo.enter_context(replaced(row_bound, "MULTIPLE", 1))
        rows, stash = group.moe_rows, group.moe_stash
        megatron_cg.enable(
            grouped_gemm="torch", moe_rows=rows, moe_stash=stash, full_recompute=True
        )
        undo.callback(megatron_cg.disable)
        yield


def train_model(group: Group, run: Run, steps: int) -> dict[str, Any]:
    torch.manual_seed(SEED)
    tensor_parallel.model_parallel_cuda_manual_seed(SEED, te_rng_tracker=GPU, force_reset_rng=True)
    world = parallel_state.get_data_parallel_world_size()
    size = loops.BATCH * loops.MICROBATCHES * world
    microbatches.init_num_microbatches_calculator(dist.get_rank(), None, size, loops.BATCH, world)
    model, optimizer = build(group, run)
    data = tokens()

    def step() -> tuple[float, float]:
        return train_step(model, optimizer, data)

    counts: dict[str, Any] = {}
    experts = experts_of(model)
    bound = None if experts is None else experts.bound
    if run.driver == loops.EAGER:
        done = [step() for _ in range(steps)]
    else:
        with enabled("native" if run.driver == loops.NATIVE else "te"):
            done, counters = with_helper(model, optimizer, step, steps)
        counts = counters.as_dict()
    return {
        "losses": [loss.hex() for loss, _ in done],
        "norms": [norm.hex() for _, norm in done],
        "graphs": counts,
        "kept": 0 if bound is None or bound.stash is None else bound.stash.rows,
    }


@contextmanager
def enabled(backend: Any) -> Iterator[None]:
    """``megatron_cg.enable()``, and tapes instead of CUDA graphs where there is no GPU."""
    with nullcontext() if GPU else tapes():
        megatron_cg.enable(backend=backend, verify_steps=loops.VERIFY_STEPS)
        try:
            yield
        finally:
            megatron_cg.disable()


@contextmanager
def tapes() -> Iterator[None]:
    """Megatron's helper of a loop of one's own captures on tapes."""
    from megatron_cg.integrations import call_arguments

    with replaced(call_arguments, "backend_of", lambda _name: TapeBackend()):
        yield


def clean_up() -> None:
    microbatches.unset_num_microbatches_calculator()
    destroy_moe_metrics_tracker()
    MTPLossLoggingHelper.tracker.clear()  # has a place for each depth of this run's model
    gc.collect()
    torch.cuda.empty_cache()


def train_all(group: Group, runs: Sequence[Run], steps: int, directory: Path) -> None:
    """Train each of ``runs`` in turn; finished results are always on disk."""
    results: dict[str, Any] = {}
    sizes = ("tensor_model_parallel_size", "expert_model_parallel_size")
    # Once for all runs: NCCL would keep the first communicators beside a second set.
    parallel_state.initialize_model_parallel(
        **{name: group.config[name] for name in sizes if name in group.config}
    )
    for run in runs:
        start = time.perf_counter()
        try:
            results[run.name] = train(group, run, steps)
        except Exception as error:
            results[run.name] = {"error": "".join(traceback.format_exception(error))}
        clean_up()
        results[run.name]["seconds"] = round(time.perf_counter() - start, 2)
        text = json.dumps(results, indent=1)
        (directory / f"rank{dist.get_rank()}.json").write_text(text, encoding="utf-8")
    parallel_state.destroy_model_parallel()


def main(name: str, directory: str) -> None:
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    torch.use_deterministic_algorithms(True)
    dist.init_process_group("nccl")
    train_all(GROUPS[name], GROUPS[name].runs(), loops.STEPS, Path(directory))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
