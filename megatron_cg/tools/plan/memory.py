"""The layers of a run by its flags, what graphs hold of them, and the memory of one GPU.

A part of a layer has the parameters and the saved activations that are added up. Sizes follow
megatron-core 0.19.2 with Transformer Engine's modules; a test compares them with recorded runs.
Biases, norms' weights and positions are left out: they are less than a hundredth.

Constants were fitted to recorded runs on H100s and H200s. A run's peak is in one of two phases: the
layers' passes, with activations and logits, or the optimizer step, with fp32 copies of gradients.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from megatron_cg.arguments.layers import available_scopes, decoder_symbols, read_tokens
from megatron_cg.arguments.schema import WHOLE_LAYER, mtp_is_repeated, recomputes_layers
from megatron_cg.tools.plan.settings import VOCABULARY, Settings

_SLOT_ROWS = 128  # ``--cg-moe-rows`` rounds the rows of a slot up to a multiple of this


@dataclass(frozen=True)
class Part:
    """A part of a layer, and the ``scope`` that captures it; None if none can.

    Numbers of parameters: ``split`` that tensor-parallel ranks share, ``whole`` that each has, and
    of all ``experts``. Bytes: ``saved`` for the backward pass, ``recomputed`` that only a graph
    saves, since Megatron checkpoints nothing in a capture, and ``outputs`` that a graph which ends
    behind it hands to the eager part that follows.
    """

    name: str
    scope: str | None
    split: int = 0
    whole: int = 0
    experts: int = 0
    saved: int = 0
    recomputed: int = 0
    outputs: int = 0


@dataclass(frozen=True)
class Layer:
    """A layer with its parts; ``captured`` are those in its graph."""

    name: str
    kind: str
    parts: tuple[Part, ...]
    captured: tuple[Part, ...] = ()

    def holds(self, *names: str) -> bool:
        return any(part.name in names for part in self.captured)


class Shape:
    """Sizes of one rank and its microbatches.

    In bytes: the ``width`` of an element, the ``hidden`` states between layers, and a ``norm``'s
    output that is saved. ``tensor`` parallelism splits ``tokens``; ``gated`` is 2 if an MLP
    multiplies two projections, else 1.
    """

    def __init__(self, settings: Settings) -> None:
        self.args, self.run, self.graph = settings.args, settings.run, settings.graph
        args = self.args
        self.width = 2 if self.run.bf16 or args.fp16 else 4
        self.tensor = int(args.tensor_model_parallel_size)
        self.tokens = int(args.micro_batch_size * args.seq_length // args.context_parallel_size)
        split = self.tensor if args.sequence_parallel else 1
        self.hidden = int(self.tokens * args.hidden_size * self.width // split)
        self.norm = 0 if self.run.recomputes("layernorm") else self.hidden
        self.gated = 2 if args.swiglu or args.quick_geglu else 1
        # Fused attention does not save its probabilities.
        unfused = {args.transformer_impl, self.run.attention_backend} & {"local", "unfused"}
        scores = self.bytes_of(args.num_attention_heads * args.seq_length) * bool(unfused)
        self.scores = self.saved(scores, "core_attn")
        self.keeps_quantized = self.run.fp8 is not None and not self.run.fp8_param_gather
        instances = int(args.num_distributed_optimizer_instances)
        self.groups = instances if args.outer_dp_sharding_strategy == "optim" else 1
        self.expert_split = int(args.expert_tensor_parallel_size * args.expert_model_parallel_size)
        self.sharing: int = args.data_parallel_size * args.context_parallel_size // instances
        self.sharing_experts: int = max(1, args.world_size // (self.expert_split * instances))
        strategy = args.data_parallel_sharding_strategy
        self.shards_weights = strategy == "optim_grads_params"
        self.shards_gradients = strategy in ("optim_grads_params", "optim_grads")
        self.shards_optimizer = strategy != "no_shard"
        # ``auto`` is the dtype of the parameters; Megatron replaces the flag's names by dtypes.
        dtype = args.megatron_fsdp_main_grads_dtype
        self.gradient_width = getattr(dtype, "itemsize", self.width)

    def bytes_of(self, columns: int) -> int:
        """Bytes of an activation with so many columns, which tensor parallelism splits."""
        return self.tokens * columns * self.width // self.tensor

    def saved(self, size: int, *modules: str) -> tuple[int, int]:
        """What of so many bytes is saved, and what is recomputed with one of these modules."""
        if not any(map(self.run.recomputes, modules)):
            return size, 0
        # In low precision Transformer Engine checkpoints all but attention, also in a capture.
        return 0, 0 if self.run.has_low_precision and "core_attn" not in modules else size

    @property
    def row_bytes(self) -> int:
        return int((self.args.moe_latent_size or self.args.hidden_size) * self.width)

    @property
    def average_rows(self) -> int:
        """Rows that the experts of a rank compute on average."""
        args, tokens = self.args, self.tokens
        if args.sequence_parallel and args.expert_tensor_parallel_size < self.tensor:
            tokens //= self.tensor
        factor = args.moe_expert_capacity_factor if self.run.drops_and_pads else 1
        return int(tokens * args.moe_router_topk * factor)

    @property
    def rows(self) -> int:
        """Rows for which there is room: in a graph with dropless experts, for any routing."""
        args, graph, average = self.args, self.graph, self.average_rows
        ranks = args.expert_model_parallel_size
        captured = self.run.wants_graphs and self.run.captures("moe")
        if not captured or self.run.drops_and_pads or ranks == 1:
            return average
        topk = args.moe_router_topk
        slot = average // topk * min(topk, args.num_experts // ranks)
        if graph.cg_moe_rows is not None:
            most = -(-int(graph.cg_moe_rows * average / ranks) // _SLOT_ROWS) * _SLOT_ROWS
            slot = min(slot, most)
        return int(slot * ranks)

    @property
    def kept_rows(self) -> int:
        """Of these, rows that a layer keeps for the backward pass."""
        stash, average = self.graph.cg_moe_stash, self.average_rows
        return self.rows if stash is None or self.rows == average else int(stash * average)

    def _counts(self, parts: Sequence[Part]) -> tuple[int, int]:
        dense = sum(part.split // self.tensor + part.whole for part in parts)
        return dense, sum(part.experts for part in parts) // self.expert_split

    def held(self, parts: Sequence[Part], *, sharded: bool = False) -> int:
        dense, experts = self._counts(parts)
        if sharded:
            return -(-dense // self.sharing) - (-experts // self.sharing_experts)
        return dense + experts

    def optimized(self, parts: Sequence[Part]) -> int:
        """Parameters that a rank's optimizer updates: hybrid FSDP shards them over groups, too."""
        shard = self.held(parts, sharded=self.shards_optimizer)
        return -(-shard // self.groups) if self.shards_optimizer else shard

    def state(self, parts: Sequence[Part]) -> dict[str, int]:
        args, width = self.args, self.width
        moments = 8 if args.optimizer == "adam" else 4
        if args.use_precision_aware_optimizer:
            moments = args.exp_avg_dtype.itemsize + args.exp_avg_sq_dtype.itemsize
        optimizer = self.optimized(parts)
        return {
            "weights": self.held(parts, sharded=self.shards_weights) * width,
            "gradients": self.held(parts, sharded=self.shards_gradients) * self.gradient_width,
            "main weights": optimizer * (4 if width == 2 else 0),
            "optimizer state": optimizer * moments,
        }

    def buffers(self, layers: Sequence[Layer], ends: Part) -> int:
        """Bytes of unsharded weights and gradients.

        All units share two of the largest size; or those of the most frequent size do, and with
        ``--fsdp-db-use-persist-buf-on-alloc-fail`` each other has its own.
        """
        sizes = Counter(self._gathered(layer.parts) for layer in layers)
        common, count = sizes.most_common(1)[0]
        others = sum(sum(size) * count for size, count in sizes.items()) - sum(common) * count
        if self.args.megatron_fsdp_max_pool_double_buffer and self.shards_weights:
            common, others = tuple(map(max, zip(*sizes, strict=True))), 0
        width = self.width * self.shards_weights
        width += self.gradient_width * self.shards_gradients
        return int((2 * sum(common) + others + sum(self._gathered([ends]))) * width)

    def _gathered(self, parts: Sequence[Part]) -> tuple[int, ...]:
        """The parameters of a unit's two buffers, the smaller first."""
        dense, experts = self._counts(parts)
        return (*sorted((dense * (self.sharing > 1), experts * (self.sharing_experts > 1))),)

    def workspace(self, layer: Layer) -> int:
        """Bytes of a layer's weight gradients, and of the widest activations of its backward."""
        args = self.args
        heads = args.num_attention_heads * (args.kv_channels or 0) // self.tensor
        widest = 4 * self.tokens * max(args.hidden_size, heads) * self.width
        if layer.holds("experts"):
            sends = args.expert_model_parallel_size > 1 and self.graph.cg_moe_exchange != "peer"
            widest = max(widest, self.row_bytes * self.rows * (3 if sends else 1))
            if self.kept_rows != self.rows:
                # The layer that runs has room for any routing.
                [experts] = [part for part in layer.captured if part.name == "experts"]
                saved = experts.saved + experts.recomputed - self.norm
                widest += saved * self.rows // self.kept_rows
        repeated = _activations(self, layer) if recomputes_layers(self.run) else 0
        return int(self.held(layer.captured) * self.width + widest + repeated)


def layers_of(settings: Settings) -> tuple[Layer, ...]:
    """All layers of the model: the decoder's by number, then those of multi-token prediction.

    A layer's kind is Megatron's symbols of its parts, as in a hybrid pattern.
    """
    run, args, shape = settings.run, settings.args, Shape(settings)
    selection = read_tokens(settings.graph.cg_layers)[0]
    kinds = [*decoder_symbols(run.hybrid_layer_pattern or "")]
    if run.hybrid_layer_pattern is None:
        # A layer spec is taken to change no kind of a layer.
        known = replace(run, custom_layers=False, num_layers=args.num_layers)
        attention = "+" if args.multi_latent_attention else "*"
        available = available_scopes(known) or ()
        kinds = [attention + ("E" if "moe" in scopes else "-") for scopes in available]
    decoder = [
        _layer(shape, f"{number}", kind, selection.scopes(number, run.cuda_graph_modules))
        for number, kind in enumerate(kinds)
    ]
    return (*decoder, *_mtp_layers(shape, kinds[-1]))


def _mtp_layers(shape: Shape, kind: str) -> Iterator[Layer]:
    """Layers of multi-token prediction: a projection, and a layer like the decoder's last.

    Megatron captures none of a hybrid model, and this package none that is repeated.
    """
    args, run = shape.args, shape.run
    count, scopes = args.mtp_num_layers or 0, run.scope_names
    if run.hybrid_layer_pattern is not None:
        kind = run.hybrid_layer_pattern.partition("/")[2].partition("/")[0]
        scopes = ()
    if mtp_is_repeated(run):
        count, scopes = 1, ()
    joined = Part("projection", None, split=2 * args.hidden_size**2, saved=3 * shape.hidden)
    for number in range(count):
        layer = _layer(shape, f"MTP {number}", kind, scopes)
        yield replace(layer, parts=(*layer.parts, joined))


def _layer(shape: Shape, name: str, kind: str, active: Sequence[str]) -> Layer:
    made = [_KINDS.get(symbol, _KINDS["*"]) for symbol in kind]
    parts = tuple(part for _, make in made for part in make(shape))
    scopes = set(active) if shape.run.wants_graphs else set()
    if "moe" in scopes:
        scopes |= {"moe_router", "moe_preprocess"}
    whole = WHOLE_LAYER in scopes
    captured = tuple(part for part in parts if whole or part.scope in scopes)
    return Layer(name, " + ".join(called for called, _ in made), parts, captured)


def _attention(shape: Shape) -> Iterator[Part]:
    args = shape.args
    groups = args.num_query_groups if args.group_query_attention else args.num_attention_heads
    queries, keys = args.num_attention_heads * args.kv_channels, groups * args.kv_channels
    # Queries, keys and values behind the rotation, the output, and a gate; before a norm, too.
    columns = 2 * queries + 2 * keys + queries * args.attention_output_gate
    normed = (queries + keys) * args.qk_layernorm
    saved, again = shape.scores
    saved += shape.norm + shape.bytes_of(columns + normed)
    saved += shape.hidden * bool(args.hidden_dropout)
    yield Part("attention", "attn", split=args.hidden_size * columns, saved=saved, recomputed=again)


def _latent_attention(shape: Shape) -> Iterator[Part]:
    args = shape.args
    heads, hidden = args.num_attention_heads, args.hidden_size
    query = args.qk_head_dim + args.qk_pos_emb_head_dim
    low, low_query = args.kv_lora_rank, args.q_lora_rank or 0
    # The projections to low rank are not split.
    down = hidden * (low + args.qk_pos_emb_head_dim + low_query)
    up = low * heads * (args.qk_head_dim + args.v_head_dim) + heads * args.v_head_dim * hidden
    up += (low_query or hidden) * heads * query
    compressed = 2 * low_query + 2 * low + args.qk_pos_emb_head_dim
    expanded = 0 if shape.run.recomputes("mla_up_proj") else heads * (2 * query + args.v_head_dim)
    saved, again = shape.scores
    saved += shape.norm + shape.tokens * compressed * shape.width
    saved += shape.bytes_of(expanded + heads * args.v_head_dim)
    yield Part("attention", "attn", split=up, whole=down, saved=saved, recomputed=again)


def _mamba(shape: Shape) -> Iterator[Part]:
    args = shape.args
    heads = args.mamba_num_heads or 2 * args.hidden_size // args.mamba_head_dim
    inner = heads * args.mamba_head_dim
    states = 2 * args.mamba_num_groups * args.mamba_state_dim
    wide = 2 * inner + states + heads
    # The scan keeps a state in fp32 for each chunk of 128 tokens.
    chunks = shape.tokens // 128 * inner * args.mamba_state_dim * 3 // shape.tensor
    saved = shape.norm + shape.bytes_of(wide + 3 * inner + states) + chunks
    yield Part("Mamba mixer", "mamba", split=args.hidden_size * (wide + inner), saved=saved)


def _mlp(shape: Shape) -> Iterator[Part]:
    wide = shape.args.ffn_hidden_size
    saved, again = shape.saved(shape.bytes_of((shape.gated + 1) * wide), "mlp")
    saved += shape.norm + shape.hidden * bool(shape.args.hidden_dropout)
    split = shape.args.hidden_size * wide * (shape.gated + 1)
    yield Part("MLP", "mlp", split=split, saved=saved, recomputed=again)


def _moe(shape: Shape) -> Iterator[Part]:
    args, run, width = shape.args, shape.run, shape.width
    hidden, count = args.hidden_size, args.num_experts
    choices = 5 * count * shape.hidden // (hidden * width)  # probabilities in fp32, and a map
    outputs = shape.hidden + choices
    yield Part("router", "moe_router", whole=hidden * count, saved=choices, outputs=outputs)
    if wide := args.moe_shared_expert_intermediate_size:
        columns = (shape.gated + 1) * wide
        saved, again = shape.saved(shape.bytes_of(columns), "shared_experts", "moe")
        scope = "moe" if args.moe_shared_expert_overlap else "moe_router"
        sizes = {"split": hidden * columns, "saved": saved, "recomputed": again}
        yield Part("shared expert", scope, **sizes, outputs=shape.hidden)
    inner = args.moe_latent_size or hidden
    # It takes the place of the hidden states among the outputs.
    dispatched = shape.average_rows * shape.row_bytes - shape.hidden
    yield Part("token dispatch", "moe_preprocess", outputs=dispatched)
    wide = args.moe_ffn_hidden_size
    latent = 2 * hidden * args.moe_latent_size if args.moe_latent_size else 0
    columns = (shape.gated + (not run.recomputes("moe_act"))) * wide
    columns = inner + columns // args.expert_tensor_parallel_size
    saved, again = shape.saved(shape.kept_rows * columns * width, "moe")
    saved += shape.norm
    experts = count * inner * wide * (shape.gated + 1)
    yield Part("experts", "moe", whole=latent, experts=experts, saved=saved, recomputed=again)


_KINDS = {
    "*": ("attention", _attention),
    "+": ("latent attention", _latent_attention),
    "M": ("Mamba mixer", _mamba),
    "-": ("MLP", _mlp),
    "E": ("MoE", _moe),
}
"""By Megatron's symbol in a hybrid pattern: what it is called, and what makes its parts."""

MIB = 2**20
_MISCELLANEOUS = 136 * MIB  # workspaces of cuBLAS and TE, and small buffers
_CONTEXT, _EXPERT_GROUPS = 3_400 * MIB, 2_300 * MIB
"""Outside torch's allocator: CUDA's context and NCCL; more NCCL with expert-parallel groups."""
_FRAGMENTED, _POOL_FRAGMENTED = 1.02, 1.05
_LENT = 0.65  # the part of the graphs' pool in which gradient copies find room

_ALWAYS, _POOL, _STEP = "in every phase", "graphs' pool", "optimizer step"
_PASSES, _OUTSIDE = "forward and backward passes", "outside of torch's allocator"


@dataclass(frozen=True)
class Memory:
    """Numbers of parameters, and bytes on one rank: ``terms`` by phase and name."""

    parameters: tuple[int, int, int]  # of the whole model, of a rank, and of a rank after sharding
    terms: Mapping[str, Mapping[str, int]]

    def _sum(self, phase: str) -> int:
        return sum(self.terms[phase].values())

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
    shape, args = Shape(settings), settings.args
    vocabulary = _vocabulary(args)
    tables = 2 if args.untie_embeddings_and_output_weights else 1
    ends = Part("embedding", None, split=vocabulary * args.hidden_size * tables)
    parts = [*(part for layer in layers for part in layer.parts), ends]
    graphed = [layer for layer in layers if layer.captured]
    state = shape.state(parts)
    outputs = [_outputs(shape, layer) for layer in graphed]
    masks = args.micro_batch_size * args.seq_length**2 // args.context_parallel_size
    masks *= args.create_attention_mask_in_dataloader
    copies_gradients = shape.gradient_width == 2 and not args.use_precision_aware_optimizer
    peer = graphed and shape.graph.cg_moe_exchange == "peer"
    logits = shape.bytes_of(vocabulary) * (1 + (args.mtp_num_layers or 0))
    terms = {
        _ALWAYS: {
            **state,
            # With its transpose each quantized weight of a rank has a byte twice, not sharded.
            "quantized weights": shape.held(parts[:-1]) * 2 * shape.keeps_quantized,
            "FSDP buffers": shape.buffers(layers, ends),
            "workspaces": _MISCELLANEOUS,
            "static inputs": shape.hidden * len(graphed),
            "attention masks": masks * sum(layer.holds("attention") for layer in graphed),
            "output gradients": sum(set(outputs)),
        },
        _POOL: {
            "saved activations": sum(_saved(shape, *numbered) for numbered in enumerate(graphed)),
            "outputs": sum(outputs),
            "gradients and workspace": max(map(shape.workspace, graphed), default=0),
        },
        _PASSES: {
            "eager activations": _eager_activations(shape, layers),
            "logits": logits + logits * 4 // shape.width,  # again in fp32, for the loss
        },
        _STEP: {"fp32 copies of gradients": shape.optimized(parts) * 4 * copies_gradients},
        _OUTSIDE: {
            "CUDA and NCCL": _CONTEXT + _EXPERT_GROUPS * (args.expert_model_parallel_size > 1),
            # One set of slots for all layers, for rows and what places them.
            "peer memory": shape.rows * (shape.row_bytes + 4) if peer else 0,
        },
    }
    count = sum(part.split + part.whole + part.experts for part in parts)
    sharded = shape.held(parts, sharded=shape.shards_weights)
    return Memory((count, shape.held(parts), sharded), terms)


def _vocabulary(args: Any) -> int:
    if args.padded_vocab_size is not None:
        return int(args.padded_vocab_size)
    step = args.make_vocab_size_divisible_by * args.tensor_model_parallel_size
    return int(-(-(args.vocab_size or VOCABULARY) // step) * step)


def _saved(shape: Shape, number: int, layer: Layer) -> int:
    """What the forward graph of a layer keeps; recompute of the whole layer keeps nothing."""
    first = shape.args.recompute_num_layers  # None if plan dropped it
    recomputed = shape.run.recompute_method == "uniform" or first is None or number < first
    return 0 if recomputes_layers(shape.run) and recomputed else _activations(shape, layer)


def _activations(shape: Shape, layer: Layer) -> int:
    saved = sum(part.saved + part.recomputed for part in layer.captured)
    saved += shape.hidden * (layer.holds("attention") and layer.holds("MLP", "experts"))
    return saved + shape.hidden * (layer.holds("token dispatch") and not layer.holds("experts"))


def _eager_activations(shape: Shape, layers: Sequence[Layer]) -> int:
    kept = largest = 0
    for number, layer in enumerate(layers):
        rest = [replace(part, recomputed=0) for part in layer.parts if part not in layer.captured]
        eager = replace(layer, captured=tuple(rest))
        kept += _saved(shape, number, eager) + shape.hidden * bool(rest)  # and its input
        largest = max(largest, _activations(shape, eager))
    kept += largest * recomputes_layers(shape.run)
    if shape.graph.cg_moe_rows is not None or shape.graph.cg_moe_stash is not None:
        # A step that is repeated runs eagerly, beside the graphs' pool.
        kept += sum(_activations(shape, layer) for layer in layers)
    return kept


def _outputs(shape: Shape, layer: Layer) -> int:
    """The hidden states, and what a graph that ends inside of a MoE layer hands over."""
    handed = 0 if layer.holds("experts") else sum(part.outputs for part in layer.captured)
    return shape.hidden + handed
