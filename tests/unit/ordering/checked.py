"""Traces every configuration in one of several ranks, and checks it without each wait in turn."""

from __future__ import annotations

import json
import linecache
from pathlib import Path
from typing import Any

import megatron.core
import torch.distributed as dist

from tests.unit.ordering.check import Race, races
from tests.unit.ordering.configurations import configurations
from tests.unit.ordering.report import described
from tests.unit.ordering.trace import Site, Trace

FSDP = Path(megatron.core.__file__).parent / "distributed/fsdp/src/megatron_fsdp"


def check_all(folder: Path, places: frozenset[Site]) -> None:
    """Check every configuration for this number of ranks, also without each wait in turn.

    ``places`` are those of the sources, which take longer to read than a configuration to train.
    """
    ranks, rank = dist.get_world_size(), dist.get_rank()
    found: dict[str, Any] = {}
    missed: dict[Site, list[str]] = {}
    met: set[Site] = set()
    for name, trace in configurations()[ranks].items():
        made = trace()
        there = races(made.entries)
        found[name] = {
            "races": described(made, there),
            "kinds": sorted({kind(made, race) for race in there}),
            "entries": len(made.entries),
        }
        met |= made.waits().keys()
        for place in made.waits().keys() & places:
            if not there and rank == 0 and not missed.get(place):
                without = races(made.entries, without=[place])
                missed[place] = described(made, without)[:1]
    unknown = [str(place) for place in met - places if place.file.startswith("megatron_cg/")]
    waits = [[*place, *missed.get(place, [])] for place in sorted(met & places)]
    report = {"found": found, "waits": waits, "unknown": unknown}
    (folder / f"{rank} of {ranks}.json").write_text(json.dumps(report))


def kind(trace: Trace, race: Race) -> str:
    """A race without its bytes: which of the known findings it may be."""

    def text(site: Site | None) -> str:
        if site is None or not site.file.startswith("megatron/"):
            return str(site)
        return linecache.getline(str(FSDP.parents[5] / site.file), site.line).strip()

    memory = trace.storages.get(race.span.storage, "other memory")
    return " | ".join([text(race.second.site), text(race.first.site), memory])
