"""Which scopes exist on each decoder layer, and ``--cg-layers``: which of them are captured. Pure.

Scopes follow megatron-core 0.19.2: of GPT models ``get_gpt_decoder_layer_specs``
(``moe_layer_freq``), of hybrid models ``hybrid_layer_allocation.Symbols``, and
``cuda_graphs._layer_is_graphable``.
"""

import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from megatron_cg.arguments.schema import SCOPES, WHOLE_LAYER, RunArguments
from megatron_cg.errors import Violation, say

_RULE = "cg-layers"
_RANGE = re.compile(r"(?P<first>\d+)(?P<dash>-(?P<last>\d*))?", re.ASCII)
_KNOWN = (*SCOPES, WHOLE_LAYER)
_OPEN = sys.maxsize
"""Where an open range stops."""
_GRAMMAR = (
    "it is not SCOPE:RANGE[,RANGE...], where RANGE is a layer index N, a range N-M up to M or an "
    f"open range N-, and SCOPE one of {', '.join(_KNOWN)}"
)
_CLOSED = "{type:--cg-layers {fixed}} (an open range ends at the last layer)"
_TOKEN = "{flag:--cg-layers {token}}"
_EXAMPLE = "for example {type:--cg-layers attn:0-23 moe_router:4- mlp:0-3,8}"
_ATTENTION = frozenset({"attn"})
_MOE = frozenset({"moe", "moe_router", "moe_preprocess"})
_DENSE_MLP = frozenset({"mlp"})
_WHOLE = frozenset({WHOLE_LAYER})
_HYBRID = {
    "M": frozenset({"mamba"}),
    "G": _ATTENTION,
    "*": _ATTENTION,
    "D": _ATTENTION,
    "+": _ATTENTION,
    "-": _DENSE_MLP,
    "E": _MOE,
}


def _text(layers: range) -> str:
    if layers.stop == _OPEN:
        return f"{layers.start}-"
    return f"{layers.start}-{layers[-1]}" if layers[1:] else str(layers.start)


@dataclass(frozen=True)
class LayerSelection:
    """The ranges of each scope in ``--cg-layers``, in the given order; none select all layers."""

    ranges: Mapping[str, Sequence[range]] = field(default_factory=dict)

    def scopes(self, layer_index: int, scopes: Sequence[str]) -> tuple[str, ...]:
        """The scopes among the run's ``scopes`` that are captured on one layer, in the same order.

        Megatron captures ``moe_preprocess`` only as the continuation of the router's graph, so it
        is captured only on layers with ``moe_router``.
        Layers of the decoder count from 0. No scope, and the name ``layer``, both mean the whole
        layer; then the name ``layer`` is returned.
        """
        chosen = [
            scope
            for scope in tuple(scopes) or (WHOLE_LAYER,)
            if any(layer_index in layers for layers in self.ranges.get(scope, [range(_OPEN)]))
        ]
        if "moe_router" not in chosen and "moe_preprocess" in chosen:
            chosen.remove("moe_preprocess")
        return tuple(chosen)

    def violations(self, scopes: Sequence[str], num_layers: int | None) -> Iterator[Violation]:
        """Every mismatch between this selection and a run's scopes and layers.

        ``num_layers`` is that of the decoder; None skips the checks that need it.
        """
        run_scopes = tuple(scopes) or (WHOLE_LAYER,)
        captured = "whole layers, which 'layer' names"
        if run_scopes != (WHOLE_LAYER,):
            captured = say("{flag:--cuda-graph-modules {scopes}}", scopes=" ".join(run_scopes))
        for scope, ranges in self.ranges.items():
            if scope not in run_scopes:
                yield Violation(
                    _RULE,
                    say(_TOKEN, token=f"{scope}:{','.join(map(_text, ranges))}"),
                    f"this run captures {captured}, so there is no {scope} to restrict",
                    say(
                        "name one of {scopes} in {flag:--cg-layers}, or change "
                        "{flag:--cuda-graph-modules} (without it whole layers are captured)",
                        scopes=", ".join(run_scopes),
                    ),
                )
            for layers in ranges:
                end = layers.start if layers.stop == _OPEN else layers[-1]
                if num_layers is not None and end >= num_layers:
                    fixed = f"{scope}:{min(layers.start, num_layers - 1)}-"
                    yield Violation(
                        _RULE,
                        say(_TOKEN, token=f"{scope}:{_text(layers)}"),
                        f"the model has {num_layers} layers, so the last index is "
                        f"{num_layers - 1} and there is no layer {end}",
                        say(_CLOSED, fixed=fixed),
                    )


def read_tokens(tokens: Iterable[str]) -> tuple[LayerSelection, tuple[Violation, ...]]:
    """The selection from well-formed tokens, also several of one scope; a violation for others."""
    selected: dict[str, list[range]] = {}
    broken: list[Violation] = []
    for token in tokens:
        scope, _, texts = token.partition(":")
        ranges = [_read_range(text) for text in texts.split(",")]
        if scope in _KNOWN and all(ranges):
            selected.setdefault(scope, []).extend(ranges)
        else:
            broken.append(Violation(_RULE, say(_TOKEN, token=token), _GRAMMAR, say(_EXAMPLE)))
    return LayerSelection(selected), tuple(broken)


def _read_range(text: str) -> range:
    """Empty if the text is not well formed."""
    match = _RANGE.fullmatch(text)
    if match is None:
        return range(0)
    first = int(match["first"])
    last = int(match["last"]) if match["last"] else _OPEN - 1 if match["dash"] else first
    return range(first, last + 1)


def decoder_symbols(pattern: str) -> str:
    """The decoder's letters of a hybrid pattern, without pipeline bars and MTP layers."""
    return pattern.split("/", maxsplit=1)[0].replace("|", "")


def available_scopes(run: RunArguments) -> tuple[frozenset[str], ...] | None:
    """The scopes that each decoder layer could have, or None if they cannot be known.

    They cannot be known if a layer spec or a heterogeneous config decides, if the number of layers
    is not given, or if Megatron does not accept the pattern (it reports that itself).
    """
    if run.hybrid_layer_pattern is not None:
        symbols = decoder_symbols(run.hybrid_layer_pattern)
        if any(symbol not in _HYBRID for symbol in symbols):
            return None
        return tuple(_HYBRID[symbol] | _WHOLE for symbol in symbols)
    if run.custom_layers or run.num_layers is None:
        return None
    experts = run.moe_layer_freq if run.num_experts else (0,) * run.num_layers
    if isinstance(experts, int) and experts > 0:
        experts = tuple(n % experts == 0 for n in range(run.num_layers))
    if isinstance(experts, int) or len(experts) != run.num_layers:
        return None
    return tuple(_ATTENTION | (_MOE if has_them else _DENSE_MLP) | _WHOLE for has_them in experts)
