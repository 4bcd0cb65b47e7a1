"""Files that are written whole or not at all."""

import os
import secrets
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from megatron_cg.errors import MegatronCGError


@contextmanager
def whole_file(path: Path, mode: int = 0o666) -> Iterator[Path]:
    """Yield a new file beside ``path`` to write to; after the block it replaces ``path``.

    Where the block raises, what was at ``path`` stays as it was: a full disk or an interrupted
    command never leaves half a file. Links at ``path`` are followed, and parent folders are made.
    The new file's name cannot be guessed, so in a folder of many users nobody has put a link there.

    Raises OSError, and MegatronCGError if ``path`` is a device, a pipe or a folder.
    """
    if path.exists() and not stat.S_ISREG(path.stat().st_mode):
        raise MegatronCGError(
            f"{path} is not a regular file, and only such a file can be replaced: give another name"
        )
    target = Path(os.path.realpath(path))
    target.parent.mkdir(parents=True, exist_ok=True)
    part = target.with_name(f".{secrets.token_hex(8)}.part")
    part.touch(mode, exist_ok=False)
    try:
        yield part
        part.replace(target)
    finally:
        part.unlink(missing_ok=True)
