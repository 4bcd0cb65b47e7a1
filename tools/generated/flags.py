"""The page of flags and rules, from ``megatron_cg.arguments``."""

from __future__ import annotations

import dataclasses
import inspect
import re
from typing import Any

from megatron_cg.arguments.rule import Refusal
from megatron_cg.arguments.schema import VARIABLES, GraphArguments, RunArguments, flag_of
from megatron_cg.arguments.validation import RULES
from tools.generated.tables import code, table

_FLAG = re.compile(r"(?<![\w`-])(--[a-z][a-z0-9-]*)")
_FIELD = re.compile(r"\{run\.(\w+)\}")


def our_flags() -> str:
    """A heading, usage, default and help text for each flag that this package adds."""
    parts: list[str] = []
    for field in dataclasses.fields(GraphArguments):
        options = field.metadata["argparse"]
        parts += [
            f"### `{flag_of(field.name)}`",
            f"```text\n{_usage(field, options)}\n```",
            f"{in_code(field.metadata['help'])} Default: {default(field.default)}.",
        ]
    return "\n\n".join(parts)


def _usage(field: dataclasses.Field[Any], options: dict[str, Any]) -> str:
    if options.get("action", "").startswith("store_"):
        return flag_of(field.name)
    value = options.get("metavar") or "{" + ",".join(map(str, options.get("choices", ()))) + "}"
    more = f" [{value} ...]" if options.get("nargs") == "+" else ""
    return f"{flag_of(field.name)} {value}{more}"


def default(value: object) -> str:
    """A default as a user would say it."""
    if isinstance(value, bool):
        return "on" if value else "off"
    if value is None:
        return "not given"
    return "none" if value == () else f"`{value}`"


def settings() -> str:
    """Those settings of Megatron that the rules read."""
    return table(
        ("Megatron's attribute", "default", "what it is"),
        (
            (code(field.name), code(field.default), in_code(field.metadata["help"]))
            for field in dataclasses.fields(RunArguments)
        ),
    )


def rules() -> str:
    """Every rule: what it refuses, why, and what to type instead."""
    return "\n".join(map(_rule, RULES))


def _rule(rule: Any) -> str:
    if isinstance(rule, Refusal):
        found = in_code(_FIELD.sub("…", rule.found))
        reason, remedy = in_code(rule.reason), in_code(rule.remedy)
        return f"- **{rule.rule}**: {found}.<br>Because {reason}.<br>Instead: {remedy}."
    # A rule that says different things of different runs; its docstring says what it demands.
    name = rule.__name__.replace("_", "-")
    return f"- **{name}**: {in_code(inspect.getdoc(rule) or '')}"


def variables() -> str:
    """The environment variables that the rules read."""
    return "\n".join(f"- `{name}`" for name in VARIABLES)


def in_code(text: str) -> str:
    """Text with its flags as code, and what Markdown would take for HTML kept as it is."""
    return _FLAG.sub(r"`\1`", text.replace("<", "&lt;"))
