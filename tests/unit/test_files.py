"""Outputs are whole or as they were, whatever ends the writing."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron_cg.files import whole_file


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
    with whole_file(link) as part:
        part.write_text("text")
    assert link.is_symlink() and target.read_text() == "text"
