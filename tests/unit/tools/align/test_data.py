"""Text as Megatron's indexed dataset, read back with Megatron's own reader."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy
import pytest

from megatron_cg.tools.align import token_data as data
from megatron_cg.tools.align.token_data import (
    END_OF_DOCUMENT,
    DataError,
    cached,
    existing,
    from_text,
    python_sources,
)


def test_bytes_are_tokens_and_files_are_documents(tmp_path: Path) -> None:
    from megatron.core.datasets.indexed_dataset import IndexedDataset

    one, two, empty = tmp_path / "one", tmp_path / "two", tmp_path / "empty"
    one.write_bytes(bytes(range(256)))
    two.write_text("æ\0")
    empty.touch()

    stream = from_text([one, empty, two], tmp_path / "data", "two files")

    dataset = IndexedDataset(str(stream.prefix))
    assert [list(document) for document in dataset] == [
        [*range(256), END_OF_DOCUMENT],
        [0xC3, 0xA6, 0, END_OF_DOCUMENT],
    ]
    assert list(dataset.document_indices) == [0, 1, 2]
    assert dataset.index.dtype is numpy.uint16
    assert stream.description == "two files, 261 byte tokens"
    assert sorted(path.name for path in (tmp_path / "data").iterdir()) == ["text.bin", "text.idx"]


def test_flags_name_the_data_and_the_end_of_a_document(tmp_path: Path) -> None:
    file = tmp_path / "one"
    file.write_text("text")
    flags = from_text([file], tmp_path, "x").flags(tmp_path / "cache")
    assert flags[:2] == ["--data-path", str(tmp_path / "text")]
    assert flags[flags.index("--null-tokenizer-eod-id") + 1] == "256"


def test_existing_data_is_used_as_it_is(tmp_path: Path) -> None:
    for suffix in (".bin", ".idx"):
        (tmp_path / f"tokens{suffix}").touch()
    flags = existing(str(tmp_path / "tokens")).flags(tmp_path)
    assert flags[:2] == ["--data-path", str(tmp_path / "tokens")]
    assert "--tokenizer-type" not in flags


def test_half_a_dataset_is_refused(tmp_path: Path) -> None:
    (tmp_path / "tokens.bin").touch()
    with pytest.raises(DataError, match=r"there is no file .*tokens\.idx\..*or --text FILE"):
        existing(str(tmp_path / "tokens"))


def test_no_text_is_refused_and_leaves_no_file(tmp_path: Path) -> None:
    (tmp_path / "empty").touch()
    with pytest.raises(DataError, match="there is no text in it"):
        from_text([tmp_path / "empty"], tmp_path / "data", "x")
    with pytest.raises(DataError, match="No such file or directory"):
        from_text([tmp_path / "absent"], tmp_path / "data", "x")
    assert not (tmp_path / "data").exists()


def test_the_default_text_is_pythons_library_and_ends_at_the_limit() -> None:
    files = python_sources(limit=100_000)
    assert files == sorted(files) and all(path.suffix == ".py" for path in files)
    sizes = [path.stat().st_size for path in files]
    assert sum(sizes[:-1]) < 100_000 <= sum(sizes)


REAL_CACHE_FOLDER = data.cache_folder


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache folder of the test's own, as a user names one."""
    monkeypatch.setattr(data, "cache_folder", REAL_CACHE_FOLDER)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "megatron-cg" / "tokens"


@pytest.fixture
def file(tmp_path: Path) -> Path:
    (tmp_path / "file").write_text("some text")
    return tmp_path / "file"


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Where token streams were written."""
    places: list[Path] = []
    write = data._write

    def noted(texts: list[bytes], at: Path) -> None:
        places.append(at)
        write(texts, at)

    monkeypatch.setattr(data, "_write", noted)
    return places


def tokens(prefix: Path) -> list[int]:
    from megatron.core.datasets.indexed_dataset import IndexedDataset

    dataset = IndexedDataset(str(prefix))  # Kept as long as its memory is read.
    return [int(token) for token in dataset[0]]


def test_a_text_is_tokenized_once_and_another_for_itself(
    cache: Path, file: Path, made: list[Path], tmp_path: Path
) -> None:
    first, again = (cached([file], "a text", tmp_path / "work") for _ in range(2))
    assert first == again and len(made) == 1 and first.prefix.parent.parent == cache
    assert tokens(first.prefix) == [*b"some text", END_OF_DOCUMENT]
    file.write_text("some tex.")  # As long as before, and maybe in the same second.
    other = cached([file], "a text", tmp_path / "work")
    assert len(made) == 2 and tokens(other.prefix) == [*b"some tex.", END_OF_DOCUMENT]
    assert tokens(first.prefix) == [*b"some text", END_OF_DOCUMENT]
    assert sorted(cache.iterdir()) == sorted({first.prefix.parent, other.prefix.parent})
    assert not (tmp_path / "work").exists()


def test_where_files_end_makes_another_text(cache: Path, tmp_path: Path) -> None:
    one, two = tmp_path / "one", tmp_path / "two"
    found = set()
    for texts in (("ab", "c"), ("a", "bc")):
        one.write_text(texts[0])
        two.write_text(texts[1])
        found.add(cached([one, two], "texts", tmp_path).prefix)
    assert len(found) == 2


@pytest.mark.parametrize("suffix", [".bin", ".idx"])
def test_a_cached_text_that_was_cut_is_made_again(
    suffix: str, cache: Path, file: Path, tmp_path: Path
) -> None:
    stream = cached([file], "a text", tmp_path)
    stream.prefix.with_suffix(suffix).write_bytes(b"")
    assert cached([file], "a text", tmp_path) == stream
    assert tokens(stream.prefix) == [*b"some text", END_OF_DOCUMENT]
    assert len(list(cache.iterdir())) == 1


def test_two_runs_that_make_one_text_at_once_do_not_disturb_each_other(
    cache: Path, file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = data._write
    others: list[Any] = []

    def slow(texts: list[bytes], directory: Path) -> None:
        if not others:
            # Another process does all its work between the check and the writing of this one.
            others.append(None)
            monkeypatch.setattr("os.getpid", lambda: -1)
            others.append(cached([file], "a text", tmp_path))
            monkeypatch.undo()
            monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
            assert tokens(others[1].prefix) == [*b"some text", END_OF_DOCUMENT]
        write(texts, directory)

    monkeypatch.setattr(data, "_write", slow)
    monkeypatch.setattr(data, "cache_folder", REAL_CACHE_FOLDER)
    assert cached([file], "a text", tmp_path) == others[1]
    assert tokens(others[1].prefix) == [*b"some text", END_OF_DOCUMENT]
    assert len(list(cache.iterdir())) == 1


def test_without_a_cache_the_text_goes_to_the_run(
    cache: Path, file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(file))
    stream = cached([file], "a text", tmp_path / "work")
    assert stream.prefix == tmp_path / "work" / "text"
    assert tokens(stream.prefix) == [*b"some text", END_OF_DOCUMENT]


def test_a_relative_cache_folder_is_ignored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    for chosen in ("", "relative"):
        monkeypatch.setenv("XDG_CACHE_HOME", chosen)
        assert REAL_CACHE_FOLDER() == tmp_path / ".cache" / "megatron-cg"
