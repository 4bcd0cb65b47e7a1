"""Why a part of the fast path leaves its work to Megatron-FSDP."""

from __future__ import annotations


class StepsAsideError(Exception):
    """A part does not apply to this model; the text says why. Never reaches a user as an error."""
