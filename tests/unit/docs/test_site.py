"""What the site's hooks do, and that its pages say what the code says."""

from __future__ import annotations

import ast
import dataclasses
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from mkdocs.exceptions import PluginError

from megatron_cg.arguments.schema import SCOPES, GraphArguments, RunArguments, flag_of
from megatron_cg.arguments.validation import RULES
from megatron_cg.tools.doctor.relied_on import modules_that_rely
from tests.unit.arguments.good_configuration import megatron_parser
from tools import site_hooks
from tools.generated import commands, flags, modules, relied_on, sections

ROOT = Path(__file__).parents[3]
DOCS = ROOT / "docs"
PAGES = sorted(DOCS.glob("*.md"))
MARKER = re.compile(r"<!-- generated: (\S+)")
FLAG = re.compile(r"(?<![\w-])--[a-z][a-z0-9-]*")
CODE = re.compile(r"```.*?```|`[^`\n]+`", re.DOTALL)
OTHERS_COMMANDS = re.compile(
    r"^.*\b(?:apt-get|nsys|pip|py-spy|python -m (?!megatron_cg)|sbatch|srun)\b(?:.*\\\n)*.*",
    re.MULTILINE,
)
PACKAGE = ROOT / "megatron_cg"
OUR_FILE = re.compile(r"`(?:python )?((\w+)(?:/\w+)+(?:\.py)?)[`:]")
"""A path of at least one folder, in code, and its first folder."""
OTHERS_FLAGS = {
    "--sharding",  # of examples/standalone_transformer.py
    *("--nproc-per-node", "--nnodes", "--node-rank", "--standalone"),  # torchrun
    *("--rdzv-backend", "--rdzv-endpoint", "--rdzv-id", "--master-addr", "--master-port"),
    *("--help", "--version"),
    *("--no-build-isolation", "--no-deps"),  # pip
}


def navigation() -> list[str]:
    def pages(entry: Any) -> list[str]:
        if isinstance(entry, str):
            return [entry]
        inside = entry if isinstance(entry, list) else list(entry.values())
        return [page for item in inside for page in pages(item)]

    return pages(yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))["nav"])


def known_flags() -> set[str]:
    found = {*megatron_parser()._option_string_actions, *OTHERS_FLAGS}
    for parser in commands.parsers().values():
        found |= set(parser._option_string_actions)
    return found


def test_every_page_is_in_the_navigation_once() -> None:
    named = [page for page in navigation() if page.endswith(".md")]
    assert len(named) == len(set(named))
    assert {page.name for page in PAGES} <= set(named)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_flag_in_a_page_exists(page: Path) -> None:
    text = site_hooks.expand(page.read_text(encoding="utf-8"), page.name)
    code = "\n".join(CODE.findall(text))
    named = set(FLAG.findall(OTHERS_COMMANDS.sub("", code)))
    assert named <= known_flags()


def test_every_flag_has_its_heading_and_help_text() -> None:
    text = flags.our_flags()
    for field in dataclasses.fields(GraphArguments):
        assert f"### `{flag_of(field.name)}`" in text
        assert flags.in_code(field.metadata["help"]) in text


def test_the_readme_names_every_flag() -> None:
    text = sections.section("Flags")
    missing = [
        flag_of(field.name)
        for field in dataclasses.fields(GraphArguments)
        if not re.search(rf"\| `{flag_of(field.name)}[ `]", text)
    ]
    assert not missing


def test_the_flags_page_names_every_scope_setting_and_rule() -> None:
    page = site_hooks.expand((DOCS / "flags.md").read_text(encoding="utf-8"), "flags.md")
    assert all(f"`{scope}`" in page for scope in SCOPES)
    assert all(f"| `{field.name}` |" in page for field in dataclasses.fields(RunArguments))
    assert page.count("- **") == len(RULES)
    assert "{run." not in page


def test_the_commands_page_has_every_commands_help() -> None:
    page = commands.all_commands()
    for name, parser in commands.parsers().items():
        assert f"## `megatron-cg {name}`" in page
        for action in parser._actions:
            assert all(option in page for option in action.option_strings)


def test_the_reference_has_every_module() -> None:
    shown = [name for names in modules.rooms().values() for name in names]
    files = [path for path in modules.PACKAGE.rglob("*.py") if path.stem[0] != "_"]
    files += [path for path in (ROOT / "arguments").rglob("*.py") if path.stem[0] != "_"]
    assert len(shown) == len(set(shown))
    assert {path.stem for path in files} <= {name.rpartition(".")[2] for name in shown}
    assert "megatron_cg.arguments.schema" in shown


def test_the_maintainers_page_has_every_module_that_relies_on_another_package() -> None:
    page = site_hooks.expand((DOCS / "maintaining.md").read_text(encoding="utf-8"), "")
    rely = modules_that_rely()
    assert rely and all(f"`{name.removeprefix('megatron_cg.')}`" in page for name in rely)
    # Megatron-FSDP is listed once, though two packages ship it.
    assert "megatron.core.distributed.fsdp.src" not in relied_on.relied_on()


def test_the_support_page_has_configurations_and_versions() -> None:
    page = site_hooks.expand((DOCS / "support.md").read_text(encoding="utf-8"), "support.md")
    measured, _, others = page.partition("\n## Versions\n")
    assert "| 2.11.0 | 0.19.2 | 0.6.1 | 2.20.2 | passed |" in others
    rows = [line for line in measured.splitlines() if line.startswith("| ")]
    assert len([row for row in rows if row.endswith("| bit-equal |")]) > 20


def test_the_home_page_has_the_readmes_figures() -> None:
    page = site_hooks.expand((DOCS / "index.md").read_text(encoding="utf-8"), "index.md")
    rows = [line for line in page.splitlines() if line.startswith("| ")]
    assert len(rows) > 4 and set(rows) <= set((ROOT / "README.md").read_text().splitlines())


def test_a_section_that_the_readme_lacks_is_an_error() -> None:
    with pytest.raises(sections.SectionError, match="Measured"):
        sections.section("What", "is", "measured", "nowhere")


def definitions(file: Path) -> set[str]:
    """Classes and functions of a module, and ``Class.method``."""
    found = set()
    for node in ast.parse(file.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef):
            found.add(node.name)
        if isinstance(node, ast.ClassDef):
            methods = [item.name for item in node.body if isinstance(item, ast.FunctionDef)]
            found |= {f"{node.name}.{method}" for method in methods}
    return found


def test_the_stops_of_a_hook_and_of_a_gradient_are_in_the_code() -> None:
    text = (DOCS / "maintaining.md").read_text(encoding="utf-8")
    stops = re.findall(r"^\| \d \| `([^`]+)` \| ([^|]+) \|", text, re.MULTILINE)
    assert len(stops) == 16
    for file, names in stops:
        missing = set(re.findall(r"`([^`]+)`", names)) - definitions(ROOT / "megatron_cg" / file)
        assert not missing, file


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_file_of_ours_that_a_page_names_exists(page: Path) -> None:
    found = set(OUR_FILE.findall(page.read_text(encoding="utf-8")))
    named = {path for path, top in found if any((at / top).is_dir() for at in (ROOT, PACKAGE))}
    places = (ROOT, PACKAGE, ROOT / "tests/unit")  # as the fault table names its tests
    assert {path for path in named if not any((at / path).exists() for at in places)} == set()


def test_a_marker_that_nothing_generates_is_an_error() -> None:
    with pytest.raises(PluginError, match=r"page\.md: nothing generates 'flag'"):
        site_hooks.expand("text\n\n<!-- generated: flag -->\n", "page.md")


def test_every_generator_is_used() -> None:
    used = {name for page in PAGES for name in MARKER.findall(page.read_text(encoding="utf-8"))}
    assert used == set(site_hooks.GENERATORS)


def test_absent_pages_leave_the_navigation() -> None:
    nav = [{"A": "a.md"}, {"B": [{"C": "c.md"}, {"D": "d.md"}]}]
    assert site_hooks.without_pages(nav, {"a.md", "d.md"}) == [{"B": [{"C": "c.md"}]}]


def test_the_reference_takes_its_place_in_the_navigation() -> None:
    ((entry,),) = [site_hooks.with_reference([{"Change": [{"API": "reference"}]}])]
    pages = entry["Change"][0]["API"]
    assert {"replay": "reference/replay.md"} in pages
    assert {"megatron_cg": "reference/megatron_cg.md"} in pages


def test_a_drawing_takes_the_place_of_its_image() -> None:
    html = '<p><img alt="Eager" src="drawings/eager.svg" /> and <img alt="" src="a.svg" /></p>'
    drawn = site_hooks.with_drawings(html, DOCS / "drawings")
    assert '<svg xmlns="http://www.w3.org/2000/svg" class="drawing"' in drawn
    assert "<style>" not in drawn and 'src="a.svg"' in drawn
