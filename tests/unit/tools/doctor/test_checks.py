"""No check, and no process that a check asks, can end the doctor."""

from __future__ import annotations

import dataclasses
import io
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from megatron_cg.arguments.schema import NATIVE, TAPE, TRANSFORMER_ENGINE
from megatron_cg.tools.doctor import ask, symbol_checks
from megatron_cg.tools.doctor.checks import CHECKS, Check, can_run, examine
from megatron_cg.tools.doctor.finding import (
    Finding,
    Level,
    NotReachedError,
    error,
    note,
    ok,
    warning,
)
from megatron_cg.tools.doctor.findings_shown import as_json, print_report
from megatron_cg.tools.doctor.system import System, told
from tests.unit.tools.doctor.systems import ROOT, VERSIONS, of_level, only, system


def finds_then_fails(_system: System) -> Iterator[Finding]:
    yield ok("so far")
    raise KeyError("broken")


def asks_torch(here: System) -> Iterator[Finding]:
    here.ask(ask.TORCH)
    yield ok("imported")


@pytest.mark.parametrize(("decides", "level"), [(True, Level.ERROR), (False, Level.WARNING)])
def test_a_check_that_fails_is_a_finding_after_those_it_had(decides: bool, level: Level) -> None:
    checks = (Check("broken", finds_then_fails, decides=decides), Check("next", lambda _: [ok("")]))
    found = examine(system(), checks)
    assert [(finding.check, finding.level) for finding in found] == [
        ("broken", Level.OK),
        ("broken", level),
        ("next", Level.OK),
    ]
    assert "KeyError" in found[1].found and can_run(found) is not decides


def test_a_failed_stage_is_an_error_of_its_own_check_and_a_note_of_others() -> None:
    here = system({ask.TORCH: ask.StageError(ask.TORCH, "ImportError: no libcudart")})
    checks = (Check("torch", asks_torch, stage=ask.TORCH), Check("cuda", asks_torch))
    found = examine(here, checks)
    assert [finding.level for finding in found] == [Level.ERROR, Level.NOTE]
    assert "no libcudart" in found[0].found


def test_every_check_survives_a_system_with_nothing_in_it(tmp_path: Path) -> None:
    here = system(
        ask=lambda stage: {}[stage],
        shared_memory=tmp_path / "gone",
        requirements=["~~ not one"],
        python="?",
    )
    for backend in (TRANSFORMER_ENGINE, NATIVE, TAPE):
        found = examine(dataclasses.replace(here, backend=backend))
        assert {finding.check for finding in found} >= {"torch", "symbols", "packages"}
        assert not can_run(found)


def test_names_of_checks_are_unique_and_no_check_of_a_gpu_is_for_the_tape() -> None:
    names = [check.name for check in CHECKS]
    assert len(set(names)) == len(names)
    tape = {check.name for check in CHECKS if TAPE in check.backends}
    assert tape.isdisjoint({"driver", "gpus", "gpu-memory", "cuda", "te-import", "libraries"})


def test_the_native_backend_needs_a_gpu_and_no_transformer_engine() -> None:
    here = system(backend=NATIVE, versions={name: None for name in VERSIONS if "engine" in name})
    found = examine(here)
    checks = {finding.check for finding in found}
    assert checks >= {"driver", "gpus", "cuda"} and checks.isdisjoint({"te-parts", "te-import"})
    assert not [f for f in found if f.level is Level.ERROR and "ngine" in f.found]


STAGES = """
import json, os, signal, sys, time
out, end, *stages = sys.argv[1:]
with open(out, "a") as file:
    file.write(json.dumps({stages[0]: {"found": 1}}) + "\\n{\\"cut")
print("last words")
sys.stdout.flush()
if end == "signal":
    os.kill(os.getpid(), signal.SIGSEGV)
if end == "wait":
    time.sleep(600)
"""


@pytest.fixture
def probe(tmp_path: Path) -> dict[str, str]:
    """An environment in which the other process is one made for a test."""
    folder = tmp_path / "megatron_cg" / "tools" / "doctor"
    folder.mkdir(parents=True)
    for place in (folder.parent.parent, folder.parent, folder):
        (place / "__init__.py").touch()
    (folder / "probe.py").write_text(STAGES)
    return {"PYTHONPATH": str(tmp_path)}


@pytest.mark.parametrize(
    ("end", "said"), [("signal", "ended by SIGSEGV"), ("code", "ended with code 0")]
)
def test_what_was_seen_before_the_other_process_ended_is_kept(
    probe: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, end: str, said: str
) -> None:
    monkeypatch.chdir(tmp_path)
    answers = ask.run_probe(["first", "second", "third"], end, probe)
    assert answers["first"] == {"found": 1} and "third" not in answers
    assert said in answers["second"]["error"] and "last words" in answers["second"]["error"]


def test_another_process_that_takes_too_long_is_ended_and_said(
    probe: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    answers = ask.run_probe(["first", "second"], "wait", probe, seconds=0.1)
    errors = [answer["error"] for answer in answers.values() if "error" in answer]
    assert len(errors) == 1 and "did not end within 0.1 seconds" in errors[0]


def test_the_doctor_itself_imports_nothing_that_may_be_broken() -> None:
    code = (
        "import sys, megatron_cg.tools.cli.doctor, megatron_cg.tools.doctor.findings_shown\n"
        "sys.exit(str({'torch', 'megatron', 'numpy'} & set(sys.modules)))"
    )
    words = [sys.executable, "-c", code]
    done = subprocess.run(words, check=False, cwd=ROOT, capture_output=True, text=True)
    assert done.stderr.strip() == "set()"


def test_a_stage_that_was_not_run_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []

    def run_probe(stages: Any, *_: Any) -> dict[str, Any]:
        asked.append(list(stages))
        return {stage: {"found": stage} for stage in stages}

    monkeypatch.setattr(ask, "run_probe", run_probe)
    nothing = ask.Interpreter(TRANSFORMER_ENGINE, {}, lambda _: None)
    with pytest.raises(NotReachedError, match="torch is not installed"):
        nothing.ask(ask.TORCH)
    everything = ask.Interpreter(TAPE, {}, lambda _: "1.0")
    assert everything.ask(ask.SYMBOLS) == ask.SYMBOLS
    with pytest.raises(NotReachedError, match="no part in the backend tape"):
        everything.ask(ask.DRIVER)
    megatron = [ask.SYMBOLS, ask.FLAGS, ask.CHANGES]
    assert asked == [[ask.TORCH, *megatron, ask.COLLECTED]]


FINDINGS = [
    dataclasses.replace(finding, check="a-check")
    for finding in (
        ok("all [bold]well[/bold]"),
        note("a note", "just so"),
        warning("a warning", "slow", "unset SLOW"),
        error("an error", "cannot be", "pip install it"),
    )
]


def test_the_json_has_a_fixed_shape() -> None:
    data = json.loads(json.dumps(as_json(TAPE, FINDINGS)))
    assert set(data) == {"format", "megatron_cg", "backend", "can_run", "counts", "findings"}
    assert data["format"] == 1 and data["can_run"] is False
    assert data["counts"] == {"ok": 1, "note": 1, "warning": 1, "error": 1}
    assert data["findings"][3] == {
        "check": "a-check",
        "level": "error",
        "found": "an error",
        "why": "cannot be",
        "remedy": "pip install it",
    }


def test_the_table_has_a_line_a_finding_and_details_of_what_is_not_ok() -> None:
    out = io.StringIO()
    print_report(Console(file=out, width=100), TRANSFORMER_ENGINE, FINDINGS)
    text = out.getvalue()
    assert "Changes in other packages" not in text
    assert "all [bold]well[/bold]" in text and text.count("why:") == 3
    assert text.index("pip install it") < text.index("unset SLOW") < text.index("just so")
    assert text.rstrip().endswith("1 thing prevents CUDA graphs here")
    assert of_level(FINDINGS, Level.ERROR) == [only(FINDINGS, Level.ERROR)]


def test_changes_are_told_by_our_module_before_the_verdict() -> None:
    rows = [
        ("megatron", "megatron.a.b", "megatron_cg.ours", "enabled"),
        ("megatron", "megatron.fsdp.Buffer.zero", "megatron_cg.fast", "graphs live"),
        ("megatron_fsdp", "megatron_fsdp.Buffer.zero", "megatron_cg.fast", "graphs live"),
        ("megatron", "megatron.c.f.<locals>.g", "megatron_cg.slow", "graphs live"),
    ]
    changes = [dict(zip(("package", "place", "by", "when"), row, strict=True)) for row in rows]
    out = io.StringIO()
    print_report(Console(file=out, width=100), TRANSFORMER_ENGINE, FINDINGS, changes)
    text = out.getvalue()
    assert "megatron_cg.ours  megatron: a.b\n" in text
    assert "megatron_cg.fast  megatron, megatron_fsdp: Buffer.zero\n" in text
    assert "megatron_cg.slow  megatron: f.g\n" in text
    assert text.index("once enabled") < text.index("taken over") < text.index("pip install it")
    (finding,) = symbol_checks.changes(system({ask.CHANGES: changes}))
    assert finding.level is Level.OK
    assert "1 once megatron_cg is enabled" in finding.found and "3 functions" in finding.found


def test_what_another_process_did_not_find_is_nothing() -> None:
    failed = system({ask.CHANGES: ask.StageError(ask.CHANGES, "no")})
    assert told(failed, ask.CHANGES) is None and told(failed, "never run") is None
    assert told(failed, ask.TORCH)["cuda"] == "13.0"
