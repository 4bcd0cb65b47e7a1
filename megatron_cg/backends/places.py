"""The place of a call in a model: module, file, line and statement, from its stack frames."""

import linecache
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

import torch
from torch import nn

Frames = Iterable[tuple[FrameType, int]]
"""Frames with their current lines, the innermost first, as from ``traceback.walk_stack``."""

_TORCH = str(Path(torch.__file__).parent)
_PACKAGE = Path(__file__).parents[1]
_NOT_THE_MODEL = (
    _TORCH,
    *(str(_PACKAGE / name) for name in ("backends", "capture", "replay")),
    *(str(_PACKAGE / name) for name in ("integrations/standalone", "tools/cpu")),
)
"""Prefixes of files with code that a model calls but that is not part of the model."""


@dataclass(frozen=True)
class Place:
    """One call in the code of a model. Holds no tensor and no frame."""

    module: nn.Module | None
    """The innermost module whose code runs; None in a backward pass."""
    path: str
    """Its name below the root; empty for the root."""
    source: str
    """File, line, function and statement; empty if all known frames are in torch."""

    @property
    def owner(self) -> str:
        """The module in words: its path and its class."""
        if self.module is None:
            return "the backward pass"
        return f"{self.path or 'the callable itself'} ({type(self.module).__name__})"

    def __str__(self) -> str:
        return f"{self.owner}, {self.source}" if self.source else self.owner


def place_of(frames: Frames, root: nn.Module) -> Place | None:
    """The innermost call of a module below ``root``, or None if ``frames`` have none.

    In a backward pass autograd calls no module, so the place has no module. The frames of a
    ``torch.autograd.Function`` written in Python still show the line.
    """
    names = {id(module): name for name, module in root.named_modules()}
    source = ""
    for frame, line in frames:
        if frame.f_code is torch.autograd.backward.__code__:
            return Place(None, "", source)
        if not source and not frame.f_code.co_filename.startswith(_NOT_THE_MODEL):
            source = _source(frame, line)
        owner = frame.f_locals.get("self")
        if isinstance(owner, nn.Module) and id(owner) in names:
            return Place(owner, names[id(owner)], source)
    return None


def _source(frame: FrameType, line: int) -> str:
    code = frame.f_code
    text = linecache.getline(code.co_filename, line, frame.f_globals).strip()
    statement = f": `{text}`" if text else ""
    return f"{code.co_filename}:{line} in {code.co_name}{statement}"
