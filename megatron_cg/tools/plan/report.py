"""Prints a plan for a terminal."""

import json
import shutil
import textwrap
from argparse import Namespace
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from functools import partial
from itertools import groupby
from typing import Any, NamedTuple

from megatron_cg.errors import ranged
from megatron_cg.tools.launch_line import LaunchLine, read_line
from megatron_cg.tools.plan.edit import COSTLY, LAUNCHER, Edited, Tried, edit, gib
from megatron_cg.tools.plan.memory import Layer, Memory, Part

WIDTH = min(100, shutil.get_terminal_size((100, 24)).columns)
_WRAP = partial(textwrap.wrap, width=WIDTH, break_long_words=False, break_on_hyphens=False)
_USABLE = 0.99  # the part of a card's nominal memory that a process can have: 79.2 GiB of 80
_MORE = "That is close: recorded runs needed up to 6% more, with unbalanced experts up to 33%."
_SMALLER = (
    "It does not fit without graphs either: use more GPUs, more tensor or expert parallelism, a "
    "smaller --seq-length or --micro-batch-size, or more recompute: docs/performance.md."
)


def invoke(args: Namespace, extra: Sequence[str]) -> int:
    line, room = read_line(extra), int(args.gpu_memory * _USABLE * 2**30)
    plan = edit(line, room, args.gpus)
    print(json.dumps(facts_of(plan)) if args.json else "\n".join(lines_of(plan)).rstrip())
    return 0 if plan.accepted else 1


class Change(NamedTuple):
    """A variable, a flag or the launcher that was added (+), removed (-) or changed (~)."""

    sign: str
    text: str
    reason: str


def changes(plan: Edited) -> list[Change]:
    reasons, found = plan.best.reasons, []
    old, new = _pieces(plan.given), _pieces(plan.best.line)
    if LAUNCHER in reasons:
        new = {LAUNCHER: LAUNCHER, **new}
    for name in {**new, **old}:
        if old.get(name) != new.get(name):
            sign = "-" if name not in new else "~" if name in old else "+"
            text = " -> ".join(pieces[name] for pieces in (old, new) if name in pieces)
            found.append(Change(sign, text, reasons[name]))
    return found


def facts_of(plan: Edited) -> dict[str, Any]:
    """The plan for a program; sizes in bytes."""
    best, memory = plan.best, plan.best.memory
    return {
        "accepted": plan.accepted,
        "gpus": plan.gpus.count,
        "asks": plan.asks,
        "changes": [change._asdict() for change in changes(plan)],
        "refused": [asdict(item) for item in best.settings.broken],
        "command": None if memory is None else best.line.command,
        "captured": {layer.name: [part.name for part in layer.captured] for layer in best.layers},
        "memory": None if memory is None else {"total": memory.total, **memory.terms},
        "without_graphs": None if plan.eager is None else plan.eager.total,
        "room": plan.room,
        "notes": best.settings.notes,
    }


def _pieces(line: LaunchLine) -> dict[str, str]:
    pieces = {name: f"{name}={value}" for name, value in line.variables.items()}
    return pieces | {flag.name: str(flag) for flag in line.flags}


def lines_of(plan: Edited) -> Iterator[str]:
    best = plan.best
    yield f"{plan.given.script} on {plan.gpus.count:,} GPUs"
    made = changes(plan)
    if plan.asks:
        yield "\nDo you want this?"
        for text in plan.asks:
            yield from _wrapped(f"- {text}.", "  ")
    if made or best.memory is not None:
        yield "\nChanges:" if made else "\nThe command can run as it is."
    for (sign, reason), same in groupby(made, lambda change: (change.sign, change.reason)):
        yield from _wrapped(f"{sign} {' '.join(change.text for change in same)}", "  ")
        yield from _wrapped(reason, "      ")
    if best.memory is None:
        yield "\nRefused, also with these changes:" if made else "\nRefused:"
        for item in best.settings.broken:
            yield from _wrapped(f"- {item.found}: {item.reason}", "  ")
            if item.remedy:
                yield from _wrapped(f"Instead: {item.remedy}.", "      ")
        for text in best.settings.notes:
            yield from _wrapped(f"- {text}", "  ")
        return
    if made:
        yield f"\nThe command:\n\n{best.line}"
    yield "\nCaptured, by layer:"
    alike: dict[tuple[str, tuple[Part, ...]], list[Layer]] = {}
    for layer in best.layers:
        alike.setdefault((layer.kind, layer.captured), []).append(layer)
    for layer, *others in alike.values():
        names = ranged(one.name for one in (layer, *others))
        held = [part.name for part in layer.captured]
        eager = [part.name for part in layer.parts if part not in layer.captured]
        words = f"- {names} ({layer.kind}): {', '.join(held) or 'nothing'}"
        yield from _wrapped(f"{words}; eager: {', '.join(eager)}" if eager else words, "  ")
    yield from _memory(plan, best.memory)
    for text in best.settings.notes:
        yield from _wrapped(f"- {text}", "  ")


def _memory(plan: Edited, memory: Memory) -> Iterator[str]:
    whole, held, sharded = memory.parameters
    yield f"\nParameters: {whole:,}; of a rank {held:,}, after sharding {sharded:,}"
    yield "\nMemory of one GPU, MiB:"
    for phase, terms in memory.terms.items():
        sizes = {name: size for name, size in terms.items() if size}
        yield from [f"  {phase}:"] * bool(sizes)
        for name, size in sizes.items():
            yield f"    {name:<40}{size / 2**20:>12,.0f}"
    eager = plan.eager.total if plan.eager is not None else memory.total
    fits = "fits" if plan.accepted else "does not fit"
    needs = f"{gib(memory.total)}, {gib(eager)} without graphs, of {gib(plan.room)}"
    yield from _wrapped(f"{fits}: {needs}.", "")
    if not plan.accepted:
        yield from _wrapped(_SMALLER if eager > plan.room else _without_all(plan.best), "  ")
    elif memory.total > 0.94 * plan.room:
        yield from _wrapped(_MORE, "  ")


def _without_all(tried: Tried) -> str:
    """What to do if the run fits without graphs alone."""
    if not tried.reasons.keys().isdisjoint(COSTLY):
        return "Keep the line as it is: without these changes and without graphs it fits."
    last = max(0, tried.settings.args.num_layers // 2 - 1)
    layers = " ".join(f"{scope}:0-{last}" for scope in tried.settings.run.scope_names)
    return f"Keep the line as it is, or capture fewer layers, as with --cg-layers {layers}."


def _wrapped(text: str, indent: str) -> list[str]:
    return _WRAP(text, initial_indent=indent, subsequent_indent=f"{indent}  ")
