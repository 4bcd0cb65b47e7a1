"""The layers of a run's model by its flags: their parts, and which of them graphs hold.

A part has the parameters and the saved activations that ``memory.py`` adds up. Sizes follow
megatron-core 0.19.2 with Transformer Engine's modules; a test compares them with recorded runs.
Biases, norms' weights and positions are left out: they are less than a hundredth.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from megatron_cg.arguments.layers import LayerSelection, available_scopes, decoder_symbols
from megatron_cg.arguments.schema import WHOLE_LAYER, mtp_is_repeated
from megatron_cg.tools.plan.settings import Settings

_SLOT_ROWS = 128
"""``--cg-moe-rows`` rounds the rows of a slot up to a multiple of this."""


@dataclass(frozen=True)
class Part:
    """A part of a layer.

    Attributes:
        name: what it is called.
        scope: which scope captures it; None if none can.
        split: numbers of parameters that tensor-parallel ranks share.
        whole: those that each of them has.
        experts: those of all experts.
        saved: bytes that the forward pass saves on a rank for the backward pass.
        outputs: bytes of what a graph that ends behind it hands to the eager part that follows.
    """

    name: str
    scope: str | None
    split: int = 0
    whole: int = 0
    experts: int = 0
    saved: int = 0
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
    """Sizes of one microbatch on one rank.

    Attributes:
        width: bytes of an activation's element.
        tensor: tensor-parallel ranks.
        tokens: tokens in what tensor parallelism splits.
        hidden: bytes of the hidden states between layers.
        norm: bytes of a norm's output that the layer after it saves.
        gated: 2 if an MLP multiplies two projections, else 1.
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

    def bytes_of(self, columns: int) -> int:
        """Bytes of an activation with so many columns, which tensor parallelism splits."""
        return self.tokens * columns * self.width // self.tensor

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


def layers_of(settings: Settings) -> tuple[Layer, ...]:
    """All layers of the model: the decoder's by number, then those of multi-token prediction.

    A layer's kind is Megatron's symbols of its parts, as in a hybrid pattern.
    """
    run, args, shape = settings.run, settings.args, Shape(settings)
    selection = LayerSelection.parse(settings.graph.cg_layers)
    kinds = [*decoder_symbols(run.hybrid_layer_pattern or "")]
    if run.hybrid_layer_pattern is None:
        # A layer spec is taken to change no kind of a layer.
        known = replace(run, custom_layers=False, num_layers=args.num_layers)
        attention = "+" if args.multi_latent_attention else "*"
        available = available_scopes(known) or ()
        kinds = [attention + ("E" if "moe" in scopes else "-") for scopes in available]
    decoder = []
    for number, kind in enumerate(kinds):
        scopes = selection.scopes(number, run.cuda_graph_modules)
        decoder.append(_layer(shape, f"{number}", kind, scopes))
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
    saved = shape.norm + shape.bytes_of(columns + normed)
    saved += shape.hidden * bool(args.hidden_dropout)
    yield Part("attention", "attn", split=args.hidden_size * columns, saved=saved)


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
    saved = shape.norm + shape.tokens * compressed * shape.width
    saved += shape.bytes_of(expanded + heads * args.v_head_dim)
    yield Part("attention", "attn", split=up, whole=down, saved=saved)


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
    saved = 0 if shape.run.recomputes("mlp") else shape.bytes_of((shape.gated + 1) * wide)
    saved += shape.norm + shape.hidden * bool(shape.args.hidden_dropout)
    split = shape.args.hidden_size * wide * (shape.gated + 1)
    yield Part("MLP", "mlp", split=split, saved=saved)


def _moe(shape: Shape) -> Iterator[Part]:
    args, run, width = shape.args, shape.run, shape.width
    hidden, count = args.hidden_size, args.num_experts
    choices = 5 * count * shape.hidden // (hidden * width)  # probabilities in fp32, and a map
    outputs = shape.hidden + choices
    yield Part("router", "moe_router", whole=hidden * count, saved=choices, outputs=outputs)
    if wide := args.moe_shared_expert_intermediate_size:
        kept = 0 if run.recomputes("shared_experts") else shape.bytes_of((shape.gated + 1) * wide)
        scope = "moe" if args.moe_shared_expert_overlap else "moe_router"
        size = hidden * wide * (shape.gated + 1)
        yield Part("shared expert", scope, split=size, saved=kept, outputs=shape.hidden)
    inner = args.moe_latent_size or hidden
    # It takes the place of the hidden states among the outputs.
    dispatched = shape.average_rows * shape.row_bytes - shape.hidden
    yield Part("token dispatch", "moe_preprocess", outputs=dispatched)
    wide = args.moe_ffn_hidden_size
    latent = 2 * hidden * args.moe_latent_size if args.moe_latent_size else 0
    columns = (shape.gated + (not run.recomputes("moe_act"))) * wide
    columns = inner + columns // args.expert_tensor_parallel_size
    saved = shape.norm + (0 if run.recomputes("moe") else shape.rows * columns * width)
    experts = count * inner * wide * (shape.gated + 1)
    yield Part("experts", "moe", whole=latent, experts=experts, saved=saved)


_KINDS = {
    "*": ("attention", _attention),
    "+": ("latent attention", _latent_attention),
    "M": ("Mamba mixer", _mamba),
    "-": ("MLP", _mlp),
    "E": ("MoE", _moe),
}
"""By Megatron's symbol in a hybrid pattern: what it is called, and what makes its parts."""
