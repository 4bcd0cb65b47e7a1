"""Counts of captures and replays, per session."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass


@dataclass
class Counters(Mapping[str, int]):
    """Counts of one session, in forward passes of a layer unless stated otherwise.

    A mapping from names to numbers, with the ``copy`` that ``wandb.log`` calls (wandb 0.31).
    """

    captured: int = 0
    """Graphs that capture made."""
    replayed: int = 0
    """Forward passes that were replayed."""
    eager: int = 0
    """Forward passes of a graphed layer that ran eagerly: in evaluation, after a mismatch, or in a
    step that is repeated; not those of a verification."""
    mismatched: int = 0
    """Times that a guard forbade a replay."""
    verified: int = 0
    """Replays, but for the first of each graph, that were compared with an eager pass, outputs and
    gradients."""
    outputs_only: int = 0
    """Replays whose outputs alone were compared: the memory that the unit's backward pass reads was
    not ready."""
    gradients_unstable: int = 0
    """Gradients that were not compared, because two eager passes gave different bits."""
    backwards: int = 0
    """Backward passes that were replayed."""
    repeated: int = 0
    """Steps that were repeated eagerly: a rank had more rows than its graphs have room for."""
    steps_verified: int = 0
    """Steps that were trained with graphs and once more eagerly, and compared."""
    steps_differed: int = 0
    """Those of them that had other numbers with graphs; the first one turns graphs off."""

    def count_unstable(self, gradients: int) -> None:
        """Count gradients that are not compared."""
        self.gradients_unstable += gradients

    def add(self, other: Counters) -> None:
        for name, value in other.as_dict().items():
            setattr(self, name, getattr(self, name) + value)

    def as_dict(self) -> dict[str, int]:
        return asdict(self)

    copy = as_dict

    def __getitem__(self, name: str) -> int:
        return self.as_dict()[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.as_dict())

    def __len__(self) -> int:
        return len(self.as_dict())
