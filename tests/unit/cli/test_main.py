"""What all commands have in common: words that are refused, and what is printed unasked."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_cg.align.presets import preset_names
from megatron_cg.arguments.schema import SCOPES
from megatron_cg.cli.main import COMMANDS, NO_READER, TAKING_FLAGS, USAGE_ERROR, main

HINT = "Megatron's own come after a bare --"


def refused(words: str, capsys: pytest.CaptureFixture[str]) -> str:
    with pytest.raises(SystemExit) as caught:
        main(words.split())
    assert caught.value.code == 2
    return capsys.readouterr().err


@pytest.mark.parametrize("line", ["plan llama-tiny", "align", "bench --out x"])
def test_a_mistyped_scope_is_refused_with_those_there_are(
    line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    said = refused(f"{line} --scopes attn moe_rooter", capsys)
    assert "moe_rooter" in said and all(scope in said for scope in SCOPES)


@pytest.mark.parametrize("line", ["plan train.py", "align", "bench --out x", "doctor", "report x"])
def test_megatrons_flags_without_a_bare_dash_are_refused_with_where_they_go(
    line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    said = refused(f"{line} --num-layers 4", capsys)
    assert "unrecognized arguments: --num-layers 4" in said
    assert (HINT in said) == (line.split(maxsplit=1)[0] in TAKING_FLAGS)


@pytest.mark.parametrize(
    "line",
    [
        "align --backend tape --steps 4 --work-dir {}/x",
        "align --backend tape --steps 4 --json {}/x/out.json",
        "bench --backend tape --out {}/x",
    ],
)
def test_a_folder_that_cannot_be_written_is_one_line_and_no_verdict(
    line: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "a file"
    file.write_text("")
    words = [word.format(file) for word in line.split()]
    assert main(words) == 2
    (said,) = capsys.readouterr().err.splitlines()
    assert said.startswith(f"megatron-cg {words[0]}: {file}/x")
    assert said.endswith(": Not a directory")


@pytest.mark.parametrize("number", ["0", "-1", "two"])
def test_a_count_of_nothing_is_refused(number: str, capsys: pytest.CaptureFixture[str]) -> None:
    said = refused(f"plan llama-tiny --nproc {number}", capsys)
    assert f"'{number}' is not a whole number of 1 or more" in said


@pytest.mark.parametrize("number", ["0", "-5", "nan", "inf", "soon"])
@pytest.mark.parametrize("line", ["align --timeout", "bench --out x --budget-seconds"])
def test_a_time_that_is_none_is_refused(
    line: str, number: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert f"'{number}' is not a number of seconds above 0" in refused(f"{line}={number}", capsys)


@pytest.mark.parametrize("line", ["plan llama-tiny --nproc 2", "bench --dry-run --out {}"])
def test_a_reader_that_has_gone_is_no_error(line: str, tmp_path: Path) -> None:
    """As with ``| head``: nothing on standard error, whether rich prints or we."""
    words = [sys.executable, "-m", "megatron_cg.cli.main", *line.format(tmp_path).split()]
    reader, writer = os.pipe()
    os.close(reader)
    try:
        done = subprocess.run(words, stdout=writer, stderr=subprocess.PIPE, check=False)
    finally:
        os.close(writer)
    assert (done.returncode, done.stderr.decode()) == (NO_READER, "")


def started(words: str, shell: str, **env: str) -> tuple[int, str]:
    """Exit code and standard error of a command whose standard output is what ``shell`` says."""
    command = f"{sys.executable} -m megatron_cg.cli.main {words} {shell}"
    done = subprocess.run(
        ["bash", "-c", command], env={**os.environ, **env}, capture_output=True, check=False
    )
    return done.returncode, done.stderr.decode()


def test_a_closed_or_full_output_and_another_alphabet_are_no_verdict() -> None:
    plan = "plan llama-tiny --nproc 2"
    assert started(plan, ">&-") == (0, "")
    assert started(plan, "", LC_ALL="C", PYTHONUTF8="0", PYTHONCOERCECLOCALE="0") == (0, "")
    said = "megatron-cg plan: output: No space left on device\n"
    assert started(plan, "> /dev/full") == (USAGE_ERROR, said)


def test_an_interrupted_command_says_so_in_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(*_: object) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr("megatron_cg.cli.plan.run", interrupted)
    assert main(["plan", "llama-tiny"]) == 130
    assert capsys.readouterr().err == "megatron-cg plan: interrupted\n"


def test_commands_that_take_flags_are_commands() -> None:
    assert set(TAKING_FLAGS) < set(COMMANDS)


def test_the_help_of_a_plan_names_presets_and_scopes(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["plan", "--help"])
    # Without line ends, for a name may be broken at its dash.
    said = "".join(capsys.readouterr().out.split())
    assert all(name in said for name in (*preset_names(), *SCOPES))


def test_torch_does_not_warn_of_a_compiler_without_a_gpu(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    log = logging.getLogger("torch.utils.cpp_extension")
    monkeypatch.setattr(log, "level", logging.NOTSET)
    log.manager._clear_cache()  # type: ignore[attr-defined]
    assert log.isEnabledFor(logging.WARNING)
    assert main(["doctor", "--", "--bf16"]) == 2
    assert not log.isEnabledFor(logging.WARNING)
    capsys.readouterr()
