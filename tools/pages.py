"""MkDocs hooks: flags and rules are put into their page from the code when the site is built.

A line ``<!-- generated: NAME -->`` of a page becomes what :data:`GENERATORS` makes. ``docs/x.md``
in code becomes a link to that page.

Relied on: MkDocs 1.6, https://www.mkdocs.org/dev-guide/plugins/#events.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import Files
from mkdocs.structure.pages import Page

from megatron_cg.arguments.rule import Rule
from megatron_cg.arguments.schema import GraphArguments, flag_of
from megatron_cg.arguments.validation import RULES

_FLAG = re.compile(r"(?<![\w`-])(--[a-z][a-z0-9-]*)")
_FACT = re.compile(r"\{[^}]+\}")
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


def rules() -> str:
    """Every rule: what it refuses, and what to type instead. The error itself gives the reason."""
    return "\n".join(map(_rule, RULES))


def _rule(rule: Rule) -> str:
    found, remedy = (_in_code(_FACT.sub("…", text)) for text in (rule.found, rule.remedy))
    # The whole remedy may depend on the run.
    instead = f".<br>Instead: {remedy}" if remedy != "…" else ""
    return f"- **{rule.name}**: {found}{instead}."


def _in_code(text: str) -> str:
    """Text with its flags as code, and what Markdown would take for HTML kept as it is."""
    return _FLAG.sub(r"`\1`", text.replace("<", "&lt;"))


GENERATORS: dict[str, Callable[[], str]] = {
    "flags": our_flags,
    "rules": rules,
}


def on_page_markdown(markdown: str, *, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Put in what is generated, and let ``docs/x.md`` in code be a link to that page."""
    text = _MARKER.sub(lambda found: GENERATORS[found[1]](), markdown)
    known = {file.src_uri for file in files.documentation_pages()}

    def link(found: re.Match[str]) -> str:
        name = f"{found[1]}.md"
        return f"[{found[1]}]({name})" if name in known else found[0]

    return _PAGE_NAMED.sub(link, text)
