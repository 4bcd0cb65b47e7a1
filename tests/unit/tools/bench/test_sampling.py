"""How py-spy is asked for a profile, and what is noted when it gives none."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from megatron_cg.tools.bench.measure.sampling import start_sampling


def test_without_py_spy_there_is_a_note(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    facts = start_sampling(tmp_path / "new" / "s.speedscope.json", native=True)()
    assert "py-spy wrote nothing" in facts["note"] and "No such file" in facts["note"]
    assert facts["native"] and facts["lost"] == 0
    assert not (tmp_path / "new" / facts["file"]).exists()


REFUSES = "import sys; sys.exit('permission denied')"
SAMPLES = """
import pathlib, signal, sys
def write(*_):
    pathlib.Path(sys.argv[-1]).write_text("{}")
    print("py-spy> Wrote speedscope file to 'f'. Samples: 3 Errors: 2", flush=True)
    sys.exit(0)
# Also where this signal was ignored at the start, as in a shell's background job.
signal.signal(signal.SIGINT, write)
print(*sys.argv[1:])
print("Sampling process", flush=True)
while True:
    signal.pause()
"""


def replacement(body: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A program of that name instead of py-spy, which is never a dependency."""
    program = folder / "py-spy"
    program.write_text(f"#!{sys.executable}\n{body}")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(folder), prepend=":")


@pytest.mark.parametrize("native", [True, False])
def test_py_spy_writes_for_speedscope(
    native: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Native frames only where they are asked for: py-spy then stops what it reads."""
    replacement(SAMPLES, tmp_path, monkeypatch)
    facts = start_sampling(tmp_path / "s.speedscope.json", native=native)()
    assert facts == {"native": native, "lost": 2, "file": "s.speedscope.json", "note": ""}
    assert (tmp_path / "s.speedscope.json").read_text() == "{}"
    words = (tmp_path / "s.speedscope.log").read_text().split()
    assert words[words.index("--format") + 1] == "speedscope"
    assert ("--native" in words, "--nonblocking" in words) == (native, not native)
    assert words[words.index("--rate") + 1] == "200"


def test_a_refusal_of_py_spy_is_noted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    replacement(REFUSES, tmp_path, monkeypatch)
    facts = start_sampling(tmp_path / "s.speedscope.json")()
    assert facts["note"] == "py-spy wrote nothing: permission denied"


def test_a_profile_that_fell_behind_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    late = 'print("2.00s behind in sampling, results may be inaccurate.")\n'
    replacement(late + SAMPLES, tmp_path, monkeypatch)
    facts = start_sampling(tmp_path / "s.speedscope.json")()
    assert "fell behind" in facts["note"]
