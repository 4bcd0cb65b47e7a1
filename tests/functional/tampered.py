"""The example script with one thing broken or interrupted on purpose.

Run by the launcher instead of ``examples/pretrain_gpt.py``; the functional tests look at how
the run ends. What is done is named by MEGATRON_CG_MUTATE, for the graph run alone, and by
MEGATRON_CG_SCENARIO, for both runs: ``action@detail``. Without them it is the example as it is.
"""

import os
import runpy
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

from tests.functional.tampering import captures, life, replay

SCRIPT = Path(__file__).parents[2] / "examples" / "pretrain_gpt.py"
MUTATION, SCENARIO = "MEGATRON_CG_MUTATE", "MEGATRON_CG_SCENARIO"

ACTIONS: dict[str, Callable[[str], None]] = {
    "none": lambda _: None,
    "fail": captures.fail_at,
    "again": lambda steps: life.captured_again_before(map(int, steps.split(","))),
    "capture-often": lambda times: life.capture_often(int(times)),
    "wrong-gradient": replay.wrong_gradient,
    **{name: partial(life.end_at, name) for name in life.ENDS},
    "fault": replay.fault,
    "route": replay.route,
    "earlier-error": lambda _: captures.fail_earlier(),
}


def main() -> None:
    names = []
    is_eager = "--cuda-graph-impl none" in " ".join(sys.argv)
    for variable in (SCENARIO,) if is_eager else (MUTATION, SCENARIO):
        name, _, detail = os.environ.get(variable, "none").partition("@")
        ACTIONS[name](detail)
        names.append(name)
    try:
        runpy.run_path(str(SCRIPT), run_name="__main__")
    except SystemExit:
        if "destroy" not in names:
            raise
        life.destroy_groups()


if __name__ == "__main__":
    main()
