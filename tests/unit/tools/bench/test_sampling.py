"""Who samples and how it is asked; what it says becomes metrics."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import pytest

from megatron_cg.tools.bench import sampling
from megatron_cg.tools.bench.sampling import ThreadSampler
from megatron_cg.tools.bench.stacks import read_stacks


def test_a_thread_samples_where_py_spy_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", "")
    began = time.perf_counter()
    sampler = sampling.sampling(tmp_path / "new" / "samples.folded", native=True)
    assert isinstance(sampler, ThreadSampler)
    while not sampler._stacks:
        time.sleep(0.001)
    facts = sampler.stop()
    assert facts["sampler"] == "thread" and "not installed" in facts["note"]
    assert facts["lost"] == 0 and not facts["native"]
    assert 0 < facts["interval_ms"] * sampler._looks <= (time.perf_counter() - began) * 1e3
    stacks = read_stacks((tmp_path / "new" / facts["file"]).read_text().splitlines())
    functions = {frame.function for stack in stacks["thread MainThread"] for frame in stack}
    assert "test_a_thread_samples_where_py_spy_is_not (test_sampling.py)" in functions


REFUSES = "import sys; sys.exit('permission denied')"
SAMPLES = """
import pathlib, signal, sys
def write(*_):
    pathlib.Path(sys.argv[-1]).write_text("thread 1;f 3\\n")
    print("py-spy> Wrote raw flamegraph data to 'f'. Samples: 3 Errors: 2", flush=True)
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
def test_py_spy_is_asked_first(
    native: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Native frames only where they are asked for: py-spy then stops what it reads."""
    replacement(SAMPLES, tmp_path, monkeypatch)
    facts = sampling.sampling(tmp_path / "samples.folded", native=native).stop()
    assert facts == {
        **{"sampler": "py-spy", "native": native, "interval_ms": 5.0, "lost": 2},
        **{"file": "samples.folded", "note": ""},
    }
    assert (tmp_path / "samples.folded").read_text() == "thread 1;f 3\n"
    words = (tmp_path / "samples.log").read_text().split()
    assert ("--native" in words, "--nonblocking" in words) == (native, not native)
    assert words[words.index("--rate") + 1] == "200"


def test_a_thread_samples_where_py_spy_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    replacement(REFUSES, tmp_path, monkeypatch)
    facts = sampling.sampling(tmp_path / "samples.folded").stop()
    assert facts["sampler"] == "thread" and "permission denied" in facts["note"]


def test_a_profile_that_fell_behind_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    late = 'print("2.00s behind in sampling, results may be inaccurate.")\n'
    replacement(late + SAMPLES, tmp_path, monkeypatch)
    facts = sampling.sampling(tmp_path / "samples.folded").stop()
    assert "fell behind" in facts["note"]
