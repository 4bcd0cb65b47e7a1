"""Makes plans: ``python -m megatron_cg.tools.plan.worker REQUESTS.json PLANS.json``.

It runs in its own process, where the fakes of TE are installed before Megatron is imported.
"""

from __future__ import annotations

import importlib
import json
import logging
import sys
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from megatron_cg.tools.plan.fakes.packages import install
from megatron_cg.tools.plan.request import Request
from megatron_cg.upstream.patch import put_over

FORMAT = 1


@contextmanager
def ready_to_plan() -> Iterator[None]:
    """Inside the block plans can be made: TE is replaced by fakes and Megatron is imported.

    Turns off warnings and logs of this process permanently.
    """
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    with ExitStack() as stack:
        stack.callback(install())
        from megatron_cg.integrations.megatron.full_recompute import allow_full_recompute

        importlib.import_module("megatron_cg.tools.plan.details")
        # As runs with this package may recompute whole layers.
        stack.callback(allow_full_recompute())
        stack.callback(docstrings_read_once())
        yield


def docstrings_read_once() -> Callable[[], None]:
    """Make Megatron read its configurations' docstrings once, not per parser; returns the undo.

    Megatron parses the sources of all of them each time. That takes a third of the time of a small
    model's plan.
    """
    from megatron.training import argument_utils

    factory = getattr(argument_utils, "ArgumentGroupFactory", None)
    name = "_get_field_docstrings"
    read = getattr(factory, name, None)
    if read is None:
        return lambda: None
    known: dict[type, dict[str, str]] = {}

    def read_once(self: Any, configuration: type) -> dict[str, str]:
        if configuration not in known:
            known[configuration] = read(self, configuration)
        return dict(known[configuration])

    return put_over(factory, name, read_once)


def main(argv: Sequence[str]) -> int:
    """Read the requests, make the plans, write them; returns the exit code."""
    with ready_to_plan():
        requests = json.loads(Path(argv[0]).read_text(encoding="utf-8"))
        plans = [make_plan(Request(**request)) for request in requests]
        Path(argv[1]).write_text(json.dumps(plans, indent=1), encoding="utf-8")
    return 0


def make_plan(request: Request) -> dict[str, Any]:
    """Make one plan; errors in the flags are reported in it and not raised."""
    from megatron_cg.tools.plan.fake_machine import simulated_gpus
    from megatron_cg.tools.plan.settings import read_settings

    with simulated_gpus(request.environment):
        settings = read_settings(request)
        plan: dict[str, Any] = {
            "format": FORMAT,
            "title": request.title,
            "flags": list(request.words),
            "usage": settings.usage,
            "violations": [asdict(violation) for violation in settings.broken],
            "megatron": settings.megatron,
            "notes": settings.notes,
        }
        if settings.usage is None:
            plan["gpus"] = settings.args.world_size
            if not settings.broken and settings.megatron is None:
                plan.update(_details(settings, plan["notes"], plan["violations"]))
        return plan


def _details(settings: Any, notes: list[str], violations: list[dict[str, str]]) -> dict[str, Any]:
    """Details of a run that breaks no rule; if a model cannot be planned, ``notes`` says so.

    Some errors appear only when Megatron creates process groups, builds the model or runs a layer.
    They count as broken rules. So does a host that waits for the device inside a captured region.
    """
    from megatron_cg.errors import HostSyncError, MegatronCGError
    from megatron_cg.tools.plan.details import details
    from megatron_cg.tools.plan.fake_machine import SizesError
    from megatron_cg.tools.plan.settings import error_text

    try:
        return details(settings, notes)
    except HostSyncError as error:
        violations.append(asdict(error.violation))
        return {}
    except SizesError as error:
        return {"megatron": str(error)}
    except MegatronCGError as error:
        notes.append(str(error))
        return {}
    except Exception as error:
        if not _came_from_megatron(error):
            raise
        return {"megatron": error_text(error)}


def _came_from_megatron(error: Exception) -> bool:
    """Whether the error came from Megatron's code; otherwise this package has a bug."""
    frames = (frame for frame, _ in traceback.walk_tb(error.__traceback__))
    return any(frame.f_globals.get("__name__", "").startswith("megatron.") for frame in frames)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
