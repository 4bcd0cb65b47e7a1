"""The cases of ``rule_messages.txt``: one change to a run that keeps every rule, and what is said.

A line that is not indented has a rule and the change that breaks it: settings of Megatron, our
flags, variables and versions. ``kept`` stands for no rule. ``test_rules.py`` writes the others.
"""

import dataclasses
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_cg.arguments.schema import BACKENDS, Environment, GraphArguments, RunArguments
from megatron_cg.upstream.te import NOT_LOADED
from tests.unit.arguments.good_configuration import GOOD_ENVIRONMENT, GOOD_RUN

MESSAGES = Path(__file__).with_name("rule_messages.txt")
KEPT = "kept"


@dataclass(frozen=True)
class Case:
    rule: str
    change: dict[str, Any]

    def __str__(self) -> str:
        change = ", ".join(f"{name}={value!r}" for name, value in self.change.items())
        return f"{self.rule}: {change}".rstrip()

    def configured(self) -> tuple[RunArguments, GraphArguments, Environment]:
        ours = {name: v for name, v in self.change.items() if name.startswith("cg_")}
        versions = {name: self.change.get(name.replace("-", "_"), v) for name, v in SEEN.items()}
        variables = {name: v for name, v in self.change.items() if name.isupper()}
        found_in = {*ours, *variables, "lacks_device_counts", "without", "transformer_engine"}
        graph = GraphArguments(**ours)
        environment = Environment(
            versions={name: version for name, version in versions.items() if version is not None},
            variables=variables,
            backend=BACKENDS[graph.cg_backend],
            lacks_device_counts=self.change.get("lacks_device_counts", NOT_LOADED),
            without=self.change.get("without", ()),
        )
        others = {name: v for name, v in self.change.items() if name not in found_in}
        return dataclasses.replace(GOOD_RUN, **others), graph, environment


SEEN = GOOD_ENVIRONMENT.versions
LATER = ("moe_use_grouped_tensor", "megatron_fsdp_version")
"""Settings of megatron-core 0.20 that 0.19.2 lacks."""
LINES = [line.partition(":") for line in MESSAGES.read_text(encoding="utf-8").splitlines()]
ALL = [
    Case(rule, eval(f"dict({change})", {"nan": math.nan}))
    for rule, _, change in LINES
    if not rule.startswith(" ")
]
BROKEN = [case for case in ALL if case.rule != KEPT]
