"""Captures tiny layers on the meta device, one for each set of flags, and says how each ended.

``python -m tests.unit.tools.plan.sweep_worker CASES.json ENDS.json``, in a process of its own, like
a plan. Our rules are reported but not enforced: what they refuse is traced all the same.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from megatron_cg.tools.plan.worker import ready_to_plan


def main(cases: str, ends: str) -> None:
    with ready_to_plan():
        found = [end_of(words) for words in json.loads(Path(cases).read_text(encoding="utf-8"))]
        Path(ends).write_text(json.dumps(found, indent=1), encoding="utf-8")


def end_of(words: list[str]) -> dict[str, Any]:
    """``rules`` that are broken, and one more key that says how the trace ended."""
    from megatron_cg.tools.plan.fake_machine import simulated_gpus
    from megatron_cg.tools.plan.request import Request
    from megatron_cg.tools.plan.settings import read_settings

    with simulated_gpus():
        settings = read_settings(Request("a try", tuple(words), 2))
        rules = sorted({one.rule for one in settings.broken})
        refused = settings.usage or settings.megatron
        return {"rules": rules, **({"refused": refused} if refused else traced(settings))}


def traced(settings: Any) -> dict[str, Any]:
    """How a capture of the layers on the meta device ends."""
    from megatron_cg.errors import HostSyncError
    from megatron_cg.tools.plan.details import details

    notes: list[str] = []
    try:
        found = details(settings, notes)
    except HostSyncError as error:
        return {"host read": error.where}
    except (Exception, SystemExit) as error:
        return {"not built": f"{type(error).__name__}: {error}"}
    return {"captured": found["graphs"]["captured"]} if "graphs" in found else {"not built": notes}


if __name__ == "__main__":
    main(*sys.argv[1:])
