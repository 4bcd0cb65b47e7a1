"""Text as Megatron's indexed dataset, read back with Megatron's own reader."""

from pathlib import Path

import numpy

from megatron_cg.tools.align.run import (
    END_OF_DOCUMENT,
    data_flags,
    from_text,
    python_sources,
)


def test_bytes_are_tokens_and_files_are_documents(tmp_path: Path) -> None:
    from megatron.core.datasets.indexed_dataset import IndexedDataset

    one, two = tmp_path / "one", tmp_path / "two"
    one.write_bytes(bytes(range(256)))
    two.write_text("æ\0")
    prefix = from_text([one, two], tmp_path / "data")
    dataset = IndexedDataset(str(prefix))
    assert [list(document) for document in dataset] == [
        [*range(256), END_OF_DOCUMENT],
        [0xC3, 0xA6, 0, END_OF_DOCUMENT],
    ]
    assert list(dataset.document_indices) == [0, 1, 2]
    assert dataset.index.dtype is numpy.uint16
    flags = data_flags(prefix, tmp_path / "cache")
    assert flags[:2] == ["--data-path", str(tmp_path / "data" / "text")]
    assert flags[flags.index("--null-tokenizer-eod-id") + 1] == "256"


def test_the_default_text_is_pythons_library_and_ends_at_the_limit() -> None:
    files = python_sources(limit=100_000)
    assert files == sorted(files) and all(path.suffix == ".py" for path in files)
    sizes = [path.stat().st_size for path in files]
    assert sum(sizes[:-1]) < 100_000 <= sum(sizes)
