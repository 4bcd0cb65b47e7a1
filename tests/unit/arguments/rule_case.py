"""What a case of a broken rule is, and the settings that many of them have."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Case:
    """What breaks ``rule``, alone, and the words its violation must say."""

    rule: str
    change: dict[str, Any] = field(default_factory=dict)
    found: str = ""
    reason: str = ""
    remedy: str = ""
    layers: tuple[str, ...] = ()
    graph: dict[str, Any] = field(default_factory=dict)
    variables: dict[str, str] = field(default_factory=dict)
    versions: dict[str, str | None] = field(default_factory=dict)

    def __str__(self) -> str:
        changed = {**self.change, **self.variables, **self.versions}
        flags = (str(value) for value in self.graph.values())
        return f"{self.rule}:{','.join([*changed, *self.layers, *flags])}"


DROP_AND_PAD: dict[str, Any] = {
    "moe_expert_capacity_factor": 1.0,
    "moe_pad_expert_input_to_capacity": True,
}


def modules(*names: str, **others: Any) -> dict[str, Any]:
    """These scopes, and other changes."""
    return {"cuda_graph_modules": names, **others}
