"""Shows a plan: as text for a terminal, or as JSON."""

from __future__ import annotations

import json
import math
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from itertools import groupby
from pathlib import Path
from typing import Any

from megatron_cg.tools.launch_line import Flag
from megatron_cg.tools.plan.edit import Edited, Tried, unfixed
from megatron_cg.tools.plan.layers import Layer, Shape
from megatron_cg.tools.plan.memory import Memory
from megatron_cg.tools.plan.settings import Settings

WIDTH = 100
_ROWS = Path(__file__).with_name("measured_rows.json")


def changes(plan: Edited) -> list[dict[str, str]]:
    """What was added, changed and removed, each with its reason."""
    old, new, reasons = plan.given, plan.best.line, plan.best.reasons
    found = []
    if new.starts_graphs and not old.starts_graphs:
        found.append(("added", "-m megatron_cg", reasons["-m megatron_cg"]))
    for name, value in new.variables.items():
        if old.variables.get(name) != value:
            found.append(("added", f"{name}={value}", reasons.get(name, "")))
    for flag in new.flags:
        before = old.values(flag.name)
        if before is None:
            found.append(("added", str(flag), reasons.get(flag.name, "")))
        elif before != new.values(flag.name):
            text = f"{Flag(flag.name, before)} -> {' '.join(flag.values)}"
            found.append(("changed", text, reasons.get(flag.name, "")))
    for flag in old.flags:
        if new.values(flag.name) is None:
            found.append(("removed", str(flag), reasons.get(flag.name, "")))
    unique = dict.fromkeys(found)
    return [{"what": what, "flag": flag, "reason": reason} for what, flag, reason in unique]


def as_json(plan: Edited) -> dict[str, Any]:
    """The plan as JSON; memory in bytes."""
    best = plan.best
    return {
        "accepted": plan.accepted,
        "gpus": asdict(plan.gpus),
        "command": str(best.line),
        "changes": changes(plan),
        "refused": [asdict(violation) for violation in unfixed(best)],
        "notes": list(best.settings.notes),
        "layers": [
            {
                "name": layer.name,
                "kind": layer.kind,
                "scopes": list(layer.scopes),
                "captured": [part.name for part in layer.captured],
                "eager": dict(layer.eager),
            }
            for layer in best.layers
        ],
        "memory": best.memory and {**asdict(best.memory), "total": best.memory.total},
        "memory_without_graphs": plan.eager and {**asdict(plan.eager), "total": plan.eager.total},
        "gpu_memory": plan.room,
        "similar": similar_runs(best.settings, best.layers) if best.layers else [],
    }


def similar_runs(settings: Settings, layers: Sequence[Layer], count: int = 2) -> list[str]:
    """A sentence for each of the ``count`` measured runs that are nearest.

    Graphs remove the host's time to launch kernels, which hardly depends on sizes; the GPU's work
    does. So runs are compared by the work of one layer: tokens of a microbatch on one GPU, times
    the parameters on it that one token uses.
    """
    shape = Shape(settings)
    decoder = [layer for layer in layers if not layer.name.startswith("MTP")]
    used = sum(part.used for layer in decoder for part in layer.parts)
    work = shape.tokens * used / max(1, len(decoder))
    kind = "MoE" if settings.run.is_moe else "dense"
    whole = any(part.name == "experts" for layer in layers for part in layer.captured)

    def distance(row: dict[str, Any]) -> tuple[bool, bool, float]:
        holds_experts = row["captured"].endswith("moe")
        other = kind == "MoE" and holds_experts is not whole
        return row["kind"] != kind, other, abs(math.log(work / row["work_per_layer"]))

    rows = sorted(json.loads(_ROWS.read_text(encoding="utf-8")), key=distance)
    return [_sentence(row, work / row["work_per_layer"]) for row in rows[:count]]


def _sentence(row: dict[str, Any], times: float) -> str:
    return (
        f"{row['shape']}, {row['gpus']}, {row['captured']}: {row['eager_ms']:,} ms eagerly"
        f"{_busy(row, 'eager')}, {row['graphs_ms']:,} with graphs{_busy(row, 'graphs')}. A layer "
        f"here has {times:.2g} times its work ({row['results']})"
    )


def _busy(row: dict[str, Any], name: str) -> str:
    busy = row[f"{name}_busy_ms"]
    return "" if busy is None else f" (GPU busy {busy / row[f'{name}_ms']:.0%})"


def text_of(plan: Edited) -> str:
    """The plan for a terminal."""
    return "\n".join(_lines(plan)).rstrip() + "\n"


def _lines(plan: Edited) -> Iterator[str]:
    best = plan.best
    yield f"{plan.given.script} on {plan.gpus.count:,} GPUs"
    if plan.gpus.guess:
        yield from _wrapped(f"{plan.gpus.guess}: give --gpus N, before the bare --", "  ")
    yield ""
    if best.memory is None:
        yield "Refused:"
        for item in unfixed(best):
            yield from _item(f"{item.found}: {item.reason}")
            if item.remedy:
                yield from _wrapped(f"Instead: {item.remedy}.", "      ")
        return
    yield from _edits(plan)
    yield from _captured(best.layers)
    yield from _memory(plan, best.memory)
    yield "Measured runs most like it:"
    for sentence in similar_runs(best.settings, best.layers):
        yield from _item(sentence)
    yield ""
    for note in best.settings.notes:
        yield from _item(note)


def _edits(plan: Edited) -> Iterator[str]:
    made = changes(plan)
    if not made:
        yield "The command can run as it is."
        yield ""
        return
    yield "Changes:"
    signs = {"added": "+", "removed": "-", "changed": "~"}
    for (what, reason), same in groupby(made, lambda change: (change["what"], change["reason"])):
        flags = " ".join(change["flag"] for change in same)
        yield from _wrapped(f"{signs[what]} {flags}", "  ")
        yield from _wrapped(reason, "      ")
    yield ""
    yield "The command:"
    yield ""
    yield str(plan.best.line)
    yield ""


def _captured(layers: Sequence[Layer]) -> Iterator[str]:
    yield "Captured, by layer:"
    alike: dict[Any, list[Layer]] = {}
    for layer in layers:
        alike.setdefault((layer.kind, layer.scopes, layer.captured, layer.eager), []).append(layer)
    for same in alike.values():
        first = same[0]
        parts = ", ".join(part.name for part in first.captured) or "nothing"
        scopes = " ".join(first.scopes) or "no scope"
        yield from _item(f"{_numbers(same)} ({first.kind}), {scopes}: {parts}")
        for part, reason in first.eager:
            yield from _wrapped(f"eager: {part}: {reason}", "      ")
    yield ""


def _numbers(layers: Sequence[Layer]) -> str:
    """The names of layers, neighbours as ranges: ``0-3, 5, MTP 0``."""
    found: list[list[str]] = []
    for name in (layer.name for layer in layers):
        last = found[-1][-1] if found else ""
        if name.isdecimal() and last.isdecimal() and int(name) == int(last) + 1:
            found[-1].append(name)
        else:
            found.append([name])
    return ", ".join("-".join(dict.fromkeys((run[0], run[-1]))) for run in found)


def _memory(plan: Edited, memory: Memory) -> Iterator[str]:
    yield f"Parameters: {memory.parameters:,} in all, {memory.of_rank:,} on a rank before sharding,"
    yield f"{memory.sharded:,} after it."
    yield ""
    yield "Memory of one GPU, MiB:"
    rows = {**memory.terms, **memory.graphs}
    rows["fp32 gradient copies, optimizer step"] = memory.copies
    rows["eager activations and logits, passes"] = memory.passes
    rows["outside of torch's allocator"] = memory.outside
    for name, size in rows.items():
        if size:
            yield f"  {name:<40}{size / 2**20:>12,.0f}"
    eager = "" if plan.eager is None else f", {_gib(plan.eager.total)} without graphs"
    verdict = "fits" if plan.accepted else "does not fit"
    yield from _wrapped(
        f"{verdict}: {_gib(memory.total)}{eager}, of {_gib(plan.room)}. Gradient copies lie in "
        "idle memory of the graphs where there is room.",
        "",
    )
    yield from _alternatives(plan)
    yield ""


def _alternatives(plan: Edited) -> Iterator[str]:
    for tried in plan.tried:
        if tried.memory is not None and tried.choice != plan.best.choice:
            word = "fits" if tried.fits(plan.room) else "does not fit"
            yield from _wrapped(f"{_choice(tried)}: {word}, {_gib(tried.memory.total)}", "  ")
    if plan.accepted or plan.eager is None:
        return
    if plan.eager.total > plan.room:
        yield from _wrapped(
            "It does not fit without graphs either: use more GPUs, a larger "
            "--expert-model-parallel-size or --tensor-model-parallel-size, a shorter --seq-length "
            "or a smaller --micro-batch-size, or --recompute-granularity.",
            "  ",
        )


def _choice(tried: Tried) -> str:
    if tried.choice is not None:
        return str(tried.choice)
    names = ("--cuda-graph-modules", "--cg-moe-rows", "--cg-layers")
    given = [str(Flag(n, v)) for n in names if (v := tried.line.values(n)) is not None]
    return " ".join(given) or "whole layers"


def _gib(size: int) -> str:
    return f"{size / 2**30:,.1f} GiB"


def _item(text: str) -> Iterator[str]:
    yield from textwrap.wrap(text, WIDTH, initial_indent="  - ", subsequent_indent="    ", **_WHOLE)


def _wrapped(text: str, indent: str) -> Iterator[str]:
    yield from textwrap.wrap(
        text, WIDTH, initial_indent=indent, subsequent_indent=f"{indent}  ", **_WHOLE
    )


_WHOLE: dict[str, Any] = {"break_long_words": False, "break_on_hyphens": False}
