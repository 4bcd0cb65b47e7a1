"""Converts text to a token stream in Megatron's indexed format, one token per byte."""

from __future__ import annotations

import errno
import hashlib
import os
import shutil
import sysconfig
from collections.abc import Sequence
from contextlib import suppress
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
_FORM = "one uint16 a byte, 256 after each file, megatron-core's indexed format"
"""The version of the format of a cached token stream. It is part of the file name."""
DEFAULT_BYTES = 4 * 2**20
"""Number of bytes of Python's own sources in the default text."""

# If the training set has only a few documents, Megatron's split can leave a share empty.
_ALL_FOR_TRAINING = "100,0,0"


class DataError(MegatronCGError):
    """The requested text or token stream cannot be used."""


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
                "format is a pair of files; give their common path without the suffix, or --text "
                "FILE to have one made."
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


def cached(files: Sequence[Path], description: str, otherwise: Path) -> TokenStream:
    """As :func:`from_text`, but created once for each content and kept for later runs.

    The stream is stored in ``megatron-cg/tokens`` in the user's cache folder, under a digest of the
    text. Runs that create it at the same time do not disturb each other. If that folder is not
    writable, the stream is created in ``otherwise``.
    """
    texts = _texts(files)
    count = sum(len(text) + 1 for text in texts)
    try:
        return _stream(_kept(texts, count), description, count)
    except OSError:
        return from_text(files, otherwise, description)


def cache_folder() -> Path:
    """``megatron-cg`` in the user's cache folder, by the XDG Base Directory Specification 0.8.

    Raises FileNotFoundError for a user without a home directory.
    """
    chosen = Path(os.environ.get("XDG_CACHE_HOME", ""))
    # The specification requires to ignore a relative path.
    chosen = chosen if chosen.is_absolute() else Path(os.path.expanduser("~/.cache"))
    if not chosen.is_absolute():
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), "~")
    return chosen / "megatron-cg"


def _kept(texts: Sequence[bytes], count: int) -> Path:
    """The prefix of the cached token stream; created unless it is complete."""
    found = hashlib.sha256(_FORM.encode())
    for text in texts:
        found.update(f"{len(text)} ".encode() + text)
    folder = cache_folder() / "tokens" / found.hexdigest()[:32]
    if not _is_whole(folder / "text", count):
        part = folder.with_name(f"{folder.name}.{os.getpid()}.part")
        try:
            _write(texts, part)
            _rename(part, folder)
        finally:
            shutil.rmtree(part, ignore_errors=True)
    return folder / "text"


def from_text(files: Sequence[Path], directory: Path, description: str) -> TokenStream:
    """Write each file's bytes as one document to ``directory/text.{bin,idx}``.

    Raises DataError if a file cannot be read, or if all of them are empty.
    """
    texts = _texts(files)
    _write(texts, directory)
    return _stream(directory / "text", description, sum(len(text) + 1 for text in texts))


def _stream(prefix: Path, description: str, count: int) -> TokenStream:
    return TokenStream(prefix.resolve(), f"{description}, {count:,} byte tokens", is_bytes=True)


def _is_whole(prefix: Path, count: int) -> bool:
    """Whether both files exist and have their full length."""
    with suppress(OSError):
        index = prefix.with_suffix(".idx").stat().st_size
        return prefix.with_suffix(".bin").stat().st_size == 2 * count and index > 0
    return False


def _rename(part: Path, folder: Path) -> None:
    """Rename ``part`` to ``folder``; if ``folder`` exists, replace the files in it."""
    try:
        part.rename(folder)
    except OSError as error:
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
            raise
        for file in part.iterdir():
            file.replace(folder / file.name)


def _write(texts: Sequence[bytes], directory: Path) -> None:
    """Write ``directory/text.{bin,idx}``, each text one document."""
    import numpy
    import torch

    builder_type = _BUILDER.find()
    directory.mkdir(parents=True, exist_ok=True)
    prefix = directory / "text"
    part = directory / f"text.{os.getpid()}.part"
    builder = builder_type(str(part), dtype=numpy.uint16)
    try:
        for text in texts:
            builder.add_item(torch.tensor([*text, END_OF_DOCUMENT], dtype=torch.int32))
            builder.end_document()
        builder.finalize(f"{prefix}.idx")
        os.replace(part, f"{prefix}.bin")
    finally:
        part.unlink(missing_ok=True)


def _texts(files: Sequence[Path]) -> list[bytes]:
    """The content of each file that is not empty."""
    texts = [text for text in map(_read, files) if text]
    if not texts:
        names = ", ".join(map(str, files)) or "no file"
        raise DataError(f"--text {names}: there is no text in it. Give a file that is not empty.")
    return texts


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise DataError(f"--text {path}: {error.strerror}. Give a file that can be read.") from None
