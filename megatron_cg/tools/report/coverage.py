"""Summarizes what was graphed, by layer and scope, in readable rows. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from megatron_cg.arguments.schema import SCOPES, WHOLE_LAYER
from megatron_cg.telemetry.coverage_lines import NO_SUCH_PART, NOT_SELECTED
from megatron_cg.tools.report.story import Story

GRAPHED, LEFT_OUT = "in a graph", "left out of the selection"
EAGER, ABSENT = "eager", "no such scope"


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
        return [(_span(group[0].name, group[-1].name), group[0]) for group in groups]

    @property
    def rows(self) -> list[list[str]]:
        """For each group its name, class, scopes in a graph, and the others with the reason."""
        rows = []
        for name, layer in self.groups:
            eager = (f"{', '.join(scopes)}: {why}" for why, scopes in layer.reasons.items())
            graphed = ", ".join(layer.graphed)
            rows.append([name, layer.kind, graphed or "nothing", "; ".join(eager) or "nothing"])
        return rows

    def stretches(self, scope: str, kind: str, longest: int) -> list[tuple[int, int]]:
        """(first layer, count) of neighbouring layers of that kind, at most ``longest`` in one."""
        found: list[tuple[int, int]] = []
        for index, layer in enumerate(self.layers):
            if layer.kind_of(scope) != kind:
                continue
            first, count = found[-1] if found else (index, 0)
            if first + count == index and 0 < count < longest:
                found[-1] = (first, count + 1)
            else:
                found.append((index, 1))
        return found

    @property
    def text(self) -> str:
        """A summary in one sentence."""
        graphed = sum(bool(layer.graphed) for layer in self.layers)
        cells = Counter(layer.kind_of(scope) for layer in self.layers for scope in self.scopes)
        return (
            f"{graphed} of {len(self.layers)} layers have a graph; of their scopes that a graph "
            f"can hold, {cells[GRAPHED]} of {cells.total() - cells[ABSENT]} are in one."
        )


def read_coverage(story: Story) -> Coverage | None:
    """The coverage of the run's first rank, or None if none was recorded."""
    rows = story.captures[-1]["coverage"] if story.captures else ()
    layers = tuple(
        Layer(row["name"], row["kind"], tuple(row["graphed"]), row["eager"]) for row in rows
    )
    known = [*SCOPES, WHOLE_LAYER, *(scope for layer in layers for scope in layer.graphed)]
    scopes = tuple(
        scope
        for scope in dict.fromkeys(known)
        if any(layer.kind_of(scope) != ABSENT for layer in layers)
    )
    return Coverage(scopes, layers) if scopes else None


def _span(first: str, last: str) -> str:
    """``layers 0 to 3`` of the first name and the last."""
    if first == last:
        return first
    word, _, number = last.rpartition(" ")
    return f"{first} to {number if word and first.startswith(word) else last}"
