"""What all commands have in common: words that are refused, and what is printed unasked."""

from __future__ import annotations

import errno
import json
import logging
import os
import shlex
import signal
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from megatron_cg.arguments.schema import SCOPES
from megatron_cg.tools.align.presets import preset_names
from megatron_cg.tools.cli.main import (
    _DEPENDENCIES,
    COMMANDS,
    DEFECT,
    NO_READER,
    TAKING_FLAGS,
    USAGE_ERROR,
    main,
)
from megatron_cg.tools.plan.process import WORKING, make_plans
from megatron_cg.tools.plan.request import read_request
from tests.unit.tools.report.made_up import make_record, write

HINT = "Megatron's own come after a bare --"


def refused(words: str, capsys: pytest.CaptureFixture[str]) -> str:
    with pytest.raises(SystemExit) as caught:
        main(words.split())
    assert caught.value.code == 2
    return capsys.readouterr().err


@pytest.mark.parametrize("line", ["plan llama-tiny", "align"])
def test_a_mistyped_scope_is_refused_with_those_there_are(
    line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    said = refused(f"{line} --scopes attn moe_rooter", capsys)
    assert "moe_rooter" in said and all(scope in said for scope in SCOPES)


@pytest.mark.parametrize("line", ["plan train.py", "align", "bench", "doctor", "report x"])
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
        "bench --preset llama --out {}/x/out.json",
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
@pytest.mark.parametrize("line", ["align --timeout", "bench --timeout"])
def test_a_time_that_is_none_is_refused(
    line: str, number: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert f"'{number}' is not a number of seconds above 0" in refused(f"{line}={number}", capsys)


WITH_A_PLAN = """
import json, sys
from megatron_cg.tools.cli import main
from megatron_cg.tools.plan import process

with open(sys.argv[1], encoding="utf-8") as made:
    plans = json.load(made)
process.make_plans = lambda requests: plans
sys.exit(main.main(sys.argv[2:]))
"""
"""The command in a new interpreter, with a plan that was made already."""


@pytest.fixture(scope="module")
def command(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """How the command is started; its plan is that of :data:`PLAN`."""
    file = tmp_path_factory.mktemp("plan") / "plan.json"
    file.write_text(json.dumps(make_plans([read_request("llama-tiny", [], nproc=2)])))
    return [sys.executable, "-c", WITH_A_PLAN, str(file)]


PLAN = "plan llama-tiny --nproc 2"


@pytest.mark.parametrize("line", [PLAN, "bench --dry-run --preset llama"])
def test_a_reader_that_has_gone_is_no_error(line: str, command: list[str], tmp_path: Path) -> None:
    """As with ``| head``: nothing on standard error, whether rich prints or we."""
    words = [*command, *line.format(tmp_path).split()]
    reader, writer = os.pipe()
    os.close(reader)
    try:
        done = subprocess.run(words, stdout=writer, stderr=subprocess.PIPE, check=False)
    finally:
        os.close(writer)
    assert (done.returncode, but_for_progress(done.stderr)) == (NO_READER, "")


def but_for_progress(stderr: bytes) -> str:
    """Without the line that a plan writes on a machine where it takes more than 3 seconds."""
    lines = stderr.decode().splitlines(keepends=True)
    return "".join(line for line in lines if not line.startswith(WORKING))


def started(words: list[str], shell: str, **env: str) -> tuple[int, str]:
    """Exit code and standard error of a command whose standard output is what ``shell`` says."""
    line = f"{shlex.join(words)} {shell}"
    done = subprocess.run(
        ["bash", "-c", line], env={**os.environ, **env}, capture_output=True, check=False
    )
    return done.returncode, but_for_progress(done.stderr)


def test_a_closed_or_full_output_and_another_alphabet_are_no_verdict(command: list[str]) -> None:
    whole = [sys.executable, "-m", "megatron_cg.tools.cli.main", *PLAN.split()]
    assert started(whole, ">&-") == (0, "")
    plan = [*command, *PLAN.split()]
    assert started(plan, "", LC_ALL="C", PYTHONUTF8="0", PYTHONCOERCECLOCALE="0") == (0, "")
    said = "megatron-cg plan: output: No space left on device\n"
    assert started(plan, "> /dev/full") == (USAGE_ERROR, said)


def test_an_interrupted_command_says_so_in_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(*_: object) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr("megatron_cg.tools.cli.plan.run", interrupted)
    assert main(["plan", "llama-tiny"]) == 130
    assert capsys.readouterr().err == "megatron-cg plan: interrupted\n"


@pytest.mark.parametrize("name", ["importing", "running", "turned into another error"])
def test_an_interrupt_is_one_line_wherever_it_comes(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(*_: object) -> int:
        try:
            signal.raise_signal(signal.SIGINT)
        except KeyboardInterrupt:
            # As numpy's own import does.
            if name.startswith("turned"):
                raise ImportError("the C-extensions failed") from None
            raise
        return 0

    place = "importlib.import_module" if name == "importing" else "megatron_cg.tools.cli.plan.run"
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with monkeypatch.context() as patch:
            patch.setattr(place, interrupted)
            assert main(["plan", "llama-tiny"]) == 130
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGINT, before)
    assert capsys.readouterr().err == "megatron-cg plan: interrupted\n"


@pytest.mark.parametrize(
    ("error", "code", "said"),
    [
        (OSError(errno.EFBIG, "File too large"), USAGE_ERROR, "output: File too large"),
        (OSError(errno.EDQUOT, "Quota", "a.json"), USAGE_ERROR, "a.json: Quota"),
        (OSError("no number at all"), USAGE_ERROR, "output: no number at all"),
        (
            ModuleNotFoundError("No module named 'yaml'", name="yaml"),
            USAGE_ERROR,
            "the package PyYAML is missing, as after an installation with --no-deps: "
            "python -m pip install PyYAML",
        ),
        (
            ModuleNotFoundError("No module named 'megatron_cg.gone'", name="megatron_cg.gone"),
            DEFECT,
            "this is a defect of megatron-cg",
        ),
        (ValueError("not foreseen"), DEFECT, "this is a defect of megatron-cg"),
        (RecursionError("too deep"), DEFECT, "this is a defect of megatron-cg"),
    ],
)
def test_no_error_has_the_exit_code_of_a_difference(
    error: Exception,
    code: int,
    said: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def failing(*_: object) -> int:
        raise error

    monkeypatch.setattr("megatron_cg.tools.cli.align.run", failing)
    assert main(["align"]) == code and code != 1
    *before, last = capsys.readouterr().err.splitlines()
    assert last.startswith(f"megatron-cg align: {said}")
    assert bool(before) == (code == DEFECT)


def test_a_report_that_cannot_be_written_leaves_the_one_that_was_there(tmp_path: Path) -> None:
    """The real command under a limit on file sizes, of which the system names no file."""
    write(tmp_path, make_record(steps=3, layers=2))
    (tmp_path / "report.html").write_text("good")
    command = f"ulimit -f 1; exec {sys.executable} -m megatron_cg.tools.cli.main report {tmp_path}"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=False)
    (said,) = done.stderr.splitlines()
    assert done.returncode == USAGE_ERROR
    assert said == f"megatron-cg report: {tmp_path}/report.html: File too large"
    assert (tmp_path / "report.html").read_text() == "good"
    assert {path.name for path in tmp_path.iterdir()} == {"rank0.jsonl", "report.html"}


@pytest.mark.parametrize(
    ("line", "hint"),
    [
        ("algin", "align"),
        ("align --prest llama", "--preset"),
        ("plan llama-tiny --scopes atn", "attn"),
        ("align --backend tap", "tape"),
        ("align --preset lama", "llama"),
        ("plan qwen-moe", "qwen3-moe"),
        ("bench --preset deepseek", "deepseek-v3"),
    ],
)
def test_a_mistyped_word_is_answered_with_the_nearest(
    line: str, hint: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        code: object = main(line.format(tmp_path).split())
    except SystemExit as error:
        code = error.code
    assert code == USAGE_ERROR
    assert f"(did you mean {hint}?)" in capsys.readouterr().err


@pytest.mark.parametrize("words", [["--help"], ["--version"], ["align", "--help"]])
def test_help_loads_neither_torch_nor_megatron(words: list[str]) -> None:
    code = (
        "import sys\n"
        "from megatron_cg.tools.cli.main import main\n"
        f"try:\n    main({words!r})\nexcept SystemExit:\n    pass\n"
        "slow = {'torch', 'megatron', 'numpy', 'matplotlib', 'yaml', 'rich'}\n"
        "sys.exit(' '.join(slow & set(sys.modules)))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "") or done.stderr == "\n"
    assert done.stdout


def test_the_package_loads_neither_torch_nor_megatron() -> None:
    code = "import sys, megatron_cg; sys.exit(len({'torch', 'megatron'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


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


def test_a_mistyped_flag_is_told_by_the_command_that_refuses_it(
    capsys: pytest.CaptureFixture[str],
) -> None:
    told = refused("doctor --jsn", capsys)
    assert told.startswith("usage: megatron-cg doctor [-h] [--json]")
    assert "megatron-cg doctor: error: unrecognized arguments: --jsn (did you mean --json?)" in told


def test_every_package_that_this_one_needs_is_named_where_it_is_missing() -> None:
    root = Path(__file__).parents[4]
    project = tomllib.loads((root / "pyproject.toml").read_text())["project"]
    needed = {Requirement(line).name for line in project["dependencies"]}
    assert needed <= set(_DEPENDENCIES.values())
