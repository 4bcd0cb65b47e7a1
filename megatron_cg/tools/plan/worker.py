"""Makes plans: ``python -m megatron_cg.tools.plan.worker REQUESTS.json PLANS.json``.

In a process of its own, in which the fakes of TE are installed before Megatron is imported.
"""

from __future__ import annotations

import gc
import importlib
import json
import logging
import os
import sys
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from megatron_cg.tools.plan.fakes.packages import install
from megatron_cg.upstream.patch import put_over

FORMAT = 1


@contextmanager
def ready_to_plan() -> Iterator[None]:
    """Plans can be made in the block: TE has its doubles, and Megatron is imported.

    Warnings and logs of this process are off from here on.
    """
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    with ExitStack() as stack:
        stack.callback(install())
        importlib.import_module("megatron_cg.tools.plan.details")
        stack.callback(docstrings_read_once())
        # Megatron-FSDP collects garbage for each model; what was imported is none.
        gc.freeze()
        yield


def docstrings_read_once() -> Callable[[], None]:
    """Let Megatron read the docstrings of its configurations once, not for each parser; the undo.

    It parses the sources of all of them each time, which takes a third of a small model's plan.
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
        plans = [make_plan(request) for request in requests]
        Path(argv[1]).write_text(json.dumps(plans, indent=1), encoding="utf-8")
    return 0


def make_plan(request: dict[str, Any]) -> dict[str, Any]:
    """One plan; what is wrong with the flags is in it, and not raised."""
    from megatron_cg.tools.plan.fake_machine import simulated_gpus
    from megatron_cg.tools.plan.settings import read_settings

    given = request["environment"]
    with simulated_gpus({**given, "RANK": "0", "WORLD_SIZE": "1"}):
        os.environ.pop("CUDA_DEVICE_MAX_CONNECTIONS", None)
        os.environ.update(given)
        settings = read_settings(
            request["words"],
            request["nproc"],
            given,
            own_flags=request["own_flags"],
            started_without=request["started_without"],
        )
        plan: dict[str, Any] = {
            "format": FORMAT,
            "title": request["title"],
            "flags": request["words"],
            "usage": settings.usage,
            "violations": [asdict(violation) for violation in settings.broken],
            "megatron": settings.megatron,
            "notes": settings.notes,
        }
        if settings.usage is None:
            plan["gpus"] = settings.args.world_size
        if settings.usage is None and not settings.broken and settings.megatron is None:
            plan.update(_details(settings, plan["notes"], plan["violations"]))
        return plan


def _details(settings: Any, notes: list[str], violations: list[dict[str, str]]) -> dict[str, Any]:
    """What can be said of a run that breaks no rule; a model that cannot be planned is noted.

    What Megatron refuses only when it makes process groups, builds the model or runs a layer
    counts as a broken rule. So does a host that waits for the device in what would be captured.
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
    """Whether Megatron's code was running; if not, this package has a defect."""
    frames = (frame for frame, _ in traceback.walk_tb(error.__traceback__))
    return any(frame.f_globals.get("__name__", "").startswith("megatron.") for frame in frames)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
