"""Converts text to a token stream in Megatron's indexed format, one token per byte."""

from __future__ import annotations

import sysconfig
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from megatron_cg.errors import MegatronCGError
from megatron_cg.upstream.symbols import Symbol

_BUILDER = Symbol(
    "megatron.core.datasets.indexed_dataset:IndexedDatasetBuilder",
    "the writer of Megatron's indexed format",
    attributes=("add_item", "end_document", "finalize"),
)
RELIES_ON = (_BUILDER,)

END_OF_DOCUMENT = 256
"""The token after each file; tokens 0 to 255 are its bytes."""
DEFAULT_BYTES = 4 * 2**20
"""Number of bytes of Python's own sources in the default text."""

# If the training set has only a few documents, Megatron's split can leave a share empty.
_ALL_FOR_TRAINING = "100,0,0"


class DataError(MegatronCGError):
    """The requested token stream cannot be used."""


@dataclass(frozen=True)
class TokenStream:
    """A dataset on disk; ``prefix`` without ``.bin`` and ``.idx``."""

    prefix: Path
    description: str
    is_bytes: bool
    """Whether tokens are bytes; then the tokenizer's flags are known."""

    def flags(self, cache: Path) -> list[str]:
        """Megatron's arguments for this data; sample indices go to ``cache``.

        The preset sets the vocabulary size: ids above 256 exist in the model but do not occur.
        """
        flags = ["--data-path", str(self.prefix), "--split", _ALL_FOR_TRAINING]
        flags += ["--data-cache-path", str(cache)]
        if self.is_bytes:
            # NullTokenizer uses ids as they are. By default the last id of the vocabulary ends a
            # document.
            flags += ["--tokenizer-type", "NullTokenizer"]
            flags += ["--null-tokenizer-eod-id", str(END_OF_DOCUMENT)]
        return flags


def existing(prefix: str) -> TokenStream:
    """An existing dataset. Raises DataError if ``.bin`` or ``.idx`` is missing."""
    for suffix in (".bin", ".idx"):
        if not Path(prefix + suffix).is_file():
            raise DataError(
                f"--data-path {prefix}: there is no file {prefix}{suffix}. Megatron's indexed "
                "format is a pair of files; give their common path without the suffix."
            )
    return TokenStream(Path(prefix).resolve(), prefix, is_bytes=False)


def python_sources(limit: int = DEFAULT_BYTES) -> list[Path]:
    """Modules of Python's standard library, sorted by name, up to ``limit`` bytes in total."""
    chosen, size = [], 0
    for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        if size >= limit:
            break
        chosen.append(path)
        size += path.stat().st_size
    return chosen


def from_text(files: Sequence[Path], directory: Path, description: str) -> TokenStream:
    """Write each file's bytes as one document to ``directory/text.{bin,idx}``."""
    import numpy
    import torch

    directory.mkdir(parents=True, exist_ok=True)
    prefix, count = directory.resolve() / "text", 0
    builder = _BUILDER.find()(f"{prefix}.bin", dtype=numpy.uint16)
    for file in files:
        tokens = numpy.fromfile(file, dtype=numpy.uint8).astype(numpy.int32)
        builder.add_item(torch.from_numpy(numpy.append(tokens, numpy.int32(END_OF_DOCUMENT))))
        builder.end_document()
        count += tokens.size + 1
    builder.finalize(f"{prefix}.idx")
    return TokenStream(prefix, f"{description}, {count:,} byte tokens", is_bytes=True)
