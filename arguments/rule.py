"""A rule: one property that a configured run must not have, and what it says of it."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from megatron_cg.arguments.layers import LayerSelection, available_scopes, read_tokens
from megatron_cg.arguments.schema import WHOLE_LAYER, Environment, GraphArguments, RunArguments
from megatron_cg.errors import Violation, say


@dataclass(frozen=True)
class Configuration:
    """What rules read: a run, and what follows from it. Nothing else is read."""

    run: RunArguments = field(default_factory=RunArguments)
    graph: GraphArguments = field(default_factory=GraphArguments)
    environment: Environment = field(default_factory=Environment)

    @cached_property
    def selection(self) -> tuple[LayerSelection, tuple[Violation, ...]]:
        """What ``--cg-layers`` selects, and what of it is malformed."""
        return read_tokens(self.graph.cg_layers)

    @cached_property
    def layers(self) -> list[tuple[frozenset[str], frozenset[str]]] | None:
        """For each decoder layer the scopes that it has, and those of them that are captured.

        None if a layer spec, a heterogeneous config or Megatron alone knows the layers.
        """
        available = available_scopes(self.run)
        if available is None:
            return None
        selection, _ = self.selection
        return [
            (has, has.intersection(selection.scopes(index, self.run.cuda_graph_modules)))
            for index, has in enumerate(available)
        ]

    @property
    def captures_experts(self) -> bool:
        whole = any("moe" in has and WHOLE_LAYER in captured for has, captured in self.layers or ())
        return self.run.is_moe and (whole or "moe" in self.run.cuda_graph_modules)

    @property
    def counts_on_device(self) -> bool:
        return self.graph.cg_grouped_gemm != "te"


Facts = Mapping[str, object]


@dataclass(frozen=True)
class Rule:
    """A property that a run must not have.

    ``broken`` says whether a run has it, or gives the facts of each violation. The texts are
    formatted by :func:`say` with ``{run.<field>}``, ``{graph.<field>}`` and those facts. A rule
    with ``without_graphs`` applies to runs without layerwise graphs too.
    """

    name: str
    broken: Callable[[Configuration], bool | Sequence[Facts]]
    found: str
    reason: str
    remedy: str
    without_graphs: bool = False

    def __call__(self, given: Configuration) -> Iterator[Violation]:
        broken = self.broken(given)
        for facts in [{}] if broken is True else broken or ():
            values = {"run": given.run, "graph": given.graph, **facts}
            texts = (say(text, **values) for text in (self.found, self.reason, self.remedy))
            yield Violation(self.name, *texts)


WITHOUT_FIXED_SHAPES = "moe-without-drop-and-pad"
"""The rule that is broken where a model was built without dropless experts but captures them."""
