"""What cannot be measured or read is refused in one line."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from benchmarks import compiled_regions, guard_cost, memory_probe


@pytest.mark.parametrize(
    ("main", "words", "reason"),
    [
        (guard_cost.main, "--calls 0", "'0' is not a whole number of 1 or more"),
        (compiled_regions.main, "--calls 1", "a decile is of 2 calls or more"),
        (compiled_regions.main, "--ranks 0", "'0' is not a whole number of 1 or more"),
    ],
)
def test_numbers_that_measure_nothing_are_refused(
    main: Callable[[list[str]], Any], words: str, reason: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(words.split())
    assert ended.value.code == 2 and reason in capsys.readouterr().err


def test_memory_that_cannot_be_compared_is_named(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="memory_probe: there is no folder"):
        memory_probe.main(["compare", str(tmp_path / "nowhere")])
    (tmp_path / "plan.json").write_text("{")
    with pytest.raises(SystemExit, match="memory_probe: Expecting"):
        memory_probe.main(["plan", str(tmp_path / "plan.json"), str(tmp_path)])
