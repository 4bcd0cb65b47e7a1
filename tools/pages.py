"""MkDocs hooks: what code and tests say is put into the pages when the site is built.

A line ``<!-- generated: NAME -->`` of a page becomes what :data:`GENERATORS` makes. ``docs/x.md``
in code becomes a link to that page.

Relied on: MkDocs 1.6, https://www.mkdocs.org/dev-guide/plugins/#events.
"""

from __future__ import annotations

import ast
import dataclasses
import re
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from importlib import import_module
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import Files
from mkdocs.structure.pages import Page

from megatron_cg.arguments.rule import Rule
from megatron_cg.arguments.rules import RULES
from megatron_cg.arguments.schema import GraphArguments, flag_of

_FLAG = re.compile(r"(?<![\w`-])(--[a-z][a-z0-9-]*)")
_SAID = re.compile(r"^    \[([\w-]+)\] (.+)$", re.MULTILINE)
_MARKER = re.compile(r"^<!-- generated: (\S+) -->$", re.MULTILINE)
_PAGE_NAMED = re.compile(r"`docs/([a-z_-]+)\.md`")
_NAMES = re.compile(r"\b(fsdp|gpu|nccl)\b")
_ROOT = Path(__file__).resolve().parents[1]
_MESSAGES = _ROOT / "tests/unit/arguments/rule_messages.txt"
"""What each rule says of runs that break it."""


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
    said: dict[str, dict[str, str]] = defaultdict(dict)
    for name, message in _SAID.findall(_MESSAGES.read_text(encoding="utf-8")):
        found, _, remedy = message.rpartition(" Remedy: ")
        said[name].setdefault(found.partition(": ")[0], remedy.removesuffix("."))
    return "\n".join(_rule(rule, said[rule.name]) for rule in RULES)


def _rule(rule: Rule, said: Mapping[str, str]) -> str:
    """By the messages of tests."""
    shown = [f"{_in_code(found)}.<br>Instead: {_in_code(said[found])}." for found in said]
    if len(shown) == 1:
        return f"- **{rule.name}**: {shown[0]}"
    return "\n".join([f"- **{rule.name}**:", *(f"    - {case}" for case in shown)])


def _in_code(text: str) -> str:
    """Text with its flags as code, and what Markdown would take for HTML kept as it is."""
    return _FLAG.sub(r"`\1`", text.replace("<", "&lt;"))


def configurations() -> str:
    """A row for each configuration that the functional suite aligns."""
    sys.path.insert(0, str(_ROOT))
    cases = import_module("tests.functional.cases")
    rows = ["| case | preset | GPUs | scopes | flags |", "|---|---|---|---|---|"]
    found = [*cases.CASES, *cases.PACKED, *cases.FEATURES, *cases.LARGE]
    for case in sorted(found, key=lambda case: case.preset):
        preset = case.preset if case.bf16 else f"{case.preset}, fp32"
        scopes = f"`{' '.join(case.scopes)}`" if case.scopes else "whole layers"
        words = [*case.flags, *case.graph_flags, *map("=".join, case.env)]
        flags = " ".join(words).replace("--global-batch-size 8", "").strip()
        flags = f"`{flags}`" if flags else ""
        rows.append(f"| {case.name} | {preset} | {case.gpus} | {scopes} | {flags} |")
    return "\n".join(rows)


def faults() -> str:
    """What tests with the marker ``fault`` show, in the words of their names."""
    found: dict[str, list[str]] = defaultdict(list)
    for where, test, _ in _marked("fault"):
        shown = _NAMES.sub(lambda name: name[0].upper(), test.replace("_", " "))
        found[where].append(f"- {shown[0].upper()}{shown[1:]}.")
    return "\n\n".join(f"{where}\n\n" + "\n".join(shown) for where, shown in found.items())


def refusals() -> str:
    """The rules whose reason a test shows, and the test."""
    found = sorted((rule, test) for _, test, rules in _marked("refuses") for rule in rules)
    return "\n".join(f"- **{rule}**: `test_{test}`" for rule, test in found)


def _marked(marker: str) -> Iterator[tuple[str, str, list[str]]]:
    """Each test that has the marker, or whose file has it.

    What its file is about, its name, and the marker's arguments.
    """
    for path in sorted((_ROOT / "tests").rglob("test_*.py")):
        text = path.read_text(encoding="utf-8")
        tree = ast.parse(text if f"pytest.mark.{marker}" in text else "")
        about = (ast.get_docstring(tree) or "").partition("\n")[0]
        where = f"**{about}** `{path.relative_to(_ROOT)}`:"
        of_all = [node.value for node in tree.body if isinstance(node, ast.Assign)]
        for test in tree.body:
            if isinstance(test, ast.FunctionDef) and test.name.startswith("test_"):
                for mark in (*of_all, *test.decorator_list):
                    if ast.unparse(mark).partition("(")[0] == f"pytest.mark.{marker}":
                        words = list(map(ast.literal_eval, getattr(mark, "args", ())))
                        yield where, test.name.removeprefix("test_"), words


GENERATORS: dict[str, Callable[[], str]] = {
    "flags": our_flags,
    "rules": rules,
    "configurations": configurations,
    "faults": faults,
    "refusals": refusals,
}


def on_page_markdown(markdown: str, *, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Put in what is generated, and let ``docs/x.md`` in code be a link to that page."""
    text = _MARKER.sub(lambda found: GENERATORS[found[1]](), markdown)
    known = {file.src_uri for file in files.documentation_pages()}

    def link(found: re.Match[str]) -> str:
        name = f"{found[1]}.md"
        return f"[{found[1]}]({name})" if name in known else found[0]

    return _PAGE_NAMED.sub(link, text)
