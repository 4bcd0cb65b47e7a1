"""Text turned into a real token stream in Megatron's indexed format, one token a byte.

Relied on: megatron-core 0.19.2, ``megatron.core.datasets.indexed_dataset:IndexedDatasetBuilder``.
"""

from __future__ import annotations

import os
import sysconfig
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy
import torch

from megatron_cg.errors import MegatronCGError
from megatron_cg.versions import Symbol

_BUILDER = Symbol(
    "megatron-core",
    "megatron.core.datasets.indexed_dataset:IndexedDatasetBuilder",
    "the writer of Megatron's indexed format",
    attributes=("add_item", "end_document", "finalize"),
)
RELIES_ON = (_BUILDER,)

END_OF_DOCUMENT = 256
"""The token after each file; tokens 0 to 255 are its bytes."""
BYTE_VOCABULARY = 257
DEFAULT_BYTES = 4 * 2**20
"""How much of Python's own sources the default text takes."""

# Where the training set comes to a few documents, Megatron's split can leave a share empty.
_ALL_FOR_TRAINING = "100,0,0"


class DataError(MegatronCGError):
    """The text or token stream that was asked for cannot be used."""


@dataclass(frozen=True)
class TokenStream:
    """A dataset on disk; ``prefix`` without ``.bin`` and ``.idx``."""

    prefix: Path
    description: str
    is_bytes: bool
    """Whether the tokens are bytes, so that the tokenizer's flags are known."""

    def flags(self, cache: Path) -> list[str]:
        """Megatron's arguments for this data; sample indices go to ``cache``.

        The vocabulary's size is the preset's: ids above 256 exist in the model and do not occur.
        """
        flags = ["--data-path", str(self.prefix), "--split", _ALL_FOR_TRAINING]
        flags += ["--data-cache-path", str(cache)]
        if self.is_bytes:
            # NullTokenizer takes ids as they are and, unless told, the vocabulary's last id as
            # the end of a document.
            flags += ["--tokenizer-type", "NullTokenizer"]
            flags += ["--null-tokenizer-eod-id", str(END_OF_DOCUMENT)]
        return flags


def existing(prefix: str) -> TokenStream:
    """A dataset made before. Raises DataError when ``.bin`` or ``.idx`` is not there."""
    for suffix in (".bin", ".idx"):
        if not Path(prefix + suffix).is_file():
            raise DataError(
                f"--data-path {prefix}: there is no file {prefix}{suffix}. Megatron's indexed "
                "format is a pair of files; give their common path without the suffix, or --text "
                "FILE to have one made."
            )
    return TokenStream(Path(prefix).resolve(), prefix, is_bytes=False)


def python_sources(limit: int = DEFAULT_BYTES) -> list[Path]:
    """Modules of Python's own library, in the order of their names, up to ``limit`` bytes."""
    chosen, size = [], 0
    for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        if size >= limit:
            break
        chosen.append(path)
        size += path.stat().st_size
    return chosen


def from_text(files: Sequence[Path], directory: Path, description: str) -> TokenStream:
    """The files' bytes as one document each, written to ``directory/text.{bin,idx}``.

    Raises DataError for a file that cannot be read, and when all of them are empty.
    """
    builder_type = _BUILDER.find()
    directory.mkdir(parents=True, exist_ok=True)
    prefix = directory / "text"
    part = directory / f"text.{os.getpid()}.part"
    builder = builder_type(str(part), dtype=numpy.uint16)
    try:
        count = _add_files(builder, files)
        builder.finalize(f"{prefix}.idx")
        os.replace(part, f"{prefix}.bin")
    finally:
        part.unlink(missing_ok=True)
    return TokenStream(prefix.resolve(), f"{description}, {count:,} byte tokens", is_bytes=True)


def _add_files(builder: Any, files: Sequence[Path]) -> int:
    """Add each file as one document; returns how many tokens there are."""
    count = 0
    for path in files:
        text = _read(path)
        if text:
            tokens = [*text, END_OF_DOCUMENT]
            builder.add_item(torch.tensor(tokens, dtype=torch.int32))
            builder.end_document()
            count += len(tokens)
    if not count:
        names = ", ".join(map(str, files)) or "no file"
        raise DataError(f"--text {names}: there is no text in it. Give a file that is not empty.")
    return count


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise DataError(f"--text {path}: {error.strerror}. Give a file that can be read.") from None
