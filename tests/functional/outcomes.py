"""What a run with graphs must come to beside the eager one."""

from megatron_cg.tools.record.compare import Outcome, Run


def assert_failed(outcome: Outcome, *words: str) -> None:
    assert outcome.comparison.status == "failed", outcome.comparison.reason
    assert all(word in outcome.comparison.reason for word in words), outcome.comparison.reason


def assert_identical(outcome: Outcome, steps: int) -> Run:
    """Every number and shard is equal, graphs replayed; returns the record of the graph run."""
    comparison = outcome.comparison
    assert comparison.status == "identical", comparison.reason + "\n" + outcome.log_tail
    assert len({value.step for value in comparison.values}) == steps and comparison.shards > 0
    assert comparison.graphs["captured"] > 0 and comparison.graphs["replayed"] > 0
    assert comparison.graphs["outputs_only"] == 0
    assert not outdated_parts(outcome) and outcome.graphed is not None
    return outcome.graphed


def outdated_parts(outcome: Outcome) -> dict[str, str]:
    """Parts of the fast path that are off because of the installed megatron-core, and why."""
    ranks = (outcome.graphed or {}).values()
    paths = [capture["fast_path"] or {} for rank in ranks for capture in rank["captures"]]
    off = [part for path in paths for part in path.get("off", {}).items()]
    return {name: why for name, why in off if "has another body" in why}


def assert_trained_alike(outcome: Outcome, steps: int) -> Run:
    """The same, but says nothing of whether graphs replayed."""
    comparison = outcome.comparison
    assert outcome.graphed is not None, comparison.reason + outcome.log_tail
    assert len({value.step for value in comparison.values}) == steps, comparison.reason
    assert all(value.same for value in comparison.values), comparison.reason
    assert comparison.shards > 0 and not comparison.different_shards, comparison.reason
    return outcome.graphed


def assert_left_eager(outcome: Outcome, steps: int) -> None:
    """A capture failed: all ranks trained as eager, with hooks and flags of before it."""
    for rank in assert_trained_alike(outcome, steps).values():
        assert rank["after_failure"] == {"same": True}
    assert outcome.comparison.graphs.get("replayed", 0) == 0
