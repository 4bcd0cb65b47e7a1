"""Converts text to a token stream in Megatron's indexed format, one token per byte."""

import sysconfig
from collections.abc import Sequence
from pathlib import Path

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


def data_flags(prefix: Path, cache: Path) -> list[str]:
    """Megatron's arguments for such a dataset; sample indices go to ``cache``.

    ``prefix`` is without ``.bin`` and ``.idx``. The preset sets the vocabulary size: ids above 256
    exist in the model but do not occur.
    """
    flags = ["--data-path", str(prefix), "--split", _ALL_FOR_TRAINING]
    flags += ["--data-cache-path", str(cache)]
    # NullTokenizer uses ids as they are. By default the last id of the vocabulary ends a document.
    flags += ["--tokenizer-type", "NullTokenizer"]
    return [*flags, "--null-tokenizer-eod-id", str(END_OF_DOCUMENT)]


def python_sources(limit: int = DEFAULT_BYTES) -> list[Path]:
    """Modules of Python's standard library, sorted by name, up to ``limit`` bytes in total."""
    chosen, size = [], 0
    for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        if size >= limit:
            break
        chosen.append(path)
        size += path.stat().st_size
    return chosen


def from_text(files: Sequence[Path], directory: Path) -> Path:
    """Write each file's bytes as one document to ``directory/text.{bin,idx}``; the prefix."""
    import numpy
    import torch

    directory.mkdir(parents=True, exist_ok=True)
    prefix = directory.resolve() / "text"
    builder = _BUILDER.find()(f"{prefix}.bin", dtype=numpy.uint16)
    for file in files:
        tokens = numpy.fromfile(file, dtype=numpy.uint8).astype(numpy.int32)
        builder.add_item(torch.from_numpy(numpy.append(tokens, numpy.int32(END_OF_DOCUMENT))))
        builder.end_document()
    builder.finalize(f"{prefix}.idx")
    return prefix
