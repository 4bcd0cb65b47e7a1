"""Suggests the known word that is closest to a mistyped one."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def did_you_mean(word: str, known: Iterable[str], cutoff: float = 0.6) -> str:
    """The closest word of ``known`` as a question in brackets; empty where none is close.

    ``cutoff`` is the smallest similarity ratio, from 0 to 1, that difflib accepts as close.
    """
    close = difflib.get_close_matches(word, list(known), n=1, cutoff=cutoff)
    return f" (did you mean {close[0]}?)" if close else ""
