"""Summarizes what was graphed, by layer and scope, in readable rows. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from megatron_cg.arguments.schema import SCOPES, WHOLE_LAYER
from megatron_cg.telemetry.coverage_lines import NO_SUCH_PART, NOT_SELECTED
from megatron_cg.tools.report.story import Story

GRAPHED, LEFT_OUT, EAGER, ABSENT = (
    "in a graph",
    "left out of the selection",
    "eager",
    "no such scope",
)


@dataclass(frozen=True)
class Layer:
    """One layer; ``eager`` has the reason for each scope that is not in ``graphed``."""

    name: str
    kind: str
    graphed: tuple[str, ...]
    eager: Mapping[str, str]

    def kind_of(self, scope: str) -> str:
        """Whether the scope is in a graph and, if not, why."""
        if scope in self.graphed:
            return GRAPHED
        reason = self.eager.get(scope, NO_SUCH_PART)
        return {NO_SUCH_PART: ABSENT, NOT_SELECTED: LEFT_OUT}.get(reason, EAGER)

    @property
    def reasons(self) -> dict[str, list[str]]:
        """The scopes of the layer that no graph contains, by reason."""
        found: dict[str, list[str]] = {}
        for scope, reason in self.eager.items():
            if reason != NO_SUCH_PART:
                found.setdefault(reason, []).append(scope)
        return found


@dataclass(frozen=True)
class Coverage:
    """The last capture that produced graphs."""

    scopes: tuple[str, ...]
    """The scopes of any layer, in Megatron's order."""
    layers: tuple[Layer, ...]

    @property
    def groups(self) -> list[tuple[str, Layer]]:
        """Groups of equal neighbouring layers, each with its name; ``layers 0 to 3``."""

        def alike(layer: Layer) -> Any:
            return layer.kind, layer.graphed, sorted(layer.eager.items())

        groups = [list(group) for _, group in groupby(self.layers, alike)]
        return [(_span(group), group[0]) for group in groups]

    @property
    def rows(self) -> list[list[str]]:
        """For each group its name, class, scopes in a graph, and the others with the reason."""
        return [
            [
                name,
                layer.kind,
                ", ".join(layer.graphed) or "nothing",
                "; ".join(f"{', '.join(scopes)}: {why}" for why, scopes in layer.reasons.items())
                or "nothing",
            ]
            for name, layer in self.groups
        ]

    def stretches(self, scope: str, kind: str, longest: int) -> list[tuple[int, int]]:
        """(first layer, count) of neighbouring layers of that kind, at most ``longest`` in one."""
        found: list[tuple[int, int]] = []
        for index, layer in enumerate(self.layers):
            if layer.kind_of(scope) != kind:
                continue
            first, count = found[-1] if found else (0, 0)
            if found and first + count == index and count < longest:
                found[-1] = (first, count + 1)
            else:
                found.append((index, 1))
        return found

    @property
    def text(self) -> str:
        """A summary in one sentence."""
        graphed = [layer for layer in self.layers if layer.graphed]
        cells = [(layer, scope) for layer in self.layers for scope in self.scopes]
        there = [pair for pair in cells if pair[0].kind_of(pair[1]) != ABSENT]
        inside = [pair for pair in there if pair[0].kind_of(pair[1]) == GRAPHED]
        return (
            f"{len(graphed)} of {len(self.layers)} layers have a graph; of their scopes that a "
            f"graph can hold, {len(inside)} of {len(there)} are in one."
        )


def read_coverage(story: Story) -> Coverage | None:
    """The coverage of the run's first rank, or None if none was recorded."""
    captures = story.captures
    rows: Sequence[Mapping[str, Any]] = captures[-1]["coverage"] if captures else ()
    layers = tuple(
        Layer(row["name"], row["kind"], tuple(row["graphed"]), row["eager"]) for row in rows
    )
    known = [*SCOPES, WHOLE_LAYER]
    known += [scope for layer in layers for scope in layer.graphed if scope not in known]
    scopes = tuple(
        scope
        for scope in dict.fromkeys(known)
        if any(layer.kind_of(scope) != ABSENT for layer in layers)
    )
    return Coverage(scopes, layers) if layers and scopes else None


def _span(layers: Sequence[Layer]) -> str:
    first, last = layers[0].name, layers[-1].name
    if len(layers) == 1:
        return first
    word, _, number = last.rpartition(" ")
    return f"{first} to {number}" if word and first.startswith(word) else f"{first} to {last}"
