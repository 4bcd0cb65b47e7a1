"""Model shapes by name, from ``arguments/presets/*.yaml``.

``python -m megatron_cg.tools.align.presets NAME`` prints a preset for shell scripts: its scopes in
the first line, then its flags, a word a line.
"""

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_cg.errors import MegatronCGError

_FOLDER = Path(__file__).parents[2] / "arguments" / "presets"
Flag = bool | int | float | str | list[int | float | str]


@dataclass(frozen=True)
class Preset:
    """One model shape: Megatron's flags for a GPU run, and a small shape for the tape."""

    name: str
    description: str
    scopes: tuple[str, ...]  # the default of ``--cuda-graph-modules``; empty means the whole layer
    nproc: int
    flags: Mapping[str, Flag]
    """Megatron's flags by name, without the leading dashes; true is a flag without a value."""
    tape: Mapping[str, Any] | None = None
    """Fields of ``CpuModelConfig``; None for a model that cannot be built on a CPU."""

    def arguments(self) -> list[str]:
        words: list[str] = []
        for name, value in self.flags.items():
            values = value if isinstance(value, list) else [] if value is True else [value]
            words += [f"--{name}", *map(str, values)]
        return words


def preset_names() -> list[str]:
    return sorted(path.stem for path in _FOLDER.glob("*.yaml"))


def load_preset(name: str) -> Preset:
    """The preset of that name. Raises MegatronCGError, which lists the known names."""
    import yaml

    if name not in (names := preset_names()):
        raise MegatronCGError(f"there is no preset {name!r}; there are {', '.join(names)}.")
    data = yaml.safe_load((_FOLDER / f"{name}.yaml").read_text(encoding="utf-8"))
    data["description"] = " ".join(data["description"].split())
    return Preset(name, **data | {"scopes": tuple(data["scopes"])})


if __name__ == "__main__":
    try:
        chosen = load_preset(" ".join(sys.argv[1:]))
    except MegatronCGError as error:
        sys.exit(f"{error}")
    print(" ".join(chosen.scopes), *chosen.arguments(), sep="\n")
