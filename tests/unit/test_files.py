"""Outputs are whole or as they were, whatever ends the writing."""

from __future__ import annotations

import errno
import resource
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from megatron_cg.files import whole_file, write_text


@pytest.fixture
def small_files() -> Iterator[None]:
    """No file may exceed 1,000 bytes, as with a quota; the error then names no file."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, before)
    signal.signal(signal.SIGXFSZ, handler)


@pytest.mark.usefixtures("small_files")
def test_what_was_there_stays_where_writing_fails(tmp_path: Path) -> None:
    path = tmp_path / "report.html"
    write_text(path, "good")
    with pytest.raises(OSError) as caught:
        write_text(path, "x" * 2000)
    assert (caught.value.errno, caught.value.filename) == (errno.EFBIG, str(path))
    assert path.read_text() == "good" and list(tmp_path.iterdir()) == [path]


def test_an_interrupt_leaves_what_was_there_and_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "rank0.json"
    path.write_text("good")
    with pytest.raises(KeyboardInterrupt), whole_file(path) as part:
        part.write_text("half")
        raise KeyboardInterrupt
    assert path.read_text() == "good" and list(tmp_path.iterdir()) == [path]


def test_folders_are_made_and_links_are_followed(tmp_path: Path) -> None:
    link, target = tmp_path / "link", tmp_path / "a" / "b" / "file"
    link.symlink_to(target)
    write_text(link, "text")
    assert link.is_symlink() and target.read_text() == "text"


def test_a_folder_and_a_file_in_the_way_are_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for path in (tmp_path, tmp_path / "file" / "below"):
        with pytest.raises(OSError) as caught:
            write_text(path, "text")
        assert str(caught.value.filename) in (str(path), str(path.parent))


def test_a_pipe_is_written_to_and_not_replaced(tmp_path: Path) -> None:
    code = (
        "from pathlib import Path; from megatron_cg.files import write_text\n"
        "write_text(Path('/dev/stdout'), 'text')\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True)
    assert done.stdout == b"text"
