"""What a report of memory says of one kind."""

from __future__ import annotations

from megatron_cg.memory.usage import MemoryReport


def held(report: MemoryReport, kind: str) -> int:
    """Bytes held of one kind, over all holders."""
    return sum(row.held for row in report.rows if row.kind == kind)
