"""Prints a plan: readable at 100 columns, with the same text for the same plan."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import groupby
from typing import Any

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

_MEMORY = (
    ("static_inputs", "copies of the graphs' inputs"),
    ("saved_activations", "what all layers keep for their backward passes"),
    ("outputs", "outputs of the graphs"),
    ("output_gradients", "gradients of outputs, one set for all layers alike"),
    ("gradients_and_workspace", "gradients and temporary memory of one layer at a time"),
    ("torch_gemm_workspace", "workspace of torch's own matrix products"),
    ("fragmentation", "reserved by the pool and not used at its peak"),
    ("peer_memory", "slots that other GPUs write to, outside of torch's allocator"),
)


_OF_ONE_GRAPH = {
    "inputs": "static_inputs",
    "saved": "saved_activations",
    "outputs": "outputs",
    "held": "held",
    "input grad": "input_gradient",
    "weight grads": "weight_gradients",
    "workspace fwd": "forward_workspace",
    "bwd": "backward_workspace",
}
Layer = dict[str, Any]
Rows = Iterable[Sequence[str]]


def print_plan(console: Console, plan: dict[str, Any]) -> None:
    """Print ``plan``; if rules are broken, print only them."""
    gpus = f" on {plan['gpus']} GPUs" if "gpus" in plan else ""
    console.print(f"{escape(plan['title'])}{gpus}", style="bold", highlight=False)
    if plan["usage"] is not None:
        _line(console, f"The flags cannot be read: {plan['usage']}")
        return
    _print_rules(console, plan)
    for note in plan["notes"]:
        _line(console, f"Note: {note}")
    if "layers" not in plan:
        return
    _line(console, _model(plan["model"]))
    columns = ("layers", "kind", "captured", "stays eager, and why")
    _table(console, "What is captured", columns, _captured(plan["layers"]))
    if "graph_memory" in plan:
        _print_graphs(console, plan)
    _print_fsdp(console, plan["fsdp"])


def _print_rules(console: Console, plan: dict[str, Any]) -> None:
    broken = plan["violations"]
    if not broken and plan["megatron"] is None:
        _line(console, "No rule is broken: graphs can run.")
    if broken:
        count = len(broken)
        _line(console, f"Graphs cannot run as configured, {count} reason{'s' * (count != 1)}:")
    for number, item in enumerate(broken, 1):
        _line(console, f"{number}. {item['found']}: {item['reason']}. [{item['rule']}]")
        _line(console, f"   Instead: {item['remedy']}.")
    if plan["megatron"] is not None:
        also = " too, at its first broken rule" if broken else ""
        _line(console, f"Megatron stops{also} with: {plan['megatron']}")


def _model(model: dict[str, Any]) -> str:
    return (
        f"{model['class']} of {model['layers']} layers, {model['parameters_on_rank_0']:,} "
        f"parameters on rank 0; sequences of {model['sequence_length']}, micro batch "
        f"{model['micro_batch_size']}, microbatches a step: {model['microbatches']}; data parallel "
        f"{model['data_parallel']}, tensor {model['tensor_parallel']}, expert "
        f"{model['expert_parallel']}, context {model['context_parallel']}."
    )


def _captured(layers: Sequence[Layer]) -> Rows:
    for numbers, layer in _runs(layers, lambda one: (one["kind"], one["captured"], one["eager"])):
        eager = "\n".join(f"{e['part']}: {e['reason']}" for e in layer["eager"])
        yield numbers, layer["kind"], ", ".join(layer["captured"]) or "-", eager or "-"


def _print_graphs(console: Console, plan: dict[str, Any]) -> None:
    graphed = [layer for layer in plan["layers"] if "memory" in layer]
    inputs = ("layers", "input", "shape", "dtype", "MiB", "how")
    _table(console, "Static inputs of a graph", inputs, _inputs(graphed))
    rows = ((numbers, *_memory(layer)) for numbers, layer in _runs(graphed, _memory))
    _table(console, "Memory of one graph, MiB", ("layers", *_OF_ONE_GRAPH), rows, right=True)
    memory = plan["graph_memory"]
    terms = [(name, text, _mib(memory[name])) for name, text in _MEMORY]
    total = ("total", "held as long as the graphs live", _mib(memory["total"]))
    columns = ("term", "what it is", "MiB")
    _table(console, "Estimated memory of all graphs", columns, terms, last=total)
    _line(
        console,
        "An eager run has the saved activations, outputs and gradients of these parts too, but "
        "gives their memory back; the pool of the graphs keeps it.",
    )
    graphs = plan["graphs"]
    _line(
        console,
        f"{graphs['captured']} graphs (one a layer, replayed for every microbatch), "
        f"{graphs['replays_per_step']} replays a step. Estimated kernel launches saved per step: "
        f"{plan['kernels']['saved_per_step']:,}, counting one for each operation that "
        "is not a view, minus the launches of a replay.",
    )
    _line(console, plan["worth"]["text"])


def _inputs(graphed: Sequence[Layer]) -> Rows:
    names = ("name", "shape", "dtype", "copied")

    def alike(layer: Layer) -> Any:
        return [[entry[name] for name in names] for entry in layer["static_inputs"]]

    for numbers, layer in _runs(graphed, alike):
        for entry in layer["static_inputs"]:
            how = "copied in" if entry["copied"] else "read in place"
            shape = "x".join(map(str, entry["shape"]))
            yield numbers, entry["name"], shape, entry["dtype"], _mib(entry["bytes"]), how


def _memory(layer: Layer) -> list[str]:
    return [_mib(layer["memory"][name]) for name in _OF_ONE_GRAPH.values()]


def _print_fsdp(console: Console, fsdp: dict[str, Any]) -> None:
    title = f"Megatron-FSDP's units ({fsdp['strategy']}), MiB"
    columns = ("unit", "parameters", "elements", "buffers", "weights whole", "gradients whole")
    _table(console, title, columns, _units(fsdp["units"]))
    totals = (
        (kind.replace("_", " "), name, _mib(size))
        for kind, by_name in fsdp["totals"].items()
        for name, size in by_name.items()
    )
    _table(console, "Megatron-FSDP's memory on one rank", ("what", "of what", "MiB"), totals)


def _units(units: Sequence[dict[str, Any]]) -> Rows:
    """A row for each group of equal neighbouring units, named by its first and its last."""
    numbered = [{**unit, "index": number} for number, unit in enumerate(units)]
    keys = ("parameters", "elements", "double_buffered", "buckets")
    for numbers, unit in _runs(numbered, lambda one: [one[key] for key in keys]):
        _, dash, last = numbers.partition("-")
        to = f" to {units[int(last)]['name'].removeprefix('layer ')}" if dash else ""
        home = "the two shared" if unit["double_buffered"] else "its own"
        yield (
            f"{unit['name']}{to}",
            f"{unit['parameters']:,}",
            f"{unit['elements']:,}",
            "its own (no unit)" if unit["unit"] is None else home,
            _whole(unit, "weights"),
            _whole(unit, "gradients"),
        )


def _whole(unit: dict[str, Any], name: str) -> str:
    by_dtype: dict[str, int] = {}
    for bucket in unit["buckets"]:
        if name in bucket:
            dtype = bucket[name]["dtype"]
            by_dtype[dtype] = by_dtype.get(dtype, 0) + bucket[name]["unsharded"]
    return "\n".join(f"{_mib(size)} {dtype}" for dtype, size in by_dtype.items())


def _runs(layers: Sequence[Layer], alike: Callable[[Layer], Any]) -> Iterator[tuple[str, Layer]]:
    """Groups of neighbouring layers that are ``alike``, as "0" or "1-7", and their first layer."""

    def key(place: tuple[int, Layer]) -> Any:
        # In a list of graphed layers only, one may be missing between two equal layers.
        return place[1]["index"] - place[0], alike(place[1])

    for _, group in groupby(enumerate(layers), key):
        found = [layer for _, layer in group]
        first, last = found[0]["index"], found[-1]["index"]
        yield (str(first) if first == last else f"{first}-{last}"), found[0]


def _table(
    console: Console,
    title: str,
    columns: Sequence[str],
    rows: Rows,
    *,
    right: bool = False,
    last: Sequence[str] = (),
) -> None:
    """Print a table; ``last`` is a row below a line."""
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
    for number, column in enumerate(columns):
        justify: Any = "right" if (right and number) or column == "MiB" else "left"
        table.add_column(column, justify=justify, overflow="fold")
    for row in rows:
        table.add_row(*row)
    if last:
        table.add_section()
        table.add_row(*last)
    console.print(table)


def _mib(size: int) -> str:
    return f"{size / 2**20:,.1f}"


def _line(console: Console, text: str) -> None:
    console.print(escape(text), highlight=False)
