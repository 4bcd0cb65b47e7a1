"""Transformer Engine's Python sources, which cannot be imported without its compiled part."""

from __future__ import annotations

import sys
from pathlib import Path


def source_of_te(*below: str) -> Path:
    """A file or folder below ``transformer_engine/pytorch``, of what ``make test`` installs."""
    folders = [str(Path(sys.prefix, "te-source")), *sys.path]
    places = (Path(folder, "transformer_engine", "pytorch", *below) for folder in folders)
    found = next((place for place in places if place.exists()), None)
    assert found is not None, "transformer-engine's sources are not there: run make test"
    return found
