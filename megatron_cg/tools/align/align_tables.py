"""Prints a comparison as a table."""

from __future__ import annotations

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from megatron_cg.consensus.exchange import AgreementTime
from megatron_cg.telemetry.capture_report import counts_text
from megatron_cg.tools.align.compare import DIFFERENT, IDENTICAL, Comparison, Outcome, Value

_SHOWN_SHARDS = 5
_COLOURS = {IDENTICAL: "green", DIFFERENT: "red"}


def print_report(console: Console, title: str, outcome: Outcome, notice: str = "") -> None:
    """Print the steps of rank 0, what else was compared, the result and ``notice``."""
    comparison = outcome.comparison
    if outcome.log_tail:
        console.print("[bold]End of its log[/bold]")
        console.print(outcome.log_tail, markup=False, highlight=False, soft_wrap=True)
    if comparison.values:
        console.print(_table(title, comparison))
    if comparison.shards:
        _print_shards(console, comparison)
    if comparison.graphs:
        console.print(f"graphs, all ranks: {counts_text(comparison.graphs)}", soft_wrap=True)
        votes = (outcome.graphed or {}).get(0, {}).get("agreement")
        if votes:
            console.print(f"agreement, rank 0: {AgreementTime(**votes).text()}", soft_wrap=True)
    colour = _COLOURS.get(comparison.status, "red")
    reason = f": {comparison.reason}" if comparison.reason else ", to the last bit"
    reason += f" ({notice})" if notice else ""
    console.print(f"[bold {colour}]{comparison.status.upper()}[/]{escape(reason)}", soft_wrap=True)


def _table(title: str, comparison: Comparison) -> Table:
    table = Table("step", "what", title=escape(title))
    for column in ("eager", "with graphs", "difference"):
        table.add_column(column, justify="right")
    table.add_column("bits")
    for value in comparison.values:
        if value.rank == 0 or not value.same:
            table.add_row(*_row(value))
    return table


def _row(value: Value) -> tuple[str, ...]:
    where = value.name if value.rank == 0 else f"{value.name} (rank {value.rank})"
    bits = "same" if value.same else "[bold red]differ[/]"
    difference = "0" if value.same else f"{value.difference:.3e}"
    numbers = (_shown(value.eager), _shown(value.graphed), difference)
    return (str(value.step), escape(where), *numbers, bits)


def _shown(text: str | None) -> str:
    return "absent" if text is None else f"{float.fromhex(text):.9g}"


def _print_shards(console: Console, comparison: Comparison) -> None:
    different = comparison.different_shards
    console.print(f"parameter shards, all ranks: {comparison.shards}, different: {len(different)}")
    for name in different[:_SHOWN_SHARDS]:
        console.print(f"  differs: {name}", markup=False, highlight=False, soft_wrap=True)
    if len(different) > _SHOWN_SHARDS:
        console.print(f"  ... and {len(different) - _SHOWN_SHARDS} more")
