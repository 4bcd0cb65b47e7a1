"""The modules of the package, as pages of its reference: one for each room."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

PACKAGE = Path(__file__).parents[2] / "megatron_cg"


def rooms() -> dict[str, list[str]]:
    """Every module by the page that shows it: ``megatron_cg`` itself, then each package below."""
    below = sorted(path.parent.name for path in PACKAGE.glob("*/__init__.py"))
    pages = {PACKAGE.name: [PACKAGE.name, *_names(PACKAGE.glob("*.py"))]}
    for name in below:
        folder = PACKAGE / name
        packages = [f"{PACKAGE.name}.{_dotted(path.parent)}" for path in _packages(folder)]
        pages[name] = sorted({*packages, *_names(folder.rglob("*.py"))})
    return pages


def page(modules: Sequence[str]) -> str:
    """The page that shows these modules: a directive of mkdocstrings for each."""
    title = modules[0]
    return f"# `{title}`\n\n" + "\n\n".join(f"::: {name}" for name in modules) + "\n"


def _packages(folder: Path) -> list[Path]:
    return list(folder.rglob("__init__.py"))


def _names(paths: Iterable[Path]) -> list[str]:
    found = [path for path in paths if not path.stem.startswith("_")]
    return sorted(f"{PACKAGE.name}.{_dotted(path.with_suffix(''))}" for path in found)


def _dotted(path: Path) -> str:
    return ".".join(path.relative_to(PACKAGE).parts)
