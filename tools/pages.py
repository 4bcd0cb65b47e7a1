"""MkDocs hooks: flags and rules are put into their page from the code when the site is built.

A line ``<!-- generated: NAME -->`` of a page becomes what :data:`GENERATORS` makes. ``docs/x.md``
in code becomes a link to that page.

Relied on: MkDocs 1.6, https://www.mkdocs.org/dev-guide/plugins/#events.
"""

from __future__ import annotations

import dataclasses
import inspect
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import Files
from mkdocs.structure.pages import Page

from megatron_cg.arguments.rule import Refusal
from megatron_cg.arguments.schema import VARIABLES, GraphArguments, RunArguments, flag_of
from megatron_cg.arguments.validation import RULES

ROOT = Path(__file__).parents[1]
_FLAG = re.compile(r"(?<![\w`-])(--[a-z][a-z0-9-]*)")
_FIELD = re.compile(r"\{run\.(\w+)\}")
_MARKER = re.compile(r"^<!-- generated: (\S+) -->$", re.MULTILINE)
_PAGE_NAMED = re.compile(r"`docs/([a-z_-]+)\.md`")


def our_flags() -> str:
    """A heading, usage, default and help text for each flag that this package adds."""
    parts: list[str] = []
    for field in dataclasses.fields(GraphArguments):
        options = field.metadata["argparse"]
        value = options.get("metavar") or "{" + ",".join(options.get("choices", ())) + "}"
        value += f" [{value} ...]" if options.get("nargs") == "+" else ""
        flag = flag_of(field.name)
        is_switch = options.get("action", "").startswith("store_")
        parts += [
            f"### `{flag}`",
            f"```text\n{flag if is_switch else f'{flag} {value}'}\n```",
            f"{_in_code(field.metadata['help'])} Default: {_default(field.default)}.",
        ]
    return "\n\n".join(parts)


def _default(value: object) -> str:
    if isinstance(value, bool):
        return "on" if value else "off"
    if value is None:
        return "not given"
    return "none" if value == () else f"`{value}`"


def settings() -> str:
    """Those settings of Megatron that the rules read."""
    lines = ["| Megatron's attribute | default | what it is |", "|---|---|---|"]
    for field in dataclasses.fields(RunArguments):
        value = field.default
        words = " ".join(map(str, value)) if isinstance(value, tuple) else str(value)
        default = "—" if value is None or not words else f"`{words}`"
        told = " ".join(_in_code(field.metadata["help"]).split()).replace("|", "\\|")
        lines.append(f"| `{field.name}` | {default} | {told} |")
    return "\n".join(lines)


def rules() -> str:
    """Every rule: what it refuses, why, and what to type instead."""
    return "\n".join(map(_rule, RULES))


def _rule(rule: Any) -> str:
    if isinstance(rule, Refusal):
        found = _in_code(_FIELD.sub("…", rule.found))
        reason, remedy = _in_code(rule.reason), _in_code(rule.remedy)
        return f"- **{rule.rule}**: {found}.<br>Because {reason}.<br>Instead: {remedy}."
    # A rule that says different things of different runs; its docstring says what it demands.
    name = rule.__name__.replace("_", "-")
    return f"- **{name}**: {_in_code(inspect.getdoc(rule) or '')}"


def variables() -> str:
    """The environment variables that the rules read."""
    return "\n".join(f"- `{name}`" for name in VARIABLES)


def measured() -> str:
    """The section of README.md with the figures."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    return text.partition("\n## Measured\n")[2].partition("\n## ")[0].strip()


def _in_code(text: str) -> str:
    """Text with its flags as code, and what Markdown would take for HTML kept as it is."""
    return _FLAG.sub(r"`\1`", text.replace("<", "&lt;"))


GENERATORS: dict[str, Callable[[], str]] = {
    "flags": our_flags,
    "settings": settings,
    "rules": rules,
    "variables": variables,
    "measured": measured,
}


def on_page_markdown(markdown: str, *, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Put in what is generated, and let ``docs/x.md`` in code be a link to that page."""
    text = _MARKER.sub(lambda found: GENERATORS[found[1]](), markdown)
    known = {file.src_uri for file in files.documentation_pages()}

    def link(found: re.Match[str]) -> str:
        name = f"{found[1]}.md"
        return f"[{found[1]}]({name})" if name in known else found[0]

    return _PAGE_NAMED.sub(link, text)
