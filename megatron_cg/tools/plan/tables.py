"""Prints a plan: readable at 100 columns, with the same text for the same plan."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
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
)


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
    _print_model(console, plan["model"])
    _print_layers(console, plan["layers"])
    if "graph_memory" in plan:
        _print_inputs(console, plan["layers"])
        _print_layer_memory(console, plan["layers"])
        _print_memory(console, plan["graph_memory"])
        _print_kernels(console, plan)
        _line(console, plan["worth"]["text"])
    _print_fsdp(console, plan["fsdp"])


def _print_rules(console: Console, plan: dict[str, Any]) -> None:
    broken = plan["violations"]
    if not broken and plan["megatron"] is None:
        _line(console, "No rule is broken: graphs can run.")
        return
    if broken:
        count = len(broken)
        _line(console, f"Graphs cannot run as configured, {count} reason{'s' * (count != 1)}:")
        for number, item in enumerate(broken, 1):
            _line(console, f"{number}. {item['found']}: {item['reason']}. [{item['rule']}]")
            _line(console, f"   Instead: {item['remedy']}.")
    if plan["megatron"] is not None:
        also = " too, at its first broken rule" if broken else ""
        _line(console, f"Megatron stops{also} with: {plan['megatron']}")


def _print_model(console: Console, model: dict[str, Any]) -> None:
    _line(
        console,
        f"{model['class']} of {model['layers']} layers, {model['parameters_on_rank_0']:,} "
        f"parameters on rank 0; sequences of {model['sequence_length']}, micro batch "
        f"{model['micro_batch_size']}, microbatches a step: {model['microbatches']}; data parallel "
        f"{model['data_parallel']}, tensor {model['tensor_parallel']}, expert "
        f"{model['expert_parallel']}, context {model['context_parallel']}.",
    )


def _print_layers(console: Console, layers: Sequence[dict[str, Any]]) -> None:
    table = _table("What is captured", "layers", "kind", "captured", "stays eager, and why")
    for numbers, layer in _runs(layers, ("kind", "captured", "eager")):
        eager = "\n".join(f"{e['part']}: {e['reason']}" for e in layer["eager"])
        table.add_row(numbers, layer["kind"], ", ".join(layer["captured"]) or "-", eager or "-")
    console.print(table)


def _print_inputs(console: Console, layers: Sequence[dict[str, Any]]) -> None:
    graphed = [layer for layer in layers if "memory" in layer]
    table = _table("Static inputs of a graph", "layers", "input", "shape", "dtype", "MiB", "how")
    for numbers, layer in _runs(graphed, ("static_inputs",), _input_signature):
        for entry in layer["static_inputs"]:
            how = "copied in" if entry["copied"] else "read in place"
            shape = "x".join(map(str, entry["shape"]))
            table.add_row(numbers, entry["name"], shape, entry["dtype"], _mib(entry["bytes"]), how)
    console.print(table)


def _input_signature(layer: dict[str, Any]) -> Any:
    return [(e["name"], e["shape"], e["dtype"], e["copied"]) for e in layer["static_inputs"]]


def _print_layer_memory(console: Console, layers: Sequence[dict[str, Any]]) -> None:
    graphed = [layer for layer in layers if "memory" in layer]
    table = _table(
        "Memory of one graph, MiB",
        *("layers", "inputs", "saved", "outputs", "held", "input grad", "weight grads"),
        *("workspace fwd", "bwd"),
        right=True,
    )
    names = ("static_inputs", "saved_activations", "outputs", "held", "input_gradient")
    more = ("weight_gradients", "forward_workspace", "backward_workspace")

    def shown(layer: dict[str, Any]) -> list[str]:
        return [_mib(layer["memory"][name]) for name in (*names, *more)]

    for numbers, layer in _runs(graphed, ("memory",), shown):
        table.add_row(numbers, *shown(layer))
    console.print(table)


def _print_memory(console: Console, memory: dict[str, int]) -> None:
    table = _table("Estimated memory of all graphs", "term", "what it is", "MiB")
    table.columns[-1].justify = "right"
    for name, text in _MEMORY:
        table.add_row(name, text, _mib(memory[name]))
    table.add_section()
    table.add_row("total", "held as long as the graphs live", _mib(memory["total"]))
    console.print(table)
    _line(
        console,
        "An eager run has the saved activations, outputs and gradients of these parts too, but "
        "gives their memory back; the pool of the graphs keeps it.",
    )


def _print_kernels(console: Console, plan: dict[str, Any]) -> None:
    graphs = plan["graphs"]
    _line(
        console,
        f"{graphs['captured']} graphs (one a layer, replayed for every microbatch), "
        f"{graphs['replays_per_step']} replays a step. Estimated kernel launches saved per step: "
        f"{plan['kernels']['saved_per_step']:,}, taking each operation that is no view for one, "
        "less what a replay launches.",
    )


def _print_fsdp(console: Console, fsdp: dict[str, Any]) -> None:
    table = _table(
        f"Megatron-FSDP's units ({fsdp['strategy']}), MiB",
        *("unit", "parameters", "elements", "buffers", "weights whole", "gradients whole"),
    )
    for name, unit in _unit_runs(fsdp["units"]):
        whole = [_whole(unit, kind) for kind in ("weights", "gradients")]
        table.add_row(name, f"{unit['parameters']:,}", f"{unit['elements']:,}", _home(unit), *whole)
    console.print(table)
    totals = _table("Megatron-FSDP's memory on one rank", "what", "of what", "MiB")
    for kind, by_name in fsdp["totals"].items():
        for name, size in by_name.items():
            totals.add_row(kind.replace("_", " "), name, _mib(size))
    console.print(totals)


def _unit_runs(units: Sequence[dict[str, Any]]) -> Iterable[tuple[str, dict[str, Any]]]:
    """Groups of equal neighbouring units, with the names of the first and the last."""
    numbered = [{**unit, "index": number} for number, unit in enumerate(units)]
    keys = ("parameters", "elements", "double_buffered", "buckets")
    for numbers, unit in _runs(numbered, keys):
        _, dash, last = numbers.partition("-")
        name = unit["name"]
        if dash:
            name = f"{name} to {units[int(last)]['name'].removeprefix('layer ')}"
        yield name, unit


def _home(unit: dict[str, Any]) -> str:
    if unit["unit"] is None:
        return "its own (no unit)"
    return "the two shared" if unit["double_buffered"] else "its own"


def _whole(unit: dict[str, Any], name: str) -> str:
    by_dtype: dict[str, int] = {}
    for bucket in unit["buckets"]:
        if name in bucket:
            dtype = bucket[name]["dtype"]
            by_dtype[dtype] = by_dtype.get(dtype, 0) + bucket[name]["unsharded"]
    return "\n".join(f"{_mib(size)} {dtype}" for dtype, size in by_dtype.items())


def _runs(
    layers: Sequence[dict[str, Any]], keys: Sequence[str], signature: Any = None
) -> Iterable[tuple[str, dict[str, Any]]]:
    """Groups of equal neighbouring layers, as "0" or "1-7", and the first layer of each."""
    alike = signature or (lambda layer: [layer[key] for key in keys])
    group: list[dict[str, Any]] = []
    for layer in [*layers, None]:
        # In a list of graphed layers only, one may be missing between two equal layers.
        follows = group and layer is not None and layer["index"] == group[-1]["index"] + 1
        if group and not (follows and alike(layer) == alike(group[0])):
            first, last = group[0]["index"], group[-1]["index"]
            yield (str(first) if first == last else f"{first}-{last}"), group[0]
            group = []
        if layer is not None:
            group.append(layer)


def _table(title: str, *columns: str, right: bool = False) -> Table:
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
    for number, column in enumerate(columns):
        justify: Any = "right" if (right and number) or column == "MiB" else "left"
        table.add_column(column, justify=justify, overflow="fold")
    return table


def _mib(size: int) -> str:
    return f"{size / 2**20:,.1f}"


def _line(console: Console, text: str) -> None:
    console.print(escape(text), highlight=False)
