"""What all commands have in common: words that are refused, how they end, what they import."""

import errno
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from megatron_cg.tools.cli.main import DEFECT, ENDING, INTERRUPTED, USAGE_ERROR
from tests.unit.interpreted import python
from tests.unit.ranks import ends
from tests.unit.tools.conftest import Cli


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("algin", "invalid choice: 'algin' (choose from 'align', "),
        ("align --preset lama", "there is no preset 'lama'"),
        ("align --num-layers 4", "--num-layers 4 (Megatron's own come after a bare --)"),
        ("doctor --jsn", "megatron-cg doctor: error: unrecognized arguments: --jsn\n"),
        ("align --nproc 0", "'0' is not a whole number of 1 or more"),
        ("align --warmup-steps -1", "'-1' is not a whole number of 0 or more"),
        ("align --timeout soon", "'soon' is not a whole number of 1 or more"),
        ("doctor -- --bf16", "doctor passes nothing on: leave out --bf16"),
    ],
)
def test_words_that_are_wrong_are_refused_with_what_to_type(line: str, told: str, cli: Cli) -> None:
    ended = cli(line)
    assert ended.code == USAGE_ERROR and told in ended.err


def test_a_folder_that_cannot_be_written_is_one_line_and_no_verdict(
    tmp_path: Path, cli: Cli
) -> None:
    file = tmp_path / "a_file"
    file.write_text("")
    ended = cli(f"align --backend tape --work-dir {file}/x")
    (said,) = ended.err.splitlines()
    assert ended.code == USAGE_ERROR
    assert said == f"megatron-cg align: {said.split()[2]} Not a directory" and f"{file}/x" in said


SAYING = """
import sys
from megatron_cg.tools.cli import main
main.invoke = lambda *_: print("... " * 10**5) or 0
sys.argv = ["megatron-cg", "plan"]
sys.exit(main.main())
"""
"""A command in a new interpreter that prints much."""


def test_a_reader_that_has_gone_is_no_error() -> None:
    words, pipe = [sys.executable, "-c", SAYING], subprocess.PIPE
    with subprocess.Popen(words, stdout=pipe, stderr=pipe) as one:
        assert one.stdout is not None and one.stderr is not None and one.stdout.read(1)
        one.stdout.close()
        assert (one.stderr.read(), one.wait()) == (b"", -signal.SIGPIPE)


@pytest.mark.parametrize(
    ("error", "code", "said"),
    [
        (KeyboardInterrupt(), INTERRUPTED, "interrupted"),
        (OSError(errno.EFBIG, "File too large"), USAGE_ERROR, "output: File too large"),
        (OSError(errno.EDQUOT, "Quota", "a.json"), USAGE_ERROR, "a.json: Quota"),
        (ValueError("not foreseen"), DEFECT, "this was not foreseen"),
    ],
)
def test_no_error_has_the_exit_code_of_a_difference(
    error: BaseException, code: int, said: str, monkeypatch: pytest.MonkeyPatch, cli: Cli
) -> None:
    def failing(*_: object) -> int:
        raise error

    monkeypatch.setattr("megatron_cg.tools.cli.main.invoke", failing)
    ended = cli("align")
    *before, last = ended.err.splitlines()
    assert ended.code == code != 1 and last.startswith(f"megatron-cg align: {said}")
    assert bool(before) == (code == DEFECT)


@pytest.mark.parametrize("words", [["--help"], ["--version"], ["align", "--help"], []])
def test_neither_help_nor_the_package_loads_torch_or_megatron(words: list[str]) -> None:
    code = (
        "import sys\n"
        "from megatron_cg.tools.cli.main import main\n"
        f"try:\n    {words!r} and main({words!r})\nexcept SystemExit:\n    pass\n"
        "slow = {'torch', 'megatron', 'numpy', 'yaml'}\n"
        "sys.exit(' '.join(slow & set(sys.modules)))\n"
    )
    done = python(code)
    assert done.stderr == "\n" and bool(done.stdout) is bool(words)


COMMAND = """
import os, signal, sys
# As a shell starts it; whoever runs these tests may ignore one, as nohup does.
for ending in (signal.SIGTERM, signal.SIGHUP):
    signal.signal(ending, signal.SIG_DFL)
signal.signal(signal.SIGINT, signal.default_int_handler)
from pathlib import Path
from megatron_cg.tools.align import run
from megatron_cg.tools.cli import main

run._STOP_SECONDS = 0.5
# As torchrun starts its workers: in sessions of their own.
LAUNCHER = "import subprocess, sys; subprocess.Popen(sys.argv[1:], start_new_session=True).wait()"

def invoke(*_):
    words = [sys.executable, "-c", LAUNCHER, sys.executable, "-c", {worker!r}]
    started = run.Run("a", words, dict(os.environ), Path({folder!r}))
    return started.make(60.0)

main.invoke = invoke
sys.exit(main.main(["align"]))
"""


@pytest.mark.parametrize("ending", [*ENDING, signal.SIGINT])
def test_what_a_command_runs_ends_with_it(tmp_path: Path, ending: signal.Signals) -> None:
    written = tmp_path / "pid"
    worker = (
        "import os, signal, time; from pathlib import Path; "
        "signal.signal(signal.SIGTERM, signal.SIG_IGN); "
        f"Path({str(written)!r}).write_text(str(os.getpid())); time.sleep(600)"
    )
    body = COMMAND.format(worker=worker, folder=str(tmp_path))
    command = subprocess.Popen([sys.executable, "-c", body])
    try:
        while not (written.exists() and written.read_text()):
            assert command.poll() is None
            time.sleep(0.05)
        worker_pid = int(written.read_text())
        command.send_signal(ending)
        assert command.wait(300) == 128 + ending
        assert ends(worker_pid)
    finally:
        command.kill()
        command.wait()


def test_a_signal_that_is_ignored_stays_ignored(cli: Cli) -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        assert cli("--version").code == 0
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)
