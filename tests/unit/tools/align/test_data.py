"""Text as Megatron's indexed dataset, read back with Megatron's own reader."""

from __future__ import annotations

from pathlib import Path

import numpy
import pytest

from megatron_cg.tools.align import token_data
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

    one, two = tmp_path / "one", tmp_path / "two"
    one.write_bytes(bytes(range(256)))
    two.write_text("æ\0")
    stream = from_text([one, two], tmp_path / "data", "two files")
    dataset = IndexedDataset(str(stream.prefix))
    assert [list(document) for document in dataset] == [
        [*range(256), END_OF_DOCUMENT],
        [0xC3, 0xA6, 0, END_OF_DOCUMENT],
    ]
    assert list(dataset.document_indices) == [0, 1, 2]
    assert dataset.index.dtype is numpy.uint16
    assert stream.description == "two files, 261 byte tokens"
    flags = stream.flags(tmp_path / "cache")
    assert flags[:2] == ["--data-path", str(tmp_path / "data" / "text")]
    assert flags[flags.index("--null-tokenizer-eod-id") + 1] == "256"


def test_existing_data_is_used_as_it_is_and_half_of_it_is_refused(tmp_path: Path) -> None:
    prefix = str(tmp_path / "tokens")
    Path(f"{prefix}.bin").touch()
    with pytest.raises(DataError, match=r"there is no file .*tokens\.idx\."):
        existing(prefix)
    Path(f"{prefix}.idx").touch()
    flags = existing(prefix).flags(tmp_path)
    assert flags[:2] == ["--data-path", prefix] and "--tokenizer-type" not in flags


def test_the_default_text_is_pythons_library_and_ends_at_the_limit() -> None:
    files = python_sources(limit=100_000)
    assert files == sorted(files) and all(path.suffix == ".py" for path in files)
    sizes = [path.stat().st_size for path in files]
    assert sum(sizes[:-1]) < 100_000 <= sum(sizes)


REAL_CACHE_FOLDER = token_data.cache_folder


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache folder of the test's own, as a user names one."""
    monkeypatch.setattr(token_data, "cache_folder", REAL_CACHE_FOLDER)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "megatron-cg" / "tokens"


def tokens(prefix: Path) -> list[int]:
    from megatron.core.datasets.indexed_dataset import IndexedDataset

    dataset = IndexedDataset(str(prefix))  # Kept as long as its memory is read.
    return [int(token) for token in dataset[0]]


def test_a_text_is_tokenized_once_and_another_for_itself(cache: Path, tmp_path: Path) -> None:
    one, two, work = tmp_path / "one", tmp_path / "two", tmp_path / "work"
    one.write_text("ab")
    two.write_text("c")
    first = cached([one, two], "a text", work)
    assert tokens(first.prefix) == [*b"ab", END_OF_DOCUMENT]
    written = first.prefix.with_suffix(".bin").stat().st_mtime_ns
    assert cached([one, two], "a text", work) == first
    assert first.prefix.with_suffix(".bin").stat().st_mtime_ns == written
    # The same bytes in other files are another text.
    one.write_text("a")
    two.write_text("bc")
    other = cached([one, two], "a text", work)
    assert sorted(cache.iterdir()) == sorted({first.prefix.parent, other.prefix.parent})
    assert not work.exists()


def test_a_text_that_another_run_makes_meanwhile_is_used(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "text").write_text("some text")
    write = token_data._written
    made: list[token_data.TokenStream | None] = []

    def slow(texts: list[bytes], directory: Path, description: str) -> token_data.TokenStream:
        if not made:
            made.append(None)
            made.append(cached([tmp_path / "text"], "a text", tmp_path))
        return write(texts, directory, description)

    monkeypatch.setattr(token_data, "_written", slow)
    assert cached([tmp_path / "text"], "a text", tmp_path) == made[1]
    assert len(list(cache.iterdir())) == 1


def test_without_a_cache_the_text_goes_to_the_run(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "text").write_text("some text")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "text"))
    stream = cached([tmp_path / "text"], "a text", tmp_path / "work")
    assert stream.prefix == tmp_path / "work" / "text"
    assert tokens(stream.prefix) == [*b"some text", END_OF_DOCUMENT]
