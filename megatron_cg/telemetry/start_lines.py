"""``--cg-report DIR``: the recorder with what a report needs, and nothing that costs a run time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from megatron_cg.telemetry.record import install_recorder

WRITE_SECONDS = 60.0
"""At least so long between two writes: a run that is killed leaves what was written last."""


def start_report(directory: str, args: Any) -> Callable[[], None]:
    """Record this run for ``megatron-cg report``; returns the undo.

    Args:
        directory: gets ``rank<N>.json``.
        args: Megatron's validated arguments; ``log_interval`` is read.

    Raises UpstreamChangedError as :func:`megatron_cg.telemetry.record.install_recorder`.
    """
    return install_recorder(
        directory, digests=False, interval=args.log_interval, write_seconds=WRITE_SECONDS
    )
