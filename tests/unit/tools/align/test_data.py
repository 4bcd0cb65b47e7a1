"""Text as Megatron's indexed dataset, read back with Megatron's own reader."""

from __future__ import annotations

from pathlib import Path

import numpy
import pytest

from megatron_cg.tools.align.token_data import (
    END_OF_DOCUMENT,
    DataError,
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
