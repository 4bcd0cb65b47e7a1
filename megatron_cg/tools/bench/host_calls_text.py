"""Formats the result of :mod:`megatron_cg.tools.bench.host_calls` in fixed width. Pure."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from typing import Any

_WIDTH = 100
"""Width of the names in a line; a single longer name may exceed it."""
_MOST = 10
"""Length of the list of functions that take the time themselves."""
_FRAME = re.compile(r"(?P<name>.*) \((?P<file>.*)\)")
_PASSES_ON = re.compile(
    r".* \(<frozen runpy>\)"
    r"|<module> .*|main .*"
    r"|Module\._(wrapped_)?call_impl\b.*|GraphableMegatronModule\.__call__ .*"
    r"|Function\.apply .*|BackwardCFunction\.apply .*"
    r"|.*\.decorate_context .*|.*\.wrapper .*|.*\._fn .*|.*\.compile_wrapper .*|.*\.wrapped_fn .*"
)
"""Names without information; omitted if they only lead to the next name."""


def sampled_heading(found: Mapping[str, Any]) -> str:
    """How the profile was taken, and the meaning of its numbers."""
    words = f"{found['steps']} steps of {found['step_ms']:,.1f} ms, {found['stacks']:,} stacks"
    if found["lost"]:
        words += f"; {found['lost']:,} of {found['looks']:,} looks were lost and are scaled for"
    return f"host time a step, sampled ({found['sampler']}: {words})"


def sampled_block(found: Mapping[str, Any]) -> list[str]:
    """The call tree of each thread, and the functions that take most time themselves."""
    lines: list[str] = []
    for thread in found["threads"]:
        lines += [f"{thread['thread']}: {thread['ms']:,.1f} ms a step", "", "      ms     own"]
        lines += [_line(row["ms"], row["own_ms"], _tree_name(row)) for row in thread["tree"]]
        if thread["no_frame_ms"] >= found["least_ms"]:
            lines.append(_line(thread["no_frame_ms"], thread["no_frame_ms"], "no Python frame"))
        own = [row for row in thread["functions"] if row["own_ms"] >= found["least_ms"]][:_MOST]
        if own:
            lines += ["", "most of their own, wherever called:"]
            lines += [_line(row["ms"], row["own_ms"], _short(row["function"])) for row in own]
        lines.append("")
    others = [row for row in found["other_threads"] if row["ms"] >= found["least_ms"]]
    lines += [f"{row['thread']}: {row['ms']:,.1f} ms a step" for row in others]
    while lines and not lines[-1]:
        lines.pop()
    return lines


def _line(ms: float, own: float, name: str) -> str:
    return f"{ms:8,.1f}{own:8,.1f}  {name}"


def _tree_name(row: Mapping[str, Any]) -> str:
    through = [_short(name, file=False) for name in row["through"] if not _PASSES_ON.match(name)]
    names = [*through, _short(row["function"], row["line"])]
    indent: str = "  " * row["depth"]
    return indent + _joined(names, _WIDTH - len(indent))


def _joined(names: Sequence[str], room: int) -> str:
    """The names, joined by arrows.

    If they do not fit, names after the first are left out. The first distinguishes the line from
    its siblings, and the last ones are the callers of its children.
    """
    text, left_out = " > ".join(names), 0
    while len(text) > room and left_out < len(names) - 2:
        left_out += 1
        text = " > ".join([names[0], "..", *names[1 + left_out :]])
    return text


def _short(function: str, line: int | None = None, *, file: bool = True) -> str:
    """The last two parts of a function's name, and its file's name."""
    match = _FRAME.fullmatch(function)
    name, place = (match["name"], os.path.basename(match["file"])) if match else (function, "")
    if "::" in name:
        name = name[:60]
    else:
        name = ".".join([part for part in name.split(".") if part != "<locals>"][-2:])
    if not file or not place:
        return name
    return f"{name} ({place}:{line})" if line else f"{name} ({place})"
