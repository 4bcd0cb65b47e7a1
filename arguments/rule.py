"""Defines a rule: a pure function from a configured run to the violations in it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from megatron_cg.arguments.schema import Environment, GraphArguments, RunArguments
from megatron_cg.errors import Violation

Rule = Callable[[RunArguments, GraphArguments, Environment], Iterable[Violation]]
"""Yields nothing when the rule holds. Reads only its arguments."""


@dataclass(frozen=True)
class Refusal:
    """A :data:`Rule` on one property of the run; ``{run.<field>}`` in ``found`` is formatted.

    ``where`` says which runs it is about.
    """

    rule: str
    broken: Callable[[RunArguments], bool]
    found: str
    reason: str
    remedy: str
    where: Callable[[RunArguments, GraphArguments], bool] = lambda _run, _graph: True

    def __call__(
        self, run: RunArguments, graph: GraphArguments, environment: Environment
    ) -> Iterator[Violation]:
        """The violation, if the run breaks this rule."""
        if self.where(run, graph) and self.broken(run):
            yield Violation(self.rule, self.found.format(run=run), self.reason, self.remedy)
