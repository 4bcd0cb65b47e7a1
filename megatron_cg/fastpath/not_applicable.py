"""The exception of a part of the fast path that is not applicable."""

from __future__ import annotations


class NotApplicableError(Exception):
    """A part is not applicable to this model; the text says why. Users never see it as an error."""
