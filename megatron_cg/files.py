"""Files that are written whole or not at all."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def whole_file(path: Path) -> Iterator[Path]:
    """Yield a file beside ``path`` to write to; after the block it replaces ``path``.

    Where the block raises, what was at ``path`` stays as it was: a full disk or an interrupted
    command never leaves half a file. Links are followed, and parent folders are made.
    """
    target = path.resolve()
    target.parent.mkdir(parents=True, exist_ok=True)
    # Hidden, and with its own suffix, so that it is not mistaken for the file.
    part = target.with_name(f".{target.name}.{os.getpid()}.part")
    try:
        yield part
        part.replace(target)
    finally:
        part.unlink(missing_ok=True)
