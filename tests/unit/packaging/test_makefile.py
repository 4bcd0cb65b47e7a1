"""The tests that ``make check`` names exist; CI runs all tests and would not notice."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

ROOT = Path(__file__).parents[3]


def test_every_test_of_make_check_exists() -> None:
    shown = subprocess.run(
        ["make", "--dry-run", "check"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    named = re.findall(r"tests/unit/\S+", shown.stdout)
    assert len(named) > 20
    assert [name for name in named if not (ROOT / name).exists()] == []
