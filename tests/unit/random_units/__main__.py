"""Trains random units eagerly and with tapes as graphs, and compares the bits.

``python -m tests.unit.random_units --seeds 0 3000 --jobs 2`` draws from each seed a model of one to
three units, what they do, and what happens between the steps. A program is captured and equal,
refused with a reason, different, hanging or crashed. The last three are printed, and the exit code
is 1. On a GPU, with ``RANDOM_UNITS_BACKEND=native`` (or ``te``), they are captured as CUDA graphs.
"""

import argparse
import time
from collections import Counter

from tests.unit.random_units.programs import alone
from tests.unit.random_units.search import outcomes
from tests.unit.random_units.training import Outcome


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seeds", nargs=2, type=int, default=(0, 300), metavar=("FROM", "TO"))
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--each", action="store_true", help="try each thing alone, not seeds")
    options = parser.parse_args()
    found, began = list[Outcome](), time.monotonic()
    tries = [*alone()] if options.each else [*range(*options.seeds)]
    for given, program, outcome in outcomes(tries, options.jobs):
        found.append(outcome)
        if outcome.fails:
            print(f"{given}: {outcome.kind}: {outcome.reason[:300]}\n    {program}", flush=True)
    print(f"{len(found)} programs in {time.monotonic() - began:.0f} s")
    return summary(found)


def summary(found: list[Outcome]) -> int:
    kinds = Counter(one.kind for one in found)
    for kind in ("equal", "refused", "not eager", "different", "hanging", "crashed"):
        print(f"{kinds[kind]:6} {'captured and ' * (kind == 'equal')}{kind}")
        reasons = Counter(one.reason for one in found if one.kind == kind)
        for reason, count in reasons.most_common() if kind == "refused" else ():
            print(f"       {count:6} {reason}")
    return int(any(kinds[kind] for kind in ("different", "hanging", "crashed")))


if __name__ == "__main__":
    raise SystemExit(main())
