"""What counters of graphs are expected to be."""

from megatron_cg.replay.mismatch_policy import Counters


def expect(counters: Counters, **counts: int) -> None:
    found = counters.as_dict()
    assert found | counts == found
