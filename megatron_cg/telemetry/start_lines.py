"""``--cg-report DIR``: a recorder with what a report needs, at no cost in run time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from megatron_cg.telemetry.record import install_recorder

WRITE_SECONDS = 60.0
"""The least time between two writes. A killed run leaves the last written file."""


def start_report(directory: str, args: Any) -> Callable[[], None]:
    """Record this run for ``megatron-cg report``; returns the undo.

    Args:
        directory: where ``rank<N>.json`` is written.
        args: Megatron's validated arguments; ``log_interval`` is read.

    Raises UpstreamChangedError as :func:`megatron_cg.telemetry.record.install_recorder` does.
    """
    return install_recorder(
        directory, digests=False, interval=args.log_interval, write_seconds=WRITE_SECONDS
    )
