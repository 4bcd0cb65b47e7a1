"""The kernel that finds places in slots, against torch; ``test_dispatcher.py`` uses them."""

from tests.unit.interpreted import last_line_of

KERNEL = """
import sys
import torch
from megatron_cg.experts.kernels import places_of
from megatron_cg.experts.slots import find_places

torch.manual_seed(0)
for case in range(24):
    ranks, experts = (1, 2, 3, 4)[case % 4], (1, 5, 16)[case % 3]
    counts = torch.randint(0, (4, 900, 3000)[case % 3], (ranks, experts))
    counts[torch.rand(ranks, experts) < 0.3] = 0
    slot, whole = int(counts.sum(1).amax()) // (1 + case % 2) + 1, case % 5 == 0
    given = (counts, slot, int(counts.sum()) + 1500 * (case % 3))
    ours, torchs = places_of(*given, whole=whole), find_places(*given, whole=whole)
    assert all(map(torch.equal, ours, torchs)), given
    gaps = -counts.sum(0) % 16
    rows = given[2] + int(gaps.sum())
    ours = places_of(counts, slot, rows, gaps.cumsum(0), whole=whole)
    torchs = find_places(counts, slot, rows, whole=whole, gaps=gaps)
    assert all(map(torch.equal, ours, torchs)), given
print("equal")
"""


def test_the_kernel_finds_the_same_places() -> None:
    assert last_line_of(KERNEL) == "equal"
