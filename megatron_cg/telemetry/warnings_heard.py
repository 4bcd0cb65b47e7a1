"""Collects the logged warnings and errors of this package: mismatches, failed captures, notices."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager

_PACKAGE = "megatron_cg"


class _Listener(logging.Handler):
    def __init__(self, heard: Callable[[str, str], None]) -> None:
        super().__init__(logging.WARNING)
        self._heard = heard

    def emit(self, record: logging.LogRecord) -> None:
        """Pass a record on; logging handles failures, as in every handler."""
        try:
            self._heard(record.levelname.lower(), record.getMessage())
        except Exception:
            self.handleError(record)


@contextmanager
def listening(heard: Callable[[str, str], None]) -> Iterator[None]:
    """Call ``heard(level, text)`` for each warning and error of this package in the block."""
    listener = _Listener(heard)
    logger = logging.getLogger(_PACKAGE)
    logger.addHandler(listener)
    try:
        yield
    finally:
        logger.removeHandler(listener)
