"""Trains random units eagerly and with tapes as graphs, and compares the bits.

``python -m tests.unit.random_units --seeds 0 3000 --jobs 2`` draws from each seed a model of one to
three units, what they do, and what happens between the steps. A program is captured and equal,
refused with a reason, different, hanging or crashed. Of the last three, the smallest program that
still ends in that way is printed. Exit code 1: there was one.
"""

from __future__ import annotations

import argparse
import json
import re
import time
from collections import Counter
from dataclasses import asdict
from pathlib import Path

from tests.unit.random_units.search import outcomes


def main() -> int:
    """Try the seeds, print each failure and the counts."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seeds", nargs=2, type=int, default=(0, 300), metavar=("FROM", "TO"))
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--whole", action="store_true", help="print failing programs as drawn")
    parser.add_argument("--json", type=Path, help="write program and outcome of each seed there")
    options = parser.parse_args()
    found, began = {}, time.monotonic()
    for seed, text, outcome in outcomes([*range(*options.seeds)], options.jobs, not options.whole):
        found[seed] = {"program": text, **asdict(outcome)}
        if outcome.fails:
            print(f"seed {seed}: {outcome.kind}: {outcome.reason[:300]}\n    {text}", flush=True)
    if options.json:
        options.json.write_text(json.dumps(found, indent=1))
    kinds = Counter(str(one["kind"]) for one in found.values())
    print(f"{len(found)} programs in {time.monotonic() - began:.0f} s")
    for kind in ("equal", "refused", "different", "hanging", "crashed"):
        print(f"{kinds[kind]:6} {'captured and ' if kind == 'equal' else ''}{kind}")
        reasons = Counter(one["reason"] for one in found.values() if one["kind"] == kind)
        for reason, count in reasons.most_common() if kind == "refused" else ():
            print(f"       {count:6} {reason}")
    failed = [one for one in found.values() if one["kind"] not in ("equal", "refused")]
    kinds_of_failures = Counter(re.sub(r"\(\d+, '", "('", str(one["program"])) for one in failed)
    for what, count in kinds_of_failures.most_common():
        print(f"{count:6} fail as: {what}")
    return 0 if set(kinds) <= {"equal", "refused"} else 1


if __name__ == "__main__":
    raise SystemExit(main())
