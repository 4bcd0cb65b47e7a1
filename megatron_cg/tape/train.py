"""The real GPTModel of megatron-core under the real Megatron-FSDP, small enough for a CPU, trained.

Its loop trains eagerly or, after warmup, with tapes.
"""

import os
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, nullcontext
from itertools import count
from pathlib import Path
from typing import Any

import numpy
import torch
import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel
from megatron.core.distributed.distributed_data_parallel_config import DistributedDataParallelConfig
from megatron.core.distributed.fsdp.mcore_fsdp_adapter import FullyShardedDataParallel
from megatron.core.distributed.fsdp.src import megatron_fsdp
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_layer_local_spec,
    get_gpt_mtp_block_spec,
)
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.module import Float16Module
from megatron.core.transformer.torch_norm import WrappedTorchNorm
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayer

from megatron_cg.backends.base import Backend, CaptureRequest
from megatron_cg.capture.session import Session
from megatron_cg.consensus.exchange import Agreement
from megatron_cg.extensions import allow_graphs_under_v2, recompute_in_layers
from megatron_cg.fsdp.sharding import of_megatron
from megatron_cg.integrations import repeated_step
from megatron_cg.integrations.megatron import megatron_unit
from megatron_cg.integrations.megatron.packs import agreed_packs
from megatron_cg.tape.training_plan import CpuModelConfig, TrainingPlan
from megatron_cg.upstream.megatron import capturing_flag
from megatron_cg.upstream.patch import set_attribute, undone_after

_OUTER = "num_distributed_optimizer_instances"
"""How many groups of ranks hold all shards each; Megatron's groups and its config must agree."""


def transformer_config(model: CpuModelConfig) -> TransformerConfig:
    dtype = torch.bfloat16 if model.bf16 else torch.float32
    fields: dict[str, object] = {
        "num_layers": model.layers,
        "hidden_size": model.hidden_size,
        "ffn_hidden_size": model.ffn_hidden_size,
        "num_attention_heads": model.heads,
        "tensor_model_parallel_size": model.tensor_parallel,
        "hidden_dropout": model.dropout,
        "attention_dropout": model.dropout,
        "bf16": model.bf16,
        "params_dtype": dtype,
        "pipeline_dtype": dtype,
        "add_bias_linear": False,
        "normalization": "RMSNorm",
        "gated_linear_unit": True,
        "activation_func": torch.nn.functional.silu,
        # gloo lacks PREMUL_SUM; FSDP would reduce with it if it scaled the gradients itself. v2
        # takes the average.
        "calculate_per_token_loss": not model.under_v2,
        # Costs nothing until layers get graphs, and eager runs then build the same model.
        "cuda_graph_impl": "transformer_engine",
        "cuda_graph_modules": list(model.graph_modules),
    }
    if model.experts:
        fields |= {
            "num_moe_experts": model.experts,
            "moe_router_topk": model.topk,
            "moe_aux_loss_coeff": 1e-2,
            "moe_token_dispatcher_type": "alltoall",
            "moe_grouped_gemm": model.grouped is not None,
            "expert_model_parallel_size": model.expert_parallel,
            "moe_ffn_hidden_size": model.ffn_hidden_size,
        }
    return TransformerConfig(**{**fields, **model.options})


def ddp_config(model: CpuModelConfig) -> DistributedDataParallelConfig:
    """Return the FSDP options that graphs need, overridden by ``model.fsdp_options``."""
    options: dict[str, object] = {
        "use_megatron_fsdp": True,
        "use_distributed_optimizer": not model.under_v2,
        "data_parallel_sharding_strategy": "optim_grads_params",
        "overlap_grad_reduce": True,
        "overlap_param_gather": True,
        "fsdp_double_buffer": not model.under_v2,
        "fsdp_db_use_persist_buf_on_alloc_fail": not model.under_v2,
        **model.fsdp_options,
    }
    return DistributedDataParallelConfig(**options)


def build(model: CpuModelConfig) -> Any:
    """Build and shard the model; needs cpu_fakes and an initialised default process group."""
    parallel_state.initialize_model_parallel(
        model.tensor_parallel,
        expert_model_parallel_size=model.expert_parallel,
        **{_OUTER: model.fsdp_options.get(_OUTER, 1)},
    )
    tensor_parallel.model_parallel_cuda_manual_seed(model.seed)
    torch.manual_seed(model.seed)
    on_meta = model.options.get("init_model_with_meta_device", False)
    with torch.device("meta") if on_meta else nullcontext():
        made: Any = gpt_model(model)
    options = {"config": made.config, "ddp_config": ddp_config(model), "module": made}
    if model.under_v2:
        options["pg_collection"] = ProcessGroupCollection.use_mpu_process_groups()
    with undone_after(allow_graphs_under_v2()):
        return FullyShardedDataParallel(**options)


def gpt_model(model: CpuModelConfig) -> torch.nn.Module:
    config = transformer_config(model)
    layer = get_gpt_layer_local_spec(
        num_experts=model.experts or None,
        moe_grouped_gemm=False,
        normalization=config.normalization,
    )
    if model.grouped is not None:
        layer.submodules.mlp = model.grouped(layer.submodules.mlp)
    # From a layer spec alone, Megatron would use TE's final norm wherever TE is installed.
    spec = TransformerBlockSubmodules([layer] * model.layers, WrappedTorchNorm)
    gpt: torch.nn.Module = GPTModel(
        config=config,
        transformer_layer_spec=spec,
        vocab_size=model.vocabulary,
        max_sequence_length=model.sequence_length,
        share_embeddings_and_output_weights=False,
        position_embedding_type="rope",
        mtp_block_spec=get_gpt_mtp_block_spec(config, spec, use_transformer_engine=False),
    )
    return Float16Module(config, gpt) if model.bf16 else gpt


def transformer_layers(model: torch.nn.Module) -> list[TransformerLayer]:
    """Return the model's transformer layers, the FSDP units, in the order they run."""
    return [module for module in model.modules() if isinstance(module, TransformerLayer)]


def batches(plan: TrainingPlan) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Endless (tokens, labels), each (batch, sequence) int64: the bytes of Python's ``os.py``.

    Each id is taken modulo the vocabulary. Data-parallel ranks take turns in the sequences.
    """
    group, length = parallel_state.get_data_parallel_group(), plan.model.sequence_length
    text = numpy.frombuffer(Path(os.__file__).read_bytes(), dtype=numpy.uint8)
    stream = torch.from_numpy(text.astype(numpy.int64)) % plan.model.vocabulary
    rows = stream.unfold(0, length + 1, length)
    ranks = dist.get_world_size(group)
    turns = torch.arange(plan.micro_batch_size) * ranks + dist.get_rank(group)
    for first in count(step=ranks * plan.micro_batch_size):
        block = rows[(first + turns) % len(rows)]
        yield block[:, :-1].contiguous(), block[:, 1:].contiguous()


class Trainer:
    """A built model with its optimizer; needs cpu_fakes and a default process group."""

    def __init__(self, plan: TrainingPlan) -> None:
        self.plan = plan
        self.model = build(plan.model)
        self._fsdp: Any = self.model
        if not plan.model.under_v2:
            self._fsdp = self.model.module
            self._fsdp._replace_param_with_distributed_if_needed()
        self._parameters = list(self._fsdp.parameters())
        self._optimizer: Any = torch.optim.Adam(self._parameters, lr=plan.learning_rate)
        fsdp: Any = megatron_fsdp.experimental if plan.model.under_v2 else megatron_fsdp
        fsdp.fully_shard_optimizer(self._optimizer)  # in place
        self._batches: Iterator[Any] = batches(plan)
        self._inputs = megatron_unit.ObservedInputs(transformer_layers(self.model))
        self.session: Session | None = None

    def step(self) -> tuple[float, float]:
        """Train one step; return the mean loss per token (all processes) and the gradient norm."""
        with ExitStack() as stack:
            if self.session is not None:
                self.session.mismatches.begin_step()
            elif self.plan.graphs:
                stack.callback(self._inputs.observe_step())
            return self._step()

    def _step(self) -> tuple[float, float]:
        verifies = self.session is not None and self.session.mismatches.verifies_step
        loss = self._verified() if verifies else self._passes()
        norm = self._gradient_norm()
        with_synced = {} if self.plan.model.under_v2 else {"sync_grad_before_optimizer_step": False}
        self._optimizer.step(**with_synced)
        return loss, norm

    def _verified(self) -> float:
        assert self.session is not None
        again = repeated_step.Batches(self._batches)

        def eagerly() -> float:
            again.rewind()
            return self._passes()

        with undone_after(set_attribute(self, "_batches", again)):
            return float(repeated_step.train_step(self.session, self._passes, eagerly))

    def _passes(self) -> float:
        """All passes of a step; returns the mean loss."""
        self._optimizer.zero_grad()
        total = torch.zeros(2, dtype=torch.float64)
        for microbatch in range(self.plan.microbatches):
            last = microbatch == self.plan.microbatches - 1
            with nullcontext() if last else self._fsdp.no_sync():
                losses = self._forward()
                # Version 2 averages gradients over ranks and does not scale them afterwards.
                scale = losses.numel() * self.plan.microbatches if self.plan.model.under_v2 else 1
                (losses.sum() / scale).backward()
            total += torch.tensor([losses.detach().double().sum(), losses.numel()])
        dist.all_reduce(total)
        self._fsdp.finish_grad_sync()
        self._fsdp.scale_gradients(1.0 / float(total[1]))
        return float(total[0] / total[1])

    def _forward(self) -> torch.Tensor:
        tokens, labels = next(self._batches)
        length = tokens.shape[1]
        positions = torch.arange(length).expand_as(tokens)
        mask = ~torch.tril(torch.ones(length, length, dtype=torch.bool)).reshape(1, 1, length, -1)
        losses: torch.Tensor = self.model(tokens, positions, mask, labels=labels)
        return losses.float()

    def _gradient_norm(self) -> float:
        total = torch.zeros((), dtype=torch.float64)
        for parameter in self._parameters:
            if parameter.grad is not None:
                total += parameter.grad.to_local().double().square().sum()
        dist.all_reduce(total)
        return float(total.sqrt())

    def capture(
        self,
        backend: Backend,
        agreement: Agreement | None = None,
        *,
        only: Sequence[int] | None = None,
        packed_samples: int | None = None,
        **options: Any,
    ) -> Session:
        """Capture the transformer layers; they replay until the session is closed.

        ``only`` lists the indices of the layers to capture; None means all. ``packed_samples`` is
        as ``--cg-packed-samples``. ``agreement`` and ``options`` are the session's.

        Raises what the session and the backend raise; the model is then unchanged.
        """
        layers = transformer_layers(self.model)
        if only is not None:
            layers = [layers[index] for index in only]
        agreement = agreement or Agreement()
        sharding = of_megatron(self.model)
        assert sharding is not None
        packs = None
        if any(map(megatron_unit.takes_packs, layers)):
            tokens = self.plan.model.sequence_length
            packs = agreed_packs(self._inputs.packs, agreement, tokens, packed_samples)
        units = megatron_unit.units_of(layers, packs)
        session = Session(sharding, units, backend, agreement, **options)
        with ExitStack() as lasting:
            args, kwargs = zip(*(self._samples(layer, packs) for layer in layers), strict=True)
            lasting.callback(megatron_unit.shared_experts_idle, layers)
            lasting.callback(recompute_in_layers(self.model, self._inputs))
            if packs is not None:
                lasting.callback(packs.install(self.model, layers))
            with session.capturing(), capturing_flag():
                request = CaptureRequest(tuple(layers), [*args], [*kwargs], warmups=2)
                request.share_buffers = True
                graphs = session.capture(request)
                for layer, graph in zip(layers, graphs, strict=True):
                    layer.cuda_graphs = [graph]
            if packs is not None:
                packs.begin(session)
            session.on_close(lasting.pop_all().close)
        self._optimizer.zero_grad()
        self.session = session
        return session

    def close(self) -> None:
        """Delete the graphs, if there are any. Safe to call twice."""
        if self.session is not None:
            self.session.close()

    def _samples(self, layer: Any, packs: Any) -> tuple[tuple[torch.Tensor], dict[str, Any]]:
        """Return static inputs as Megatron's helper makes them, in the model's precision."""
        shape = self.plan.model
        inputs = layer.get_layer_static_inputs(shape.sequence_length, self.plan.micro_batch_size)
        hidden = inputs.pop("hidden_states").detach().to(layer.config.params_dtype)
        if "attention_mask" in inputs:
            gpt = next(m for m in self.model.modules() if hasattr(m, "rotary_pos_emb"))
            inputs["rotary_pos_emb"] = gpt.rotary_pos_emb(shape.sequence_length)
            # The model passes one mask for the whole batch, so the graph uses that shape.
            inputs["attention_mask"] = inputs["attention_mask"][:1].clone()
        if packs is not None and megatron_unit.takes_packs(layer):
            inputs.update(packs.sample(torch.device("cpu")))
        return (hidden.requires_grad_(),), inputs
