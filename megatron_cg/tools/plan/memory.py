"""The memory of a run on one GPU, by formula: eagerly and with graphs.

What is not computed from shapes is a constant that was fitted to recorded runs on H100s and H200s.
A run's peak is in one of two phases: the layers' passes, with activations and logits, or the
optimizer step, with fp32 copies of the gradients.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from megatron_cg.tools.plan.layers import Layer, Part, Shape, layers_of
from megatron_cg.tools.plan.settings import VOCABULARY, Settings

MIB = 2**20
_MISCELLANEOUS = 136 * MIB
"""Workspaces of cuBLAS and TE, and small buffers."""
_CONTEXT, _EXPERT_GROUPS = 3_400 * MIB, 2_300 * MIB
"""Outside torch's allocator: CUDA's context and NCCL; more NCCL with expert-parallel groups."""
_FRAGMENTED = 1.02
_POOL_FRAGMENTED = 1.05
_LENT = 0.65
"""The part of the graph pool in which gradient copies find room."""


@dataclass(frozen=True)
class Memory:
    """Bytes on one rank; ``graphs`` are the terms of graphs, and empty in an eager run."""

    parameters: int
    """Of the whole model, not bytes."""
    of_rank: int
    """Before sharding."""
    sharded: int
    """After sharding."""
    terms: dict[str, int]
    graphs: dict[str, int]
    copies: int
    """fp32 copies of the gradients, in the optimizer step alone."""
    passes: int
    """Activations of eager parts, and logits, in the passes alone."""
    outside: int
    """Outside torch's allocator."""

    @property
    def pool(self) -> int:
        """What the graphs' pool reserves."""
        names = ("saved activations", "outputs", "gradients and workspace")
        return int(sum(self.graphs.get(name, 0) for name in names) * _POOL_FRAGMENTED)

    @property
    def held(self) -> int:
        """What is allocated in every phase, outside of the graphs' pool."""
        tensors = ("static inputs", "attention masks", "output gradients")
        return sum(self.terms.values()) + sum(self.graphs.get(name, 0) for name in tensors)

    @property
    def allocated(self) -> int:
        """The peak of ``torch.cuda.max_memory_allocated``, which does not count a pool's blocks."""
        return self.held + max(self.copies, self.passes)

    @property
    def reserved(self) -> int:
        """The peak of ``torch.cuda.max_memory_reserved``."""
        step = max(0, self.copies - int(self.pool * _LENT))
        return int((self.held + self.pool + max(step, self.passes)) * _FRAGMENTED)

    @property
    def total(self) -> int:
        """What the GPU has to have."""
        return self.reserved + self.outside + self.graphs.get("peer memory", 0)


def memory_of(settings: Settings, layers: Sequence[Layer] | None = None) -> Memory:
    """The memory of the run in ``settings``, which Megatron's rules have accepted."""
    layers = layers_of(settings) if layers is None else layers
    shape = Shape(settings)
    ends = _ends(shape)
    parts = [part for layer in layers for part in layer.parts]
    weights = sum(part.weights for part in parts) + ends.weights
    experts = sum(part.experts for part in parts)
    sharding = _Sharding(settings.args)
    terms = _state(shape, sharding, weights, experts)
    terms["FSDP buffers"] = _buffers(shape, sharding, layers, ends)
    terms["workspaces"] = _MISCELLANEOUS
    graphs = _graphs(shape, layers) if settings.run.wants_graphs else {}
    rest = [part for layer in layers for part in layer.rest]
    full = settings.run.recompute_granularity == "full"
    kept = max((part.saved for part in rest), default=0) if full else sum(p.saved for p in rest)
    # An eager layer keeps its input, and what joins its two halves.
    kept += sum(shape.hidden * len([p for p in layer.rest if p.saved]) for layer in layers)
    if settings.graph.cg_moe_rows is not None and graphs:
        # A step that is repeated runs eagerly, beside the graphs' pool.
        kept += sum(_activations(shape, layer) for layer in layers)
    logits = shape.tokens * _vocabulary(shape.args) // shape.tensor * (shape.width + 4)
    logits *= 1 + (settings.args.mtp_num_layers or 0)
    outside = _CONTEXT + (_EXPERT_GROUPS if settings.args.expert_model_parallel_size > 1 else 0)
    gradients = terms["gradients"]
    bf16 = _gradient_width(shape) == 2
    return Memory(
        sum(part.all for part in parts) + ends.all,
        weights + experts,
        sharding.dense(weights) + sharding.expert(experts),
        terms,
        graphs,
        2 * gradients if bf16 else 0,
        kept + logits,
        outside,
    )


class _Sharding:
    """Over how many ranks what is sharded."""

    def __init__(self, args: Any) -> None:
        instances = args.num_distributed_optimizer_instances
        self.dense_ranks = args.data_parallel_size * args.context_parallel_size // instances
        expert = args.expert_tensor_parallel_size * args.expert_model_parallel_size
        expert *= args.pipeline_model_parallel_size * instances
        self.expert_ranks = max(1, args.world_size // expert)
        strategy = args.data_parallel_sharding_strategy
        self.weights = strategy == "optim_grads_params"
        self.gradients = strategy in ("optim_grads_params", "optim_grads")
        self.optimizer = strategy != "no_shard"

    def dense(self, count: int, sharded: bool = True) -> int:
        return -(-count // self.dense_ranks) if sharded else count

    def expert(self, count: int, sharded: bool = True) -> int:
        return -(-count // self.expert_ranks) if sharded else count


def _gradient_width(shape: Shape) -> int:
    written = str(shape.run.megatron_fsdp_main_grads_dtype)
    return {"fp32": 4, "bf16": 2}.get(written, shape.width)


def _bytes_of(dtype: Any) -> int:
    return int(getattr(dtype, "itemsize", 4))


def _state(shape: Shape, sharding: _Sharding, weights: int, experts: int) -> dict[str, int]:
    args = shape.args

    def part(sharded: bool) -> int:
        return sharding.dense(weights, sharded) + sharding.expert(experts, sharded)

    moments = 8 if args.optimizer == "adam" else 4
    if args.use_precision_aware_optimizer:
        moments = _bytes_of(args.exp_avg_dtype) + _bytes_of(args.exp_avg_sq_dtype)
    kept = 1.0 - args.optimizer_offload_fraction if args.optimizer_cpu_offload else 1.0
    main = 4 if shape.width == 2 else 0
    return {
        "weights": part(sharding.weights) * shape.width,
        "gradients": part(sharding.gradients) * _gradient_width(shape),
        "main weights": int(part(sharding.optimizer) * main * kept),
        "optimizer state": int(part(sharding.optimizer) * moments * kept),
    }


def _vocabulary(args: Any) -> int:
    if args.padded_vocab_size is not None:
        return int(args.padded_vocab_size)
    step = args.make_vocab_size_divisible_by * args.tensor_model_parallel_size
    return int(-(-(args.vocab_size or VOCABULARY) // step) * step)


def _ends(shape: Shape) -> Part:
    """Embedding, output layer and last norm: what lies in no FSDP unit."""
    args = shape.args
    tables = 2 if args.untie_embeddings_and_output_weights else 1
    size = _vocabulary(args) * args.hidden_size * tables
    position = args.max_position_embeddings * args.hidden_size
    position *= args.position_embedding_type == "learned_absolute"
    weights = size // shape.tensor + position + args.hidden_size
    return Part("embedding", None, weights, 0, size + position + args.hidden_size)


def _buffers(shape: Shape, sharding: _Sharding, layers: Sequence[Layer], ends: Part) -> int:
    """Unsharded weights and gradients: two units at a time, and all that is not like most units.

    Two buffers are for the units of the most frequent size, and with
    ``--fsdp-db-use-persist-buf-on-alloc-fail`` each other has its own.
    """
    sizes = Counter(_unit(sharding, layer.parts) for layer in layers)
    common = max(sizes, key=lambda size: sizes[size], default=0)
    others = sum(size * count for size, count in sizes.items() if size != common)
    if shape.args.megatron_fsdp_max_pool_double_buffer:
        common, others = max(sizes, default=0), 0
    outside = ends.weights if sharding.dense_ranks > 1 else 0
    elements = 2 * common + others + outside
    width = shape.width * sharding.weights + _gradient_width(shape) * sharding.gradients
    return int(elements * width)


def _unit(sharding: _Sharding, parts: Sequence[Part]) -> int:
    """Elements of a unit that have to be gathered."""
    dense = sum(part.weights for part in parts) if sharding.dense_ranks > 1 else 0
    return dense + (sum(part.experts for part in parts) if sharding.expert_ranks > 1 else 0)


def _graphs(shape: Shape, layers: Sequence[Layer]) -> dict[str, int]:
    """The terms of what graphs hold."""
    graphed = [layer for layer in layers if layer.captured]
    saved = [_saved(shape, layer, number) for number, layer in enumerate(graphed)]
    outputs = [_outputs(shape, layer) for layer in graphed]
    args = shape.args
    mask = args.micro_batch_size * args.seq_length**2 // args.context_parallel_size
    masked = [layer for layer in graphed if any(p.scope == "attn" for p in layer.captured)]
    given = args.create_attention_mask_in_dataloader or args.cuda_graph_warmup_steps < 1
    return {
        "static inputs": shape.hidden * len(graphed),
        "attention masks": mask * len(masked) * given,
        "output gradients": sum(set(outputs)),
        "saved activations": sum(saved),
        "outputs": sum(outputs),
        "gradients and workspace": max((_workspace(shape, layer) for layer in graphed), default=0),
        "peer memory": _peers(shape, graphed),
    }


def _has(layer: Layer, *names: str) -> bool:
    return any(part.name in names for part in layer.captured)


def _saved(shape: Shape, layer: Layer, number: int) -> int:
    """What the forward graph of a layer keeps; recompute of the whole layer keeps nothing."""
    run, args = shape.run, shape.args
    if run.recompute_granularity == "full" and (
        run.recompute_method == "uniform" or number < (args.recompute_num_layers or 0)
    ):
        return 0
    return _activations(shape, layer)


def _activations(shape: Shape, layer: Layer) -> int:
    saved = sum(part.saved for part in layer.captured)
    if _has(layer, "attention") and _has(layer, "MLP", "experts"):
        saved += shape.hidden
    if _has(layer, "token dispatch") and not _has(layer, "experts"):
        saved += shape.hidden
    return saved


def _outputs(shape: Shape, layer: Layer) -> int:
    """The hidden states, and what a graph that ends inside of a MoE layer hands over."""
    handed = 0
    if not _has(layer, "experts"):
        handed = sum(part.outputs for part in layer.captured)
        if _has(layer, "token dispatch"):
            handed -= shape.hidden
    return shape.hidden + handed


def _workspace(shape: Shape, layer: Layer) -> int:
    """Gradients of one layer's weights, and the widest activations of its backward pass."""
    args = shape.args
    gradients = sum(part.weights + part.experts for part in layer.captured) * shape.width
    widest = shape.tokens * max(
        args.hidden_size, args.num_attention_heads * (args.kv_channels or 0) // shape.tensor
    )
    rows = sum(part.rows for part in layer.captured)
    if args.expert_model_parallel_size > 1:
        rows *= 1 if shape.graph.cg_moe_exchange == "peer" else 3
    workspace = gradients + max(4 * widest * shape.width, rows)
    if shape.run.recompute_granularity == "full":
        workspace += _activations(shape, layer)
    return int(workspace)


def _peers(shape: Shape, graphed: Sequence[Layer]) -> int:
    """Slots that other GPUs write into: one set for all layers."""
    if shape.graph.cg_moe_exchange != "peer":
        return 0
    rows = max((part.rows for layer in graphed for part in layer.captured), default=0)
    width = shape.args.hidden_size * shape.width
    return int(rows * (width + 4) // width)
