"""From records to points: nothing that matters is lost on the way."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from megatron_cg.telemetry.record import exact
from megatron_cg.tools.align.compare import RecordError
from megatron_cg.tools.report.series import (
    counted_steps,
    memory_over_steps,
    phase_times,
    quantities,
    rates,
    thin,
)
from megatron_cg.tools.report.story import Story, read_story
from tests.unit.tools.report.made_up import make_record, write


def pair(eager: dict[str, Any], graphs: dict[str, Any]) -> Story:
    return Story("pair", {0: graphs}, reference={0: eager})


def test_equal_bits_are_no_difference_and_one_bit_is() -> None:
    eager, graphs = make_record(graphs=False), make_record()
    found = quantities(pair(eager, graphs))
    assert [q.name for q in found] == ["lm loss", "load_balancing_loss", "gradient norm"]
    assert all(not q.unequal and q.compared == 40 for q in found)
    loss = float.fromhex(graphs["steps"][11]["losses"]["lm loss"]["hex"])
    graphs["steps"][11]["losses"]["lm loss"] = exact(math.nextafter(loss, 9))
    first = quantities(pair(eager, graphs))[0]
    assert first.unequal == ((12, 0),)
    assert first.difference is not None
    assert [step for step, number in first.difference.items() if number] == [12]


def test_a_difference_on_another_rank_is_seen_and_nan_is_the_widest() -> None:
    eager = {rank: make_record(graphs=False, steps=6, world_size=2) for rank in (0, 1)}
    graphs = {rank: make_record(steps=6, world_size=2) for rank in (0, 1)}
    graphs[1]["steps"][3]["grad_norm"] = exact(math.nan)
    found = quantities(Story("pair", graphs, reference=eager))[-1]
    assert found.unequal == ((4, 1),) and found.compared == 12
    assert found.difference is not None and math.isnan(found.difference[4])


def test_runs_of_different_length_are_compared_as_far_as_both_go() -> None:
    found = quantities(pair(make_record(graphs=False, steps=7), make_record(steps=9)))[0]
    assert found.difference is not None and list(found.difference) == list(range(1, 8))
    assert list(found.run) == list(range(1, 10))


def test_many_points_become_few_and_keep_their_extremes() -> None:
    curve = {step: math.sin(step / 100) for step in range(50_000)}
    curve |= {12_345: 99.0, 40_001: -99.0, 7: math.nan}
    few = thin(curve, 200)
    assert len(few) <= 200 and list(few) == sorted(few)
    assert max(few.values()) == few[12_345] == 99 and min(few.values()) == few[40_001] == -99
    short = {1: math.nan, 2: 1.0}
    assert thin(short, 2) is short


@pytest.mark.parametrize(
    ("steps", "graphs", "counted"), [(40, True, range(7, 41)), (40, False, range(21, 41))]
)
def test_steps_whose_time_counts_come_after_capture(
    steps: int, graphs: bool, counted: range
) -> None:
    record = make_record(steps=steps, graphs=graphs)
    assert counted_steps(Story("one", {0: record})) == counted


def test_phases_are_medians_and_what_is_left_is_rest() -> None:
    record = make_record()
    assert phase_times(record, range(7, 41)) == {
        "forward": 30.0,
        "backward": 60.0,
        "optimizer": 8.0,
        "rest": 4.0,
    }
    for step in record["steps"]:
        del step["phases"]
    assert phase_times(record, range(7, 41)) == {}


def test_counters_are_told_by_step_also_where_rows_are_far_apart() -> None:
    record = make_record()
    record["intervals"] = [row for row in record["intervals"] if row["step"] % 10 == 0]
    found = rates(record, "counters", "replayed")
    assert found == {10: 24 * 5 / 10, 20: (24 * 10 - 1) / 10, 30: 24.0, 40: 24.0}


def test_of_many_rows_the_means_are_told_and_none_is_lost() -> None:
    rows = [{"step": n, "counters": {"replayed": 3 * n}, "memory": None} for n in range(1, 1004)]
    found = rates({"intervals": rows}, "counters", "replayed")
    assert len(found) <= 200 and list(found)[-1] == 1003
    assert set(found.values()) == {3.0}


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
    (tmp_path / "rank0.json").write_text("{")
    with pytest.raises(RecordError, match=r"rank0\.json is not a record"):
        read_story(tmp_path)
