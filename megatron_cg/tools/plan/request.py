"""Reads what to plan: Megatron's flags, from a preset or from a command line. Pure."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

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
"""Flags that a preset lacks. Without determinism, as in measurements."""


class RequestError(MegatronCGError):
    """The command line contains nothing to plan."""


@dataclass(frozen=True)
class Request:
    """One plan to make."""

    title: str
    words: tuple[str, ...]
    """Megatron's flags."""
    nproc: int | None = None
    """GPUs; None means the smallest number for the flags' parallel sizes, at least 2."""
    environment: dict[str, str] = field(default_factory=dict)
    """Environment variables set before the command."""
    own_flags: bool = False
    """Whether the script may have its own flags, which Megatron's parser does not know."""
    started_without: str | None = None
    """The script of a command that starts it without this package's launcher, as written."""


def read_request(
    target: str | None,
    extra: Sequence[str],
    *,
    scopes: Sequence[str] | None = None,
    cg_layers: Sequence[str] = (),
    cg_grouped_gemm: str = "te",
    nproc: int | None = None,
) -> Request:
    """The request of a command line of ``megatron-cg plan``.

    Args:
        target: a preset's name or a script; None if ``extra`` is a whole command line.
        extra: the words after ``--``: Megatron's flags, or a command line with a script in it. Of
            the words before the script only GPUs and variables are read.
        scopes: replaces ``--cuda-graph-modules``; empty means whole layers.
        cg_layers: values of ``--cg-layers``.
        cg_grouped_gemm: the value of ``--cg-grouped-gemm``.
        nproc: GPUs; overrides all other sources.

    Raises RequestError for anything else, with a list of what exists.
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
        # Not directly before ``extra``: its first word would be read as a scope if it is no flag.
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
    if cg_grouped_gemm != "te":
        words = (*words, "--cg-grouped-gemm", cg_grouped_gemm)
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

    Also true if there is no command but at most variables, because the start is then unknown.
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
    """The number given to a flag of the launcher; None if it is not a number (``gpu``, ``1:4``)."""
    for index, word in enumerate(words):
        name, equals, value = word.partition("=")
        if name in names:
            text = value if equals else next(iter(words[index + 1 : index + 2]), "")
            return int(text) if text.isdecimal() else None
    return None
