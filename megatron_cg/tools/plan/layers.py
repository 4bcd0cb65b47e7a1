"""The layers of a run's model by its flags: their parts, and which of them graphs hold.

A part has the parameters and the saved activations that ``memory.py`` adds up. Sizes follow
megatron-core 0.19.2 with Transformer Engine's modules; a test compares them with recorded runs.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from megatron_cg.arguments import RunArguments
from megatron_cg.arguments.layers import LayerSelection
from megatron_cg.arguments.layout import available_scopes, decoder_symbols
from megatron_cg.arguments.schema import WHOLE_LAYER, prediction_is_repeated
from megatron_cg.tools.plan.settings import Settings

_OF_SYMBOL = {
    **dict.fromkeys("*GD", ("attention",)),
    "+": ("latent attention",),
    "M": ("Mamba mixer",),
    "-": ("MLP",),
    "E": ("MoE",),
}
_SLOT_ROWS = 128
"""``--cg-moe-rows`` rounds the rows of a slot up to a multiple of this."""


@dataclass(frozen=True)
class Part:
    """A part of a layer on one rank: numbers of parameters, and bytes.

    Attributes:
        name: what it is called.
        scope: which scope captures it; None if none can.
        weights: parameters of this rank before sharding, without those of experts.
        experts: parameters of this rank's experts.
        all: parameters on all ranks together.
        saved: bytes that the forward pass saves for the backward pass.
        outputs: bytes of what a graph that ends behind it hands to the eager part that follows.
        rows: bytes of the rows that its experts receive; they size the workspace.
        used: parameters that one token uses.
    """

    name: str
    scope: str | None
    weights: int = 0
    experts: int = 0
    all: int = 0
    saved: int = 0
    outputs: int = 0
    rows: int = 0
    used: int = 0


@dataclass(frozen=True)
class Layer:
    """A layer with its parts; ``captured`` are those in its graph, ``eager`` are (name, reason)."""

    name: str
    kind: str
    parts: tuple[Part, ...]
    scopes: tuple[str, ...] = ()
    captured: tuple[Part, ...] = ()
    eager: tuple[tuple[str, str], ...] = ()

    @property
    def rest(self) -> tuple[Part, ...]:
        """The parts that are not captured."""
        return tuple(part for part in self.parts if part not in self.captured)


class Shape:
    """Sizes of one microbatch on one rank.

    Attributes:
        width: bytes of an activation's element.
        tensor: tensor-parallel ranks.
        tokens: tokens in what tensor parallelism splits.
        hidden: bytes of the hidden states between layers.
        norm: bytes of a norm's output that the layer after it saves.
    """

    def __init__(self, settings: Settings) -> None:
        self.args, self.run, self.graph = settings.args, settings.run, settings.graph
        args = self.args
        self.width = 2 if self.run.bf16 or self.run.fp16 else 4
        self.tensor = int(args.tensor_model_parallel_size)
        tokens = args.micro_batch_size * args.seq_length // args.context_parallel_size
        self.tokens = int(tokens)
        split = self.tensor if args.sequence_parallel else 1
        self.hidden = int(self.tokens * args.hidden_size * self.width // split)
        self.norm = 0 if self.recomputes("layernorm") else self.hidden

    def recomputes(self, module: str) -> bool:
        """Whether selective recompute frees what this module saves."""
        run = self.run
        return run.recompute_granularity == "selective" and module in run.recompute_modules


def layers_of(settings: Settings) -> tuple[Layer, ...]:
    """All layers of the model: the decoder's by number, then those of multi-token prediction."""
    run, shape = settings.run, Shape(settings)
    selection = LayerSelection.parse(settings.graph.cg_layers)
    kinds = _kinds(settings.args, run)
    parts = {kind: tuple(_parts(shape, kind)) for kind in dict.fromkeys(kinds)}
    found = []
    for number, kind in enumerate(kinds):
        scopes = selection.scopes(number, len(kinds), run.cuda_graph_modules)
        found.append(_captured(f"{number}", kind, parts[kind], scopes, run))
    return (*found, *_predictions(shape, kinds[-1]))


def _predictions(shape: Shape, last: tuple[str, ...]) -> Iterator[Layer]:
    """Layers of multi-token prediction: a projection, and a layer like the decoder's last."""
    args, run = shape.args, shape.run
    kind, why = last, ""
    if run.hybrid_layer_pattern is not None:
        symbols = run.hybrid_layer_pattern.partition("/")[2].partition("/")[0]
        kind = tuple(name for symbol in symbols for name in _OF_SYMBOL.get(symbol, ()))
        why = "Megatron captures no MTP layer of a hybrid model"
    count = args.mtp_num_layers or 0
    if prediction_is_repeated(run):
        why, count = f"it runs {count} times before its first backward pass", 1
    size = 2 * args.hidden_size**2 // shape.tensor
    joined = Part("projection", None, size, 0, 2 * args.hidden_size**2, 3 * shape.hidden)
    for number in range(count):
        parts = tuple(_parts(shape, kind))
        layer = _captured(f"MTP {number}", kind, parts, run.scope_names, run)
        if why:
            eager = tuple((part.name, why) for part in parts)
            layer = replace(layer, scopes=(), captured=(), eager=eager)
        yield replace(layer, parts=(*parts, joined))


def _kinds(args: Any, run: RunArguments) -> list[tuple[str, ...]]:
    if run.hybrid_layer_pattern is not None:
        return [_OF_SYMBOL.get(s, ("MLP",)) for s in decoder_symbols(run.hybrid_layer_pattern)]
    # A layer spec is taken to change no kind of a layer.
    available = available_scopes(replace(run, custom_layers=False, num_layers=args.num_layers))
    attention = "latent attention" if args.multi_latent_attention else "attention"
    return [(attention, "MoE" if "moe" in has else "MLP") for has in available or ()]


def _captured(
    name: str,
    kind: Sequence[str],
    parts: tuple[Part, ...],
    active: Sequence[str],
    run: RunArguments,
) -> Layer:
    """The layer with what its graph holds, and why not the rest."""
    scopes = set(active) if run.wants_graphs else set()
    inside = {"moe_router", "moe_preprocess"} if "moe" in scopes else set()
    whole = WHOLE_LAYER in scopes
    captured = tuple(p for p in parts if whole or p.scope in scopes | inside)
    eager = tuple((part.name, _reason(part, run)) for part in parts if part not in captured)
    exist = {part.scope for part in parts}
    used = tuple(scope for scope in active if captured and (whole or scope in exist))
    return Layer(name, " + ".join(kind), parts, used, captured, eager)


def _reason(part: Part, run: RunArguments) -> str:
    asked = WHOLE_LAYER if run.is_whole_layer else part.scope
    if not run.wants_graphs:
        return "the run asks for no graphs"
    if asked in run.scope_names:
        return f"--cg-layers leaves {asked} out"
    if part.name == "experts":
        return (
            "tokens per expert differ from step to step; moe captures them with --cg-grouped-gemm "
            "torch, or if each expert drops and pads to a capacity"
        )
    if part.name == "shared expert" and run.moe_shared_expert_overlap:
        return "it runs beside the exchange of tokens; moe captures both"
    if part.name == "token dispatch":
        return "moe_preprocess captures its counting of tokens; its communication stays eager"
    return f"{part.scope} is not in --cuda-graph-modules"


def _parts(shape: Shape, kind: Sequence[str]) -> Iterator[Part]:
    makers = {
        "attention": _attention,
        "latent attention": _latent_attention,
        "Mamba mixer": _mamba,
        "MLP": _mlp,
        "MoE": _moe,
    }
    for name in kind:
        yield from makers[name](shape)


def _attention(shape: Shape) -> Iterator[Part]:
    args = shape.args
    queries = args.num_attention_heads * args.kv_channels
    groups = args.num_query_groups if args.group_query_attention else args.num_attention_heads
    keys = groups * args.kv_channels
    hidden = args.hidden_size
    gate = queries if args.attention_output_gate else 0
    biases = (queries + 2 * keys) * args.add_qkv_bias + hidden * args.add_bias_linear
    size = hidden * (2 * queries + 2 * keys + gate) + hidden + biases
    # Queries, keys and values behind the rotation, and the output; before a norm, too.
    rows = 2 * queries + 2 * keys + gate + (queries + keys) * bool(args.qk_layernorm)
    saved = shape.norm + shape.tokens * rows * shape.width // shape.tensor
    saved += shape.tokens * args.num_attention_heads * 4 // shape.tensor
    saved += shape.hidden * bool(args.hidden_dropout)
    weights = size // shape.tensor
    yield Part("attention", "attn", weights, 0, size, saved, used=weights)


def _latent_attention(shape: Shape) -> Iterator[Part]:
    args = shape.args
    heads, hidden = args.num_attention_heads, args.hidden_size
    query = args.qk_head_dim + args.qk_pos_emb_head_dim
    low = args.kv_lora_rank
    down = hidden * (low + args.qk_pos_emb_head_dim)
    up = low * heads * (args.qk_head_dim + args.v_head_dim) + heads * args.v_head_dim * hidden
    if args.q_lora_rank:
        down += hidden * args.q_lora_rank
        up += args.q_lora_rank * heads * query
    else:
        up += hidden * heads * query
    compressed = 2 * (args.q_lora_rank or 0) + 2 * low + args.qk_pos_emb_head_dim
    expanded = heads * (2 * query + args.v_head_dim)
    if shape.recomputes("mla_up_proj"):
        expanded = 0
    rows = (expanded + heads * args.v_head_dim) // shape.tensor
    saved = shape.norm + shape.tokens * (compressed + rows) * shape.width
    saved += shape.tokens * heads * 4 // shape.tensor
    # The projections to low rank are not split.
    weights = down + up // shape.tensor + hidden
    yield Part("attention", "attn", weights, 0, down + up + hidden, saved, used=weights)


def _mamba(shape: Shape) -> Iterator[Part]:
    args, split = shape.args, shape.tensor
    heads = args.mamba_num_heads or 2 * args.hidden_size // args.mamba_head_dim
    inner = heads * args.mamba_head_dim
    states = 2 * args.mamba_num_groups * args.mamba_state_dim
    wide = 2 * inner + states + heads
    size = args.hidden_size * (wide + inner + 1) + (inner + states) * 5 + inner + 3 * heads
    chunks = shape.tokens // 128 * heads * args.mamba_head_dim * args.mamba_state_dim * 3
    rows = wide + inner + states + 2 * inner
    saved = shape.norm + (shape.tokens * rows * shape.width + chunks) // split
    yield Part("Mamba mixer", "mamba", size // split, 0, size, saved, used=size // split)


def _mlp(shape: Shape) -> Iterator[Part]:
    args = shape.args
    size, saved = _feed_forward(shape, args.ffn_hidden_size)
    size += args.hidden_size
    if shape.recomputes("mlp"):
        saved = 0
    saved += shape.norm + shape.hidden * bool(args.hidden_dropout)
    weights = size // shape.tensor
    yield Part("MLP", "mlp", weights, 0, size, saved, used=weights)


def _feed_forward(shape: Shape, wide: int) -> tuple[int, int]:
    """Parameters, and bytes that it saves beside its input."""
    args = shape.args
    inputs = 2 if args.swiglu or args.quick_geglu else 1
    biases = (inputs * wide + args.hidden_size) * args.add_bias_linear
    rows = (inputs + 1) * wide
    size = args.hidden_size * wide * (inputs + 1) + biases
    return size, shape.tokens * rows * shape.width // shape.tensor


def _moe(shape: Shape) -> Iterator[Part]:
    args = shape.args
    hidden, count = args.hidden_size, args.num_experts
    router = hidden * count + hidden
    choices = shape.hidden * (4 * count + count) // (hidden * shape.width)
    outputs = shape.hidden + choices
    yield Part("router", "moe_router", router, 0, router, choices, outputs, used=router)
    if args.moe_shared_expert_intermediate_size:
        size, kept = _feed_forward(shape, args.moe_shared_expert_intermediate_size)
        kept = 0 if shape.recomputes("shared_experts") else kept
        scope = "moe" if shape.run.moe_shared_expert_overlap else "moe_router"
        weights = size // shape.tensor
        yield Part("shared expert", scope, weights, 0, size, kept, shape.hidden, used=weights)
    yield from _experts(shape)


def _experts(shape: Shape) -> Iterator[Part]:
    args, run = shape.args, shape.run
    split, ranks = args.expert_tensor_parallel_size, args.expert_model_parallel_size
    inputs = 2 if args.swiglu or args.quick_geglu else 1
    inner = args.moe_latent_size or args.hidden_size
    one = inner * args.moe_ffn_hidden_size * (inputs + 1)
    one += (inputs * args.moe_ffn_hidden_size + inner) * args.add_bias_linear
    latent = 2 * args.hidden_size * args.moe_latent_size if args.moe_latent_size else 0
    local = args.num_experts // ranks
    average = _rows(shape, local, bounded=False)
    captured = shape.graph.cg_grouped_gemm == "torch" and run.wants_graphs
    captured = captured and ("moe" in run.cuda_graph_modules or run.is_whole_layer)
    rows = _rows(shape, local, bounded=True) if captured else average
    activation = 0 if shape.recomputes("moe_act") else args.moe_ffn_hidden_size
    each = inner + (inputs * args.moe_ffn_hidden_size + activation) // split
    saved = shape.norm + (0 if shape.recomputes("moe") else rows * each * shape.width)
    size = one * local // split
    received = rows * inner * shape.width
    dispatched = average * inner * shape.width
    yield Part("token dispatch", "moe_preprocess", outputs=dispatched)
    yield Part(
        "experts",
        "moe",
        latent,
        size,
        one * args.num_experts + latent,
        saved,
        rows=received,
        used=one * args.moe_router_topk // split + latent,
    )


def _rows(shape: Shape, local: int, *, bounded: bool) -> int:
    """Rows that the experts of a rank compute: on average, or as many as a graph has room for."""
    args, ranks = shape.args, shape.args.expert_model_parallel_size
    tokens = shape.tokens
    if args.sequence_parallel and args.expert_tensor_parallel_size < shape.tensor:
        tokens //= shape.tensor
    average = tokens * args.moe_router_topk
    if shape.run.drops_and_pads:
        return int(average * args.moe_expert_capacity_factor)
    if not bounded or ranks == 1:
        return int(average)
    slot = tokens * min(args.moe_router_topk, local)
    if shape.graph.cg_moe_rows is not None:
        most = -(-int(shape.graph.cg_moe_rows * average / ranks) // _SLOT_ROWS) * _SLOT_ROWS
        slot = min(slot, most)
    return int(slot * ranks)
