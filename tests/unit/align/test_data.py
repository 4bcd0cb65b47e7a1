"""Text as Megatron's indexed dataset, read back with Megatron's own reader."""

from __future__ import annotations

from pathlib import Path

import numpy
import pytest

from megatron_cg.align.data import (
    END_OF_DOCUMENT,
    DataError,
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
