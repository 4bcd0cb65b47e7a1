"""The system to check: the one of this process, or one made by a test."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import site
import sys
import sysconfig
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megatron_cg.arguments.schema import TRANSFORMER_ENGINE
from megatron_cg.tools.doctor.ask import Interpreter, StageError
from megatron_cg.tools.doctor.finding import NotReachedError
from megatron_cg.upstream.symbols import installed_version

_ROOT = Path(__file__).resolve().parents[3]


@dataclass(frozen=True)
class System:
    """Everything that checks read, so that no check reads the machine itself."""

    ask: Callable[[str], Any]
    """The findings of another process at a stage of ``probe.py``; raises NotReachedError."""
    backend: str = TRANSFORMER_ENGINE
    variables: Mapping[str, str] = field(default_factory=dict)
    folders: Sequence[Path] = ()
    """The folders where a run searches modules, in order: the working directory, PYTHONPATH,
    site-packages."""
    given: Sequence[Path] = ()
    """The ``folders`` that come from the user: the working directory and PYTHONPATH."""
    purelib: Path = Path("site-packages")
    version: Callable[[str], str | None] = installed_version
    requirements: Sequence[str] = ()
    """This package's own requirements, from its metadata, including ``python``."""
    python: str = ""
    shared_memory: Path = Path("/dev/shm")
    package: Path = _ROOT / "megatron_cg"

    @property
    def wants_te(self) -> bool:
        """Whether Transformer Engine will capture graphs."""
        return self.backend == TRANSFORMER_ENGINE


def told(system: System, stage: str) -> Any:
    """What the other process found at a stage; None where a check reports why there is nothing."""
    try:
        return system.ask(stage)
    except (NotReachedError, StageError):
        return None


def this_system(backend: str) -> System:
    """The machine and environment of this process."""
    variables = dict(os.environ)
    paths = variables.get("PYTHONPATH", "").split(os.pathsep)
    given = _unique([Path.cwd(), *map(Path, filter(None, paths))])
    others = [Path(entry) for entry in sys.path if entry]
    if site.ENABLE_USER_SITE:
        others.append(Path(site.getusersitepackages()))
    folders = _unique([*given, *others])
    return System(
        ask=Interpreter(backend, variables, installed_version, folders).ask,
        backend=backend,
        variables=variables,
        folders=folders,
        given=given,
        purelib=Path(sysconfig.get_path("purelib")),
        requirements=own_requirements(_ROOT),
        python=platform.python_version(),
    )


def own_requirements(root: Path) -> tuple[str, ...]:
    """The requirements of megatron-cg; from pyproject.toml in a checkout that is not installed.

    ``python`` is the name of the range of Python versions. Empty if neither can be read.
    """
    try:
        metadata = importlib.metadata.metadata("megatron-cg")
    except importlib.metadata.PackageNotFoundError:
        return _requirements_of(root / "pyproject.toml")
    python = metadata.get("Requires-Python") or ""
    return (f"python{python}", *(metadata.get_all("Requires-Dist") or ()))


def _requirements_of(pyproject: Path) -> tuple[str, ...]:
    import tomllib

    if not pyproject.is_file():
        return ()
    project = tomllib.loads(pyproject.read_text(encoding="utf-8")).get("project", {})
    extras = project.get("optional-dependencies", {})
    return (
        f"python{project.get('requires-python', '')}",
        *project.get("dependencies", ()),
        *(line for name in ("fsdp", "te", "gpu") for line in extras.get(name, ())),
    )


def _unique(paths: Sequence[Path]) -> tuple[Path, ...]:
    return tuple(dict.fromkeys(path.resolve() for path in paths))
