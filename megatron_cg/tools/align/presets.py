"""Model shapes by name, from ``arguments/presets/*.yaml``.

``python -m megatron_cg.tools.align.presets NAME`` prints a preset for shell scripts: its scopes in
the first line, then its flags, a word a line.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import resources
from typing import Any

from megatron_cg.errors import MegatronCGError
from megatron_cg.nearest import did_you_mean

Flag = bool | int | float | str | list[int | float | str]
_FIELDS = {"description": str, "scopes": list, "nproc": int, "flags": dict, "tape": dict}
_TAPE = {
    "layers": (int, True),
    "hidden": (int, True),
    "heads": (int, True),
    "ffn": (int, True),
    "vocab": (int, True),
    "seq": (int, True),
    "experts": (int, False),
    "topk": (int, False),
    "scopes": (list, False),
}


class PresetError(MegatronCGError):
    """There is no such preset, or its file is wrong."""


@dataclass(frozen=True)
class TapeShape:
    """A preset's shape that is small enough for a CPU; ``experts=0`` is a dense model."""

    layers: int
    hidden: int
    heads: int
    ffn: int
    vocab: int
    seq: int
    experts: int = 0
    topk: int = 0
    scopes: tuple[str, ...] = ("attn",)


@dataclass(frozen=True)
class Preset:
    """One model shape: Megatron's flags for a GPU run, and a small shape for the tape."""

    name: str
    description: str
    scopes: tuple[str, ...]
    """The default of ``--cuda-graph-modules``; empty means the whole layer."""
    nproc: int
    flags: Mapping[str, Flag]
    """Megatron's flags by name, without the leading dashes; true is a flag without a value."""
    tape: TapeShape | None
    """None for a model that cannot be built on a CPU."""

    def arguments(self) -> list[str]:
        """The flags as a command line."""
        words: list[str] = []
        for name, value in self.flags.items():
            words.append(f"--{name}")
            if isinstance(value, list):
                words += [str(item) for item in value]
            elif value is not True:
                words.append(str(value))
        return words


def preset_names() -> list[str]:
    """Every preset's name, sorted."""
    folder = resources.files("megatron_cg.arguments") / "presets"
    return sorted(p.name[: -len(".yaml")] for p in folder.iterdir() if p.name.endswith(".yaml"))


def load_preset(name: str) -> Preset:
    """The preset of that name. Raises PresetError, which lists the known names."""
    if name not in preset_names():
        names = preset_names()
        hint = did_you_mean(name, names)
        raise PresetError(f"there is no preset {name!r}{hint}; there are {', '.join(names)}.")
    file = resources.files("megatron_cg.arguments") / "presets" / f"{name}.yaml"
    return parse_preset(name, file.read_text(encoding="utf-8"))


def parse_preset(name: str, text: str) -> Preset:
    """A preset from YAML. Raises PresetError, which names every wrong field."""
    import yaml

    try:
        data = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise PresetError(f"preset {name} is not YAML: {error}") from error
    if not isinstance(data, dict):
        raise PresetError(f"preset {name} is not a mapping of {', '.join(_FIELDS)}.")
    tape = data.get("tape", {})
    problems = _problems(data, {key: (kind, key != "tape") for key, kind in _FIELDS.items()}, "")
    if isinstance(tape, dict) and tape:
        problems += _problems(tape, _TAPE, "tape.")
    if not problems:
        problems = [f"flags.{key}: {why}" for key, why in _flag_problems(data["flags"])]
    if problems:
        raise PresetError(f"preset {name}: " + "; ".join(problems) + ".")
    shape = dict(tape, scopes=tuple(tape.get("scopes", ("attn",)))) if tape else None
    return Preset(
        name,
        " ".join(data["description"].split()),
        tuple(data["scopes"]),
        data["nproc"],
        # By identity, because 0.0 equals False.
        {
            k: value
            for k, value in data["flags"].items()
            if value is not False and value is not None
        },
        TapeShape(**shape) if shape else None,
    )


def _problems(
    data: Mapping[str, Any], fields: Mapping[str, tuple[Any, bool]], at: str
) -> list[str]:
    found = [f"{at}{key} is not known" for key in data if key not in fields]
    for key, (kind, needed) in fields.items():
        if key not in data:
            found += [f"{at}{key} is missing"] if needed else []
        elif not isinstance(data[key], kind) or isinstance(data[key], bool):
            found.append(f"{at}{key} is {data[key]!r}, not of type {kind.__name__}")
    return found


def _flag_problems(flags: Mapping[Any, Any]) -> list[tuple[Any, str]]:
    found = []
    for key, value in flags.items():
        items = value if isinstance(value, list) else [value]
        if not isinstance(key, str) or key.startswith("-"):
            found.append((key, "write Megatron's flag without its dashes"))
        elif not items or not all(isinstance(item, bool | int | float | str) for item in items):
            found.append((key, f"{value!r} is not a value, nor a list of values"))
    return found


if __name__ == "__main__":
    try:
        chosen = load_preset(" ".join(sys.argv[1:]))
    except PresetError as error:
        sys.exit(f"{error}")
    print(" ".join(chosen.scopes), *chosen.arguments(), sep="\n")
