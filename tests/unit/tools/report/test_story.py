"""From records to points and sentences: runs that agree, differ, failed or are not done."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from megatron_cg.tools.align.compare import RecordError
from megatron_cg.tools.report.series import counted_steps, memory_over_steps, quantities
from megatron_cg.tools.report.story import Story, read_story
from megatron_cg.tools.report.words import counts, difference, faults, peaks, speed, verdict
from tests.unit.tools.report.made_up import MISMATCH, make_record, write


def pair(graphs: dict[str, Any], eager: dict[str, Any] | None = None) -> Story:
    return Story("pair", {0: graphs}, reference={0: eager or make_record(graphs=False)})


def test_equal_bits_are_no_difference_and_one_bit_is() -> None:
    eager, graphs = make_record(graphs=False), make_record()
    found = quantities(pair(graphs, eager))
    assert [q.name for q in found] == ["lm loss", "load_balancing_loss", "gradient norm"]
    assert all(not q.unequal and q.compared == 40 for q in found)
    loss = graphs["steps"][11]["losses"]["lm loss"]
    graphs["steps"][11]["losses"]["lm loss"] = math.nextafter(loss, 9)
    first = quantities(pair(graphs, eager))[0]
    assert first.unequal == ((12, 0),)
    assert first.difference is not None
    assert [step for step, number in first.difference.items() if number] == [12]


def test_a_difference_on_another_rank_is_seen_and_nan_is_the_widest() -> None:
    eager = {rank: make_record(graphs=False, steps=6, world_size=2) for rank in (0, 1)}
    graphs = {rank: make_record(steps=6, world_size=2) for rank in (0, 1)}
    graphs[1]["steps"][3]["grad_norm"] = math.nan
    found = quantities(Story("pair", graphs, reference=eager))[-1]
    assert found.unequal == ((4, 1),) and found.compared == 12
    assert found.difference is not None and math.isnan(found.difference[4])


def test_runs_of_different_length_are_compared_as_far_as_both_go() -> None:
    found = quantities(pair(make_record(steps=9), make_record(graphs=False, steps=7)))[0]
    assert found.difference is not None and list(found.difference) == list(range(1, 8))
    assert list(found.run) == list(range(1, 10))


@pytest.mark.parametrize(
    ("steps", "graphs", "counted"), [(40, True, range(7, 41)), (40, False, range(21, 41))]
)
def test_steps_whose_time_counts_come_after_capture(
    steps: int, graphs: bool, counted: range
) -> None:
    record = make_record(steps=steps, graphs=graphs)
    assert counted_steps(Story("one", {0: record})) == counted


def test_memory_is_in_mib_and_absent_without_a_gpu() -> None:
    record = make_record(steps=6)
    found = memory_over_steps(record, "allocated_bytes")
    assert list(found.values()) == [20000.0] * 5 + [20900.0]
    for row in record["intervals"]:
        row["memory"] = None
    assert memory_over_steps(record, "allocated_bytes") == {}


def test_folders_of_align_of_one_run_and_of_two_are_found(made_up: Path, tmp_path: Path) -> None:
    both = read_story(made_up)
    assert [name for name, _ in both.runs] == ["eager", "graphs"] and set(both.run) == {0, 1}
    one = read_story(made_up / "graphs")
    assert one.reference is None and one.name == "graphs"
    assert read_story(made_up / "graphs" / "record").name == "graphs"
    against = read_story(made_up / "graphs", made_up / "eager")
    assert against.title == "graphs against eager"
    swapped = read_story(made_up / "eager", made_up / "graphs")
    for story in (against, swapped):
        assert (story.name, story.reference_name) == ("graphs (graphs)", "eager (eager)")
        assert story.reference == both.reference
    flat = write(tmp_path / "run", make_record(steps=3, graphs=False))
    assert read_story(flat).title == "run"


def test_an_alignment_that_left_one_run_is_a_page_of_that_run(tmp_path: Path) -> None:
    write(tmp_path / "eager" / "record", make_record(steps=3, graphs=False))
    (tmp_path / "graphs").mkdir()
    story = read_story(tmp_path)
    assert story.name == "eager" and story.reference is None


def test_what_is_no_record_is_named(made_up: Path, tmp_path: Path) -> None:
    with pytest.raises(RecordError, match=r"holds no record .*--cg-record"):
        read_story(tmp_path)
    with pytest.raises(RecordError, match="there is no folder"):
        read_story(tmp_path / "nowhere")
    with pytest.raises(RecordError, match="holds two runs already"):
        read_story(made_up, made_up / "eager")
    (tmp_path / "rank0.jsonl").write_text("{")
    with pytest.raises(RecordError, match=r"rank0\.jsonl is not a record"):
        read_story(tmp_path)


def test_exact_zero_is_said_in_words() -> None:
    story = pair(make_record())
    assert verdict(story).kind == "good"
    assert "120 losses and gradient norms and 1 parameter shard" in verdict(story).text
    assert difference(quantities(story)[0]) == (
        "The difference is exactly zero at every step: all 40 numbers have the same bits in both "
        "runs."
    )


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
