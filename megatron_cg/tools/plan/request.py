"""What is to be planned: Megatron's flags, from a preset or from somebody's command line. Pure."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from megatron_cg.errors import MegatronCGError
from megatron_cg.nearest import did_you_mean
from megatron_cg.tools.align.command import BASE_FLAGS, GRAPH_FLAGS
from megatron_cg.tools.align.presets import load_preset, preset_names

_SCRIPT = ".py"
_PACKAGE = "megatron_cg"
_MODULES = "--cuda-graph-modules"
_ASSIGNMENT = re.compile(r"[A-Za-z_][A-Za-z0-9_]*=")
_PER_NODE = ("--nproc-per-node", "--nproc_per_node")
_NODES = ("--nnodes",)
_PRESET_FLAGS = (
    *(flag for flag in BASE_FLAGS if flag != "--deterministic-mode"),
    *("--mock-data", "--tokenizer-type", "NullTokenizer", "--train-iters", "100"),
    *("--cuda-graph-impl", "transformer_engine", "--cuda-graph-warmup-steps", "3"),
    *GRAPH_FLAGS,
)
"""What a preset does not say of itself. Without determinism, which measurements leave out too."""


class RequestError(MegatronCGError):
    """There is nothing to plan in what was typed."""


@dataclass(frozen=True)
class Request:
    """One plan to be made."""

    title: str
    words: tuple[str, ...]
    """Megatron's flags."""
    nproc: int | None = None
    """GPUs; None for the fewest that the flags' parallel sizes can have, and at least 2."""
    environment: dict[str, str] = field(default_factory=dict)
    """Variables that stood before the command."""
    own_flags: bool = False
    """Whether the script may have flags of its own, which Megatron's parser does not know."""
    started_without: str | None = None
    """The script of a command that starts it without this package's launcher, as it is written."""

    def as_dict(self) -> dict[str, Any]:
        """The fields by name, as JSON can hold them."""
        return {**vars(self), "words": list(self.words)}


def read_request(
    target: str | None,
    extra: Sequence[str],
    *,
    scopes: Sequence[str] | None = None,
    cg_layers: Sequence[str] = (),
    nproc: int | None = None,
) -> Request:
    """The request that a command line of ``megatron-cg plan`` makes.

    Args:
        target: a preset's name or a script; None where ``extra`` is a whole command line.
        extra: what came after ``--``: Megatron's flags, or a command line with a script in it,
            of which all before the script is read only for GPUs and variables.
        scopes: instead of ``--cuda-graph-modules``; empty for whole layers.
        cg_layers: values of ``--cg-layers``.
        nproc: GPUs, instead of what is said elsewhere.

    Raises RequestError for what is neither, naming what there is.
    """
    if target is not None and not target.endswith(_SCRIPT):
        if target not in preset_names():
            hint = did_you_mean(target, preset_names())
            raise RequestError(
                f"there is no preset {target!r}{hint}, and a script's name ends with {_SCRIPT}. "
                f"Presets: {', '.join(preset_names())}."
            )
        preset = load_preset(target)
        modules = preset.scopes if scopes is None else tuple(scopes)
        # Not before ``extra``, whose first word would be taken for a scope where it is no flag.
        words = (*preset.arguments(), *_modules(modules), *_PRESET_FLAGS, *extra)
        request = Request(f"preset {target}", words, preset.nproc)
    elif target is not None:
        request = Request(Path(target).name, tuple(extra), own_flags=_is_foreign(target))
    else:
        request = _from_command_line(extra)
    words = request.words
    if scopes is not None:
        words = (*_without_modules(words), *_modules(scopes))
    if cg_layers:
        words = (*words, "--cg-layers", *cg_layers)
    return replace(request, words=words, nproc=nproc or request.nproc)


def _is_foreign(script: str) -> bool:
    return not script.replace("\\", "/").endswith("examples/pretrain_gpt.py")


def _modules(scopes: Sequence[str]) -> tuple[str, ...]:
    return (_MODULES, *scopes) if scopes else ()


def _without_modules(words: Sequence[str]) -> tuple[str, ...]:
    kept: list[str] = []
    skipping = False
    for word in words:
        skipping = word == _MODULES or (skipping and not word.startswith("--"))
        if not skipping and not word.startswith(_MODULES + "="):
            kept.append(word)
    return tuple(kept)


def _from_command_line(words: Sequence[str]) -> Request:
    at = next((i for i, word in enumerate(words) if word.endswith(_SCRIPT)), None)
    if at is None:
        raise RequestError(
            "give a preset's name, or a script and its flags after a bare --, or after -- a whole "
            f"command line with a script in it. Presets: {', '.join(preset_names())}."
        )
    before = words[:at]
    environment = dict(w.split("=", 1) for w in before if _ASSIGNMENT.match(w))
    per_node, nodes = _number_after(before, _PER_NODE), _number_after(before, _NODES)
    return Request(
        Path(words[at]).name,
        tuple(words[at + 1 :]),
        per_node * (nodes or 1) if per_node else None,
        environment,
        _is_foreign(words[at]),
        None if _has_launcher(before, words[at]) else words[at],
    )


def _has_launcher(before: Sequence[str], script: str) -> bool:
    """Whether a command starts this package before the script, or the script does so itself.

    Also true where there is no command, but at most variables: the start is unknown then.
    """
    command = [word for word in before if not _ASSIGNMENT.match(word)]
    text = f" {' '.join(command)} ".replace("=", " ")
    if not command or re.search(r" (-m ?|--module )megatron_cg ", text):
        return True
    try:
        return _PACKAGE in Path(script).read_text(encoding="utf-8", errors="replace")
    except OSError:
        return False


def _number_after(words: Sequence[str], names: Sequence[str]) -> int | None:
    """The number given to a flag of the launcher; None where it is none (``gpu``, ``1:4``)."""
    for index, word in enumerate(words):
        name, equals, value = word.partition("=")
        if name in names:
            text = value if equals else next(iter(words[index + 1 : index + 2]), "")
            return int(text) if text.isdecimal() else None
    return None
