"""The ablation of the fast path: what it trains, and its table. The run itself needs a GPU."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import fast_path_parts
from benchmarks.fast_path_parts import ALL, BASELINES, RESULTS, Plan, table
from megatron_cg.arguments.fast_path_parts import NEEDS, PARTS


def test_a_variant_leaves_out_one_part_and_those_that_need_it() -> None:
    variants = Plan("out", PARTS).variants()
    assert list(variants) == [*BASELINES, *PARTS]
    for part in PARTS:
        left = set(variants[part])
        assert part not in left
        assert all(set(NEEDS[name]) <= left for name in left)
    assert set(PARTS) - set(variants["last-unit"]) == {"last-unit"}
    assert list(Plan("out", ("last-unit",), baselines=False).variants()) == ["last-unit"]


def test_each_variant_is_compared_with_the_windows_around_it(tmp_path: Path) -> None:
    windows = [
        (ALL, [10.0, 99.0, 10.0]),
        ("last-unit", [12.0]),
        (ALL, [10.0]),
        ("gradients", [15.0]),
        (ALL, [20.0]),
        ("last-unit", [22.0]),
        (ALL, [20.0]),
    ]
    lines = [json.dumps({"variant": name, "step_ms": steps}) for name, steps in windows]
    (tmp_path / RESULTS).write_text("\n".join(lines))
    text = table(tmp_path)
    assert "All parts: 15.0 ms a step" in text
    assert "changes by 0.0% (median)" in text
    rows = [line for line in text.splitlines() if line.startswith("| `")]
    dependents = "`detached-weights`, `detached-weights-of-graphs`, `deferred-prefetch`"
    assert rows == [
        "| `last-unit` | +2.0 | +15.0 | +20.0, +10.0 |",
        f"| `gradients`, with {dependents} | +0.0 | +0.0 | +0.0 |",
    ]


@pytest.mark.parametrize(
    ("words", "message"),
    [("--parts last-unti", "did you mean last-unit?"), ("--parts last-unit,none", "choose from")],
)
def test_unknown_parts_are_refused_before_anything_starts(
    words: str,
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    out = tmp_path / "out"
    monkeypatch.setattr("sys.argv", ["parts", "llama", "--out", str(out), *words.split()])
    with pytest.raises(SystemExit) as ended:
        fast_path_parts.main()
    assert ended.value.code == 2
    assert message in capsys.readouterr().err
    assert not out.exists()
