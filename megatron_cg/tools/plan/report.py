"""Shows a plan: one set of rows, as JSON or as text for a terminal."""

from __future__ import annotations

import json
import math
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from itertools import groupby
from pathlib import Path
from typing import Any

from megatron_cg.tools.launch_line import Flag, LaunchLine
from megatron_cg.tools.plan.edit import LAUNCHER, Edited, Tried, choice_of, gib
from megatron_cg.tools.plan.layers import Layer, Shape
from megatron_cg.tools.plan.memory import Memory

WIDTH = 100
_ROWS = Path(__file__).with_name("measured_rows.json")
_SMALLER = (
    "It does not fit without graphs either: use more GPUs, a larger --expert-model-parallel-size "
    "or --tensor-model-parallel-size, a shorter --seq-length or a smaller --micro-batch-size, or "
    "--recompute-granularity."
)


def as_json(plan: Edited) -> dict[str, Any]:
    """The plan as JSON; memory in bytes."""
    best = plan.best
    return {
        "script": plan.given.script,
        "accepted": plan.accepted,
        "gpus": asdict(plan.gpus),
        "refused": [asdict(violation) for violation in best.refused],
        "changes": changes(plan),
        "command": str(best.line),
        "layers": _alike(best.layers),
        "memory": _memory(best.memory),
        "memory_without_graphs": _memory(plan.eager),
        "gpu_memory": plan.room,
        "others": [
            {"choice": _words(tried), "fits": tried.fits(plan.room), "total": tried.memory.total}
            for tried in plan.tried
            if tried.memory is not None and choice_of(tried.line) != choice_of(best.line)
        ],
        "similar": similar_runs(best) if best.layers else [],
        "notes": list(best.settings.notes),
    }


def changes(plan: Edited) -> list[dict[str, str]]:
    """What was added, changed and removed, each with its reason."""
    reasons, rows = plan.best.reasons, []
    old, new = _pieces(plan.given), _pieces(plan.best.line)
    if LAUNCHER in reasons:
        new = {LAUNCHER: LAUNCHER, **new}
    for name in {**new, **old}:
        if old.get(name) != new.get(name):
            what = "removed" if name not in new else "changed" if name in old else "added"
            text = " -> ".join(pieces[name] for pieces in (old, new) if name in pieces)
            rows.append({"what": what, "flag": text, "reason": reasons[name]})
    return rows


def _pieces(line: LaunchLine) -> dict[str, str]:
    """Variables and flags by name, as they are written."""
    pieces = {name: f"{name}={value}" for name, value in line.variables.items()}
    return pieces | {flag.name: str(flag) for flag in line.flags}


def _alike(layers: Sequence[Layer]) -> list[dict[str, Any]]:
    """Layers by what graphs hold of them; neighbours as ranges: ``0-3, 5, MTP 0``."""
    alike: dict[Any, list[Layer]] = {}
    for layer in layers:
        alike.setdefault((layer.kind, layer.scopes, layer.captured, layer.eager), []).append(layer)
    rows = []
    for same in alike.values():
        ranges: list[list[str]] = []
        for name in (layer.name for layer in same):
            last = ranges[-1][-1] if ranges else ""
            if name.isdecimal() and last.isdecimal() and int(name) == int(last) + 1:
                ranges[-1].append(name)
            else:
                ranges.append([name])
        row = {
            "layers": ", ".join("-".join(dict.fromkeys((r[0], r[-1]))) for r in ranges),
            "kind": same[0].kind,
            "scopes": list(same[0].scopes),
            "captured": [part.name for part in same[0].captured],
            "eager": dict(same[0].eager),
        }
        rows.append(row)
    return rows


def _memory(memory: Memory | None) -> dict[str, Any] | None:
    return None if memory is None else {**asdict(memory), "total": memory.total}


def _words(tried: Tried) -> str:
    flags = [str(Flag(name, values)) for name, values in choice_of(tried.line).items()]
    return " ".join(flags) or "whole layers"


def similar_runs(best: Tried) -> list[str]:
    """A sentence for each of the two measured runs that are nearest.

    Graphs remove the host's time to launch kernels, which hardly depends on sizes; the GPU's work
    does. So runs are compared by the work of one layer: tokens of a microbatch on one GPU, times
    the parameters on it that one token uses.
    """
    shape = Shape(best.settings)
    args, run = best.settings.args, best.settings.run
    decoder = [layer for layer in best.layers if layer.name.isdecimal()]
    used = sum(
        part.split // shape.tensor
        + part.whole
        + part.experts // (args.num_experts or 1) * args.moe_router_topk
        for layer in decoder
        for part in layer.parts
    )
    work = shape.tokens * used / max(1, len(decoder))
    kind = "MoE" if run.is_moe else "dense"
    whole = any(layer.holds("experts") for layer in best.layers)

    def distance(row: dict[str, Any]) -> tuple[bool, bool, float]:
        other = kind == "MoE" and row["captured"].endswith("moe") is not whole
        return row["kind"] != kind, other, abs(math.log(work / row["work_per_layer"]))

    rows = sorted(json.loads(_ROWS.read_text(encoding="utf-8")), key=distance)
    return [
        f"{row['shape']}, {row['gpus']}, {row['captured']}: {row['eager_ms']:,} ms eagerly"
        f"{_busy(row, 'eager')}, {row['graphs_ms']:,} with graphs{_busy(row, 'graphs')}. A layer "
        f"here has {work / row['work_per_layer']:.2g} times its work ({row['results']})"
        for row in rows[:2]
    ]


def _busy(row: dict[str, Any], name: str) -> str:
    busy = row[f"{name}_busy_ms"]
    return "" if busy is None else f" (GPU busy {busy / row[f'{name}_ms']:.0%})"


def text_of(plan: dict[str, Any]) -> str:
    """The rows of :func:`as_json` for a terminal."""
    return "\n".join(_lines(plan)).rstrip() + "\n"


def _lines(plan: dict[str, Any]) -> Iterator[str]:
    yield f"{plan['script']} on {plan['gpus']['count']:,} GPUs"
    if plan["gpus"]["guess"]:
        yield from _wrapped(f"{plan['gpus']['guess']}: give --gpus N, before the bare --", "  ")
    memory = plan["memory"]
    if memory is None:
        yield "\nRefused:"
        for item in plan["refused"]:
            yield from _wrapped(f"- {item['found']}: {item['reason']}", "  ")
            if item["remedy"]:
                yield from _wrapped(f"Instead: {item['remedy']}.", "      ")
        return
    yield "\nChanges:" if plan["changes"] else "\nThe command can run as it is."
    signs = {"added": "+", "removed": "-", "changed": "~"}
    for (what, reason), same in groupby(plan["changes"], lambda row: (row["what"], row["reason"])):
        yield from _wrapped(f"{signs[what]} {' '.join(row['flag'] for row in same)}", "  ")
        yield from _wrapped(reason, "      ")
    if plan["changes"]:
        yield f"\nThe command:\n\n{plan['command']}"
    yield "\nCaptured, by layer:"
    for row in plan["layers"]:
        parts, scopes = ", ".join(row["captured"]) or "nothing", " ".join(row["scopes"])
        what = f"{row['layers']} ({row['kind']}), {scopes or 'no scope'}: {parts}"
        yield from _wrapped(f"- {what}", "  ")
        for part, reason in row["eager"].items():
            yield from _wrapped(f"eager: {part}: {reason}", "      ")
    yield f"\nParameters: {memory['parameters']:,} in all, {memory['of_rank']:,} on a rank before"
    yield f"sharding, {memory['sharded']:,} after it."
    yield "\nMemory of one GPU, MiB:"
    for phase, terms in memory["terms"].items():
        yield f"  {phase}:"
        for name, size in terms.items():
            if size:
                yield f"    {name:<40}{size / 2**20:>12,.0f}"
    yield from _verdict(plan)
    yield "\nMeasured runs most like it:"
    for text in (*plan["similar"], *plan["notes"]):
        yield from _wrapped(f"- {text}", "  ")


def _verdict(plan: dict[str, Any]) -> Iterator[str]:
    eager, room = plan["memory_without_graphs"]["total"], plan["gpu_memory"]
    words = {True: "fits", False: "does not fit"}
    sizes = f"{gib(plan['memory']['total'])}, {gib(eager)} without graphs, of {gib(room)}"
    yield f"{words[plan['accepted']]}: {sizes}. Passes and optimizer step do not"
    yield "  overlap, and copies of gradients lie in idle memory of the graphs where there is room."
    for row in plan["others"]:
        yield from _wrapped(f"{row['choice']}: {words[row['fits']]}, {gib(row['total'])}", "  ")
    if not plan["accepted"] and eager > room:
        yield from _wrapped(_SMALLER, "  ")


def _wrapped(text: str, indent: str) -> list[str]:
    return textwrap.wrap(
        text,
        WIDTH,
        initial_indent=indent,
        subsequent_indent=f"{indent}  ",
        break_long_words=False,
        break_on_hyphens=False,
    )
