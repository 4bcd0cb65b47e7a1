"""``--cg-layers``: which scopes are captured on which decoder layer. Pure functions.

Grammar: ``SCOPE:RANGE[,RANGE...]`` where RANGE is ``N``, ``N-M`` or ``N-``, indices from 0, both
ends included. A scope may be named more than once.
"""

from __future__ import annotations

import re
from collections.abc import Container, Iterable, Iterator, Sequence
from dataclasses import dataclass

from megatron_cg.arguments.schema import SCOPES, WHOLE_LAYER
from megatron_cg.errors import ConfigurationError, Violation

_RULE = "cg-layers"
_RANGE = re.compile(r"(?P<first>\d+)(?P<dash>-(?P<last>\d*))?", re.ASCII)
_EXAMPLE = "--cg-layers attn:0-23 moe_router:4- mlp:0-3,8"


@dataclass(frozen=True)
class LayerRange:
    """Layers ``first`` to ``last``, both included; ``last`` None means the last layer."""

    first: int
    last: int | None

    def __contains__(self, index: int) -> bool:
        return self.first <= index and (self.last is None or index <= self.last)

    def __str__(self) -> str:
        if self.last == self.first:
            return str(self.first)
        return f"{self.first}-{'' if self.last is None else self.last}"


@dataclass(frozen=True)
class LayerSelection:
    """The ranges of each scope in ``--cg-layers``, in the given order."""

    ranges: tuple[tuple[str, tuple[LayerRange, ...]], ...] = ()

    @classmethod
    def parse(cls, tokens: Sequence[str]) -> LayerSelection:
        """Parse the values of ``--cg-layers``; no values select every scope on every layer.

        Raises ConfigurationError with every malformed token and unknown scope at once.
        """
        selection, broken = read_tokens(tokens)
        if broken:
            raise ConfigurationError(broken)
        return selection

    def scopes(self, layer_index: int, num_layers: int, scopes: Sequence[str]) -> tuple[str, ...]:
        """The scopes among the run's ``scopes`` that are captured on one layer, in the same order.

        Args:
            layer_index: index of the layer in the decoder, from 0.
            num_layers: number of layers in the decoder.
            scopes: names from ``--cuda-graph-modules``. An empty list and the name ``layer`` both
                mean the whole layer; then the name ``layer`` is returned.

        Raises IndexError for a layer that is not in the decoder.
        """
        if not 0 <= layer_index < num_layers:
            raise IndexError(f"layer {layer_index} of a decoder with {num_layers} layers")
        named = dict(self.ranges)
        return tuple(
            scope
            for scope in tuple(scopes) or (WHOLE_LAYER,)
            if scope not in named or any(layer_index in layers for layers in named[scope])
        )

    def violations(
        self,
        scopes: Sequence[str],
        num_layers: int | None,
        available: Sequence[Container[str]] | None = None,
    ) -> tuple[Violation, ...]:
        """Every mismatch between this selection and a run's scopes and layers.

        Args:
            scopes: as for :meth:`scopes`.
            num_layers: number of layers in the decoder; None skips the checks that need it.
            available: the scopes that exist on each layer; None treats every layer as MoE.
        """
        run_scopes = tuple(scopes) or (WHOLE_LAYER,)
        broken = list(self._not_in_run(run_scopes))
        if num_layers is not None:
            broken += self._beyond_the_end(num_layers)
            broken += self._preprocess_without_router(run_scopes, num_layers, available)
        return tuple(broken)

    def _not_in_run(self, run_scopes: Sequence[str]) -> Iterator[Violation]:
        captured = (
            "whole layers, which 'layer' names"
            if run_scopes == (WHOLE_LAYER,)
            else f"--cuda-graph-modules {' '.join(run_scopes)}"
        )
        for scope, ranges in self.ranges:
            if scope not in run_scopes:
                yield Violation(
                    _RULE,
                    f"--cg-layers {_token(scope, ranges)}",
                    f"this run captures {captured}, so there is no {scope} to restrict",
                    f"name one of {', '.join(run_scopes)} in --cg-layers, or change "
                    "--cuda-graph-modules (without it whole layers are captured)",
                )

    def _beyond_the_end(self, num_layers: int) -> Iterator[Violation]:
        for scope, ranges in self.ranges:
            for layers in ranges:
                end = layers.first if layers.last is None else layers.last
                if end >= num_layers:
                    fixed = LayerRange(min(layers.first, num_layers - 1), None)
                    yield Violation(
                        _RULE,
                        f"--cg-layers {scope}:{layers}",
                        f"the model has {num_layers} layers, so the last index is "
                        f"{num_layers - 1} and there is no layer {end}",
                        f"type --cg-layers {scope}:{fixed} (an open range ends at the last layer)",
                    )

    def _preprocess_without_router(
        self,
        run_scopes: Sequence[str],
        num_layers: int,
        available: Sequence[Container[str]] | None,
    ) -> Iterator[Violation]:
        if "moe_preprocess" not in run_scopes or "moe_router" not in run_scopes:
            return
        for index in range(num_layers):
            active = self.scopes(index, num_layers, run_scopes)
            exists = available is None or "moe_preprocess" in available[index]
            if exists and "moe_preprocess" in active and "moe_router" not in active:
                router = dict(self.ranges)["moe_router"]
                yield Violation(
                    _RULE,
                    f"--cg-layers selects moe_preprocess without moe_router on layer {index}",
                    "Megatron captures moe_preprocess only as the continuation of the router's "
                    "graph",
                    f"type --cg-layers {_token('moe_router', router)} "
                    f"{_token('moe_preprocess', router)}",
                )
                return


def read_tokens(tokens: Iterable[str]) -> tuple[LayerSelection, tuple[Violation, ...]]:
    """The selection from the well-formed tokens, and a violation for each other token."""
    selected: dict[str, list[LayerRange]] = {}
    broken: list[Violation] = []
    known = (*SCOPES, WHOLE_LAYER)
    for token in tokens:
        scope, colon, texts = token.partition(":")
        if not colon or scope not in known:
            why = f"there is no scope '{scope}'; there are {', '.join(known)}"
            why = why if colon else "it has no colon between a scope and its layers"
            broken.append(_bad(token, why))
            continue
        ranges = selected.setdefault(scope, [])
        for text in texts.split(","):
            layers = _read_range(text)
            if isinstance(layers, str):
                broken.append(_bad(token, layers))
            else:
                ranges.append(layers)
    ranges_of = tuple((scope, tuple(ranges)) for scope, ranges in selected.items() if ranges)
    return LayerSelection(ranges_of), tuple(broken)


def _read_range(text: str) -> LayerRange | str:
    """The range, or the reason why ``text`` is not one."""
    match = _RANGE.fullmatch(text)
    if match is None:
        return f"'{text}' is not a layer index N, a range N-M or an open range N-"
    first = int(match["first"])
    last = int(match["last"]) if match["last"] else None if match["dash"] else first
    if last is not None and last < first:
        return f"range {text} is reversed: it ends before it begins, write {last}-{first}"
    return LayerRange(first, last)


def _bad(token: str, reason: str) -> Violation:
    return Violation(_RULE, f"--cg-layers {token}", reason, f"for example type {_EXAMPLE}")


def _token(scope: str, ranges: Iterable[LayerRange]) -> str:
    return f"{scope}:{','.join(map(str, ranges))}"
