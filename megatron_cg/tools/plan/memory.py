"""The memory of a run on one GPU, by formula: eagerly and with graphs.

What is not computed from shapes is a constant that was fitted to recorded runs on H100s and H200s.
A run's peak is in one of two phases: the layers' passes, with activations and logits, or the
optimizer step, with fp32 copies of the gradients.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from megatron_cg.arguments.schema import recomputes_layers
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
"""The part of the graphs' pool in which gradient copies find room."""

_ALWAYS, _POOL = "in every phase", "graphs' pool"
_PASSES, _STEP = "forward and backward passes", "optimizer step"
_OUTSIDE = "outside of torch's allocator"


@dataclass(frozen=True)
class Memory:
    """Numbers of parameters, and bytes on one rank: ``terms`` by phase and name."""

    parameters: tuple[int, int, int]
    """Of the whole model, of a rank, and of a rank after sharding."""
    masks: int
    """Bytes of attention masks that graphs hold if the data loader makes masks."""
    terms: Mapping[str, Mapping[str, int]]

    def _sum(self, phase: str) -> int:
        return sum(self.terms[phase].values())

    @property
    def allocated(self) -> int:
        """The peak of ``torch.cuda.max_memory_allocated``, which does not count a pool's blocks."""
        return self._sum(_ALWAYS) + max(self._sum(_STEP), self._sum(_PASSES))

    @property
    def reserved(self) -> int:
        """The peak of ``torch.cuda.max_memory_reserved``."""
        pool = self._sum(_POOL) * _POOL_FRAGMENTED
        step = max(0, self._sum(_STEP) - pool * _LENT)
        peak = self._sum(_ALWAYS) + pool + max(step, self._sum(_PASSES))
        return int(peak * _FRAGMENTED)

    @property
    def total(self) -> int:
        return self.reserved + self._sum(_OUTSIDE)


def memory_of(settings: Settings, layers: Sequence[Layer] | None = None) -> Memory:
    layers = layers_of(settings) if layers is None else layers
    rank, args = _Rank(settings), settings.args
    shape = rank.shape
    vocabulary = _vocabulary(args)
    tables = 2 if args.untie_embeddings_and_output_weights else 1
    ends = Part("embedding", None, split=vocabulary * args.hidden_size * tables)
    parts = [*(part for layer in layers for part in layer.parts), ends]
    graphed = [layer for layer in layers if layer.captured]
    state = rank.state(parts)
    outputs = [_outputs(shape, layer) for layer in graphed]
    masks = args.micro_batch_size * args.seq_length**2 // args.context_parallel_size
    masks *= sum(layer.holds("attention") for layer in graphed)
    peer = graphed and shape.graph.cg_moe_exchange == "peer"
    logits = shape.bytes_of(vocabulary) * (1 + (args.mtp_num_layers or 0))
    terms = {
        _ALWAYS: {
            **state,
            "FSDP buffers": rank.buffers(layers, ends),
            "workspaces": _MISCELLANEOUS,
            "static inputs": shape.hidden * len(graphed),
            "attention masks": masks * args.create_attention_mask_in_dataloader,
            "output gradients": sum(set(outputs)),
        },
        _POOL: {
            "saved activations": sum(_saved(shape, *numbered) for numbered in enumerate(graphed)),
            "outputs": sum(outputs),
            "gradients and workspace": max(map(rank.workspace, graphed), default=0),
        },
        _PASSES: {
            "eager activations": _eager_activations(shape, layers),
            "logits": logits + logits * 4 // shape.width,  # again in fp32, for the loss
        },
        _STEP: {"fp32 copies of gradients": state["gradients"] * 2 * (rank.gradient_width == 2)},
        _OUTSIDE: {
            "CUDA and NCCL": _CONTEXT + _EXPERT_GROUPS * (args.expert_model_parallel_size > 1),
            # One set of slots for all layers, for rows and what places them.
            "peer memory": shape.rows * (shape.row_bytes + 4) if peer else 0,
        },
    }
    count = sum(part.split + part.whole + part.experts for part in parts)
    sharded = rank.held(parts, sharded=rank.shards_weights)
    return Memory((count, rank.held(parts), sharded), masks, terms)


class _Rank:
    def __init__(self, settings: Settings) -> None:
        self.shape, args = Shape(settings), settings.args
        instances = int(args.num_distributed_optimizer_instances)
        self.expert_split = int(args.expert_tensor_parallel_size * args.expert_model_parallel_size)
        self.sharing: int = args.data_parallel_size * args.context_parallel_size // instances
        self.sharing_experts: int = max(1, args.world_size // (self.expert_split * instances))
        strategy = args.data_parallel_sharding_strategy
        self.shards_weights = strategy == "optim_grads_params"
        self.shards_gradients = strategy in ("optim_grads_params", "optim_grads")
        self.shards_optimizer = strategy != "no_shard"
        # ``auto`` is the dtype of the parameters; Megatron replaces the flag's names by dtypes.
        dtype = args.megatron_fsdp_main_grads_dtype
        self.gradient_width = getattr(dtype, "itemsize", self.shape.width)

    def _counts(self, parts: Sequence[Part]) -> tuple[int, int]:
        dense = sum(part.split // self.shape.tensor + part.whole for part in parts)
        return dense, sum(part.experts for part in parts) // self.expert_split

    def held(self, parts: Sequence[Part], *, sharded: bool = False) -> int:
        dense, experts = self._counts(parts)
        if sharded:
            return -(-dense // self.sharing) - (-experts // self.sharing_experts)
        return dense + experts

    def state(self, parts: Sequence[Part]) -> dict[str, int]:
        args, width = self.shape.args, self.shape.width
        moments = 8 if args.optimizer == "adam" else 4
        if args.use_precision_aware_optimizer:
            moments = args.exp_avg_dtype.itemsize + args.exp_avg_sq_dtype.itemsize
        optimizer = self.held(parts, sharded=self.shards_optimizer)
        return {
            "weights": self.held(parts, sharded=self.shards_weights) * width,
            "gradients": self.held(parts, sharded=self.shards_gradients) * self.gradient_width,
            "main weights": optimizer * (4 if width == 2 else 0),
            "optimizer state": optimizer * moments,
        }

    def buffers(self, layers: Sequence[Layer], ends: Part) -> int:
        """Bytes of unsharded weights and gradients.

        Two buffers are for the units of the most frequent size, and with
        ``--fsdp-db-use-persist-buf-on-alloc-fail`` each other has its own.
        """
        sizes = Counter(self._gathered(layer.parts) for layer in layers)
        common, count = sizes.most_common(1)[0]
        others = sum(size * count for size, count in sizes.items()) - common * count
        if self.shape.args.megatron_fsdp_max_pool_double_buffer:
            common, others = max(sizes), 0
        width = self.shape.width * self.shards_weights
        width += self.gradient_width * self.shards_gradients
        return int((2 * common + others + self._gathered([ends])) * width)

    def _gathered(self, parts: Sequence[Part]) -> int:
        dense, experts = self._counts(parts)
        return dense * (self.sharing > 1) + experts * (self.sharing_experts > 1)

    def workspace(self, layer: Layer) -> int:
        """Bytes of a layer's weight gradients, and of the widest activations of its backward."""
        shape, args = self.shape, self.shape.args
        heads = args.num_attention_heads * (args.kv_channels or 0) // shape.tensor
        widest = 4 * shape.tokens * max(args.hidden_size, heads) * shape.width
        if layer.holds("experts"):
            sends = args.expert_model_parallel_size > 1 and shape.graph.cg_moe_exchange != "peer"
            widest = max(widest, shape.row_bytes * shape.rows * (3 if sends else 1))
        repeated = _activations(shape, layer) if recomputes_layers(shape.run) else 0
        return int(self.held(layer.captured) * shape.width + widest + repeated)


def _vocabulary(args: Any) -> int:
    if args.padded_vocab_size is not None:
        return int(args.padded_vocab_size)
    step = args.make_vocab_size_divisible_by * args.tensor_model_parallel_size
    return int(-(-(args.vocab_size or VOCABULARY) // step) * step)


def _saved(shape: Shape, number: int, layer: Layer) -> int:
    """What the forward graph of a layer keeps; recompute of the whole layer keeps nothing."""
    recomputed = number < (shape.args.recompute_num_layers or 0)
    if recomputes_layers(shape.run) and (recomputed or shape.run.recompute_method == "uniform"):
        return 0
    return _activations(shape, layer)


def _activations(shape: Shape, layer: Layer) -> int:
    saved = sum(part.saved for part in layer.captured)
    saved += shape.hidden * (layer.holds("attention") and layer.holds("MLP", "experts"))
    return saved + shape.hidden * (layer.holds("token dispatch") and not layer.holds("experts"))


def _eager_activations(shape: Shape, layers: Sequence[Layer]) -> int:
    rest = [part for layer in layers for part in layer.parts if part not in layer.captured]
    saved = [part.saved for part in rest if part.saved]
    kept = max(saved, default=0) if recomputes_layers(shape.run) else sum(saved)
    # An eager layer keeps its input, and what joins its two halves.
    kept += shape.hidden * len(saved)
    if shape.graph.cg_moe_rows is not None:
        # A step that is repeated runs eagerly, beside the graphs' pool.
        kept += sum(_activations(shape, layer) for layer in layers)
    return kept


def _outputs(shape: Shape, layer: Layer) -> int:
    """The hidden states, and what a graph that ends inside of a MoE layer hands over."""
    handed = 0 if layer.holds("experts") else sum(part.outputs for part in layer.captured)
    return shape.hidden + handed
