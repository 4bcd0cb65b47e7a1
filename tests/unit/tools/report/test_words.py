"""What the page says, for runs that agree, differ, failed or are not done."""

from __future__ import annotations

from typing import Any

from megatron_cg.tools.report.coverage import GRAPHED, LEFT_OUT, read_coverage
from megatron_cg.tools.report.series import quantities
from megatron_cg.tools.report.story import Story
from megatron_cg.tools.report.words import counts, difference, faults, peaks, speed, tiles, verdict
from tests.unit.tools.report.made_up import MISMATCH, make_record


def pair(graphs: dict[str, Any], eager: dict[str, Any] | None = None) -> Story:
    return Story("pair", {0: graphs}, reference={0: eager or make_record(graphs=False)})


def test_exact_zero_is_said_in_words() -> None:
    story = pair(make_record())
    assert verdict(story).kind == "good"
    assert "120 losses and gradient norms and 1 parameter shard" in verdict(story).text
    assert difference(quantities(story)[0]) == (
        "The difference is exactly zero at every step: all 40 numbers have the same bits in both "
        "runs."
    )
    assert ("loss and norm difference", "exactly 0") in [
        (tile.label, tile.value) for tile in tiles(story, quantities(story))
    ]


def test_a_difference_is_never_called_zero() -> None:
    story = pair(make_record(off=17))
    found = verdict(story)
    assert found.kind == "bad" and "step 17" in found.text
    text = difference(quantities(story)[0])
    assert "24 of 40 numbers differ, the first at step 17 on rank 0" in text and "zero" not in text


def test_equal_losses_without_digests_are_not_called_identical() -> None:
    records = make_record(), make_record(graphs=False)
    for record in records:
        record["parameters"] = {}
    found = verdict(pair(*records))
    assert found.kind == "note" and "no parameter shard was recorded" in found.text
    assert found.head == "Equal in every loss and gradient norm"


def test_a_run_that_replayed_nothing_is_not_called_identical() -> None:
    found = verdict(pair(make_record(graphs=False)))
    assert found.kind == "note" and "captured no graph" in found.text


def test_one_run_alone_is_done_failed_or_under_way() -> None:
    record = make_record()
    assert verdict(Story("one", {0: record})).head == "Trained to its end"
    record["finished"] = False
    assert verdict(Story("one", {0: record})).head == "Not ended"
    record["error"] = "ValueError: on purpose"
    failed = verdict(Story("one", {0: record}))
    assert failed.kind == "bad" and "rank 0: ValueError: on purpose" in failed.text


def test_a_failed_pair_is_not_comparable_and_says_why() -> None:
    record = make_record()
    record["finished"], record["error"] = False, "RuntimeError: out of luck"
    found = verdict(pair(record))
    assert found.kind == "bad" and "RuntimeError: out of luck" in found.text


def test_speed_is_a_ratio_of_medians_and_worth_nothing_without_a_gpu() -> None:
    assert "graphs 102.0 ms, eager 152.0 ms, a ratio of 0.671 (steps 7 to 40" in speed(
        pair(make_record())
    )
    record = make_record()
    record["device"] = "cpu"
    story = pair(record, make_record(graphs=False) | {"device": "cpu"})
    assert "times mean nothing for a GPU" in speed(story)
    labels = [tile.label for tile in tiles(story, quantities(story))]
    assert labels == [
        "steps",
        "loss and norm difference",
        "graphs",
        "mismatches",
        "memory of graphs",
    ]


def test_memory_is_that_of_the_rank_that_had_most() -> None:
    graphs, more = make_record(), make_record()
    more["peak_allocated_bytes"] += 2**30
    eager = {rank: make_record(graphs=False) for rank in (0, 1)}
    story = Story("pair", {0: graphs, 1: more}, reference=eager)
    assert "eager 26000 MiB, graphs 27924 MiB, a ratio of 1.074" in peaks(story)


def test_a_fault_is_told_once_with_its_ranks() -> None:
    story = Story("one", {0: make_record(), 1: make_record()})
    assert faults(story) == [f"graphs, ranks 0, 1: after step 19, warning: {MISMATCH}"]
    assert counts(story.run)["mismatched"] == 2
    story.run[1]["captures"].append({"after_step": 30, "error": "CaptureError: no room"})
    assert "graphs, rank 1: after step 30, capture failed: CaptureError: no room" in faults(story)


def test_the_map_has_layers_alike_as_one_with_reasons() -> None:
    found = read_coverage(Story("one", {0: make_record()}))
    assert found is not None
    assert found.scopes == ("attn", "mlp", "moe", "moe_router", "moe_preprocess")
    names = [name for name, _ in found.groups]
    assert names == ["layer 0 to 1", "layer 2 to 19", "layer 20 to 23"]
    assert found.groups[2][1].reasons == {
        "not selected (--cg-layers)": ["attn"],
        "not asked for (--cuda-graph-modules)": ["moe", "moe_preprocess"],
    }
    assert found.text.startswith("24 of 24 layers have a graph")


def test_cells_of_the_map_are_one_a_layer_or_one_a_stretch() -> None:
    found = read_coverage(Story("one", {0: make_record()}))
    assert found is not None
    assert found.stretches("attn", GRAPHED, 100) == [(0, 20)]
    assert found.stretches("attn", LEFT_OUT, 1) == [(20, 1), (21, 1), (22, 1), (23, 1)]
    assert found.stretches("mlp", GRAPHED, 1) == []


def test_without_a_capture_there_is_no_map() -> None:
    assert read_coverage(Story("one", {0: make_record(graphs=False)})) is None
