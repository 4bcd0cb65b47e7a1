"""Outputs are whole or as they were, whatever ends the writing."""

import os
from pathlib import Path

import pytest

from megatron_cg.errors import MegatronCGError
from megatron_cg.tools.files import whole_file


def test_an_interrupt_leaves_what_was_there_and_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "rank0.json"
    path.write_text("good")
    with pytest.raises(KeyboardInterrupt), whole_file(path) as part:
        part.write_text("half")
        raise KeyboardInterrupt
    assert path.read_text() == "good" and list(tmp_path.iterdir()) == [path]


def test_a_link_beside_the_file_is_not_written_through(tmp_path: Path) -> None:
    path, other = tmp_path / "page.html", tmp_path / "other"
    other.write_text("of another user")
    for name in (f".{path.name}.{os.getpid()}.part", f".{path.name}.part", "page.html.part"):
        (tmp_path / name).symlink_to(other)
    with whole_file(path) as part:
        assert not part.is_symlink() and part.exists()
        part.write_text("text")
    assert other.read_text() == "of another user" and not path.is_symlink()


def test_only_a_regular_file_is_replaced(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "link").symlink_to("/dev/null")
    for path in (tmp_path / "pipe", tmp_path / "link", tmp_path, Path("/dev/null")):
        with pytest.raises(MegatronCGError, match="is not a regular file"), whole_file(path):
            pass
    assert Path("/dev/null").is_char_device() and not list(tmp_path.glob(".*"))


def test_folders_are_made_and_links_are_followed(tmp_path: Path) -> None:
    link, target = tmp_path / "link", tmp_path / "a" / "b" / "file"
    link.symlink_to(target)
    with whole_file(link) as part:
        part.write_text("text")
    assert link.is_symlink() and target.read_text() == "text"
