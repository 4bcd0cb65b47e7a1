"""Converts text to a token stream in Megatron's indexed format, one token per byte."""

from __future__ import annotations

import hashlib
import os
import shutil
import sysconfig
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from megatron_cg.errors import MegatronCGError
from megatron_cg.upstream.symbols import Symbol

_BUILDER = Symbol(
    "megatron-core",
    "megatron.core.datasets.indexed_dataset:IndexedDatasetBuilder",
    "the writer of Megatron's indexed format",
    attributes=("add_item", "end_document", "finalize"),
)
RELIES_ON = (_BUILDER,)

END_OF_DOCUMENT = 256
"""The token after each file; tokens 0 to 255 are its bytes."""
_FORM = b"one uint16 a byte, 256 after each file, megatron-core's indexed format"
"""The version of the format of a cached token stream. It is part of the folder's name."""
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
    texts = [path.read_bytes() for path in files]
    return _written(texts, directory, description)


def cached(files: Sequence[Path], description: str, otherwise: Path) -> TokenStream:
    """As :func:`from_text`, but created once for each content and kept for later runs.

    The stream is stored in ``megatron-cg/tokens`` in the user's cache folder, under a digest of the
    text. If that folder is not writable, it is created in ``otherwise``.
    """
    texts = [path.read_bytes() for path in files]
    digest = hashlib.sha256(_FORM)
    for text in texts:
        digest.update(b"%d " % len(text) + text)
    try:
        folder = cache_folder() / "tokens" / digest.hexdigest()[:32]
        if not folder.exists():
            folder.parent.mkdir(parents=True, exist_ok=True)
            part = Path(tempfile.mkdtemp(dir=folder.parent))
            try:
                _written(texts, part, description)
                part.rename(folder)
            except OSError:
                shutil.rmtree(part, ignore_errors=True)
                # Another run has made it meanwhile.
                if not folder.exists():
                    raise
    except (OSError, RuntimeError):
        return _written(texts, otherwise, description)
    return _stream(texts, folder, description)


def cache_folder() -> Path:
    """``megatron-cg`` in the user's cache folder. Raises RuntimeError for a user without a home."""
    chosen = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache")
    return chosen.expanduser() / "megatron-cg"


def _written(texts: Sequence[bytes], directory: Path, description: str) -> TokenStream:
    import numpy
    import torch

    directory.mkdir(parents=True, exist_ok=True)
    stream = _stream(texts, directory, description)
    builder = _BUILDER.find()(f"{stream.prefix}.bin", dtype=numpy.uint16)
    for text in texts:
        builder.add_item(torch.tensor([*text, END_OF_DOCUMENT], dtype=torch.int32))
        builder.end_document()
    builder.finalize(f"{stream.prefix}.idx")
    return stream


def _stream(texts: Sequence[bytes], directory: Path, description: str) -> TokenStream:
    tokens = sum(len(text) + 1 for text in texts)
    description = f"{description}, {tokens:,} byte tokens"
    return TokenStream(directory.resolve() / "text", description, is_bytes=True)
