"""Typed errors. They say what was found, why it is wrong, and what to type or do instead."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


class MegatronCGError(RuntimeError):
    """Base of every error that this package raises on purpose."""


@dataclass(frozen=True)
class Violation:
    """One broken rule: what was ``found``, the ``reason`` it cannot work, what to type instead."""

    rule: str
    found: str
    reason: str
    remedy: str

    def __str__(self) -> str:
        return f"[{self.rule}] {self.found}: {self.reason}. Remedy: {self.remedy}."


class ConfigurationError(MegatronCGError):
    """CUDA graphs cannot be used with this configuration; ``violations`` holds all reasons.

    Raised before a model is built, so no GPU memory has been allocated.
    """

    def __init__(self, violations: Sequence[Violation]) -> None:
        self.violations = tuple(violations)
        count = len(self.violations)
        lines = "\n".join(f"  {number}. {item}" for number, item in enumerate(self.violations, 1))
        super().__init__(
            "CUDA graphs cannot be used as configured, "
            f"{count} reason{'s' * (count != 1)}:\n{lines}"
        )


class ArgumentError(ConfigurationError, ValueError):
    """A call of the Python API has wrong arguments; ``violations`` holds all of them."""


class UpstreamChangedError(MegatronCGError):
    """A symbol of Megatron, Megatron-FSDP or TE that we rely on is missing or different."""

    def __init__(self, package: str, version: str, symbol: str, expected: str) -> None:
        super().__init__(
            f"{package} {version}: {symbol} is not what megatron_cg relies on ({expected}). "
            "Type megatron-cg doctor: it says which versions are installed, which of them were "
            "seen to work, and what to install."
        )


class HookError(MegatronCGError):
    """A hook on a module to be captured cannot be used with a CUDA graph."""


class UnknownFsdpHookError(HookError):
    """Megatron-FSDP has installed a hook that this package does not know."""


class BufferInUseError(MegatronCGError):
    """Two units need one buffer of unsharded parameters at the same time."""


class CaptureError(MegatronCGError):
    """Capture failed; model, hooks, RNG, FP8 state and flags are as before it began."""


_READ = (
    "waits for the device and reads its memory on the host; a CUDA graph holds no host code. "
    "Leave this module out of --cuda-graph-modules or units, or keep the value in a tensor"
)


class HostSyncError(CaptureError):
    """Captured code makes the host wait for the device, at ``where``; no graph can contain that."""

    def __init__(self, where: str) -> None:
        super().__init__(f"{where} {_READ}.")


class NotRestoredError(MegatronCGError):
    """Something that was changed could not be restored; ``failed`` names all of it."""

    def __init__(self, failed: Sequence[str]) -> None:
        self.failed = tuple(failed)
        super().__init__(
            f"not restored after a capture, a verification or a repeated step: {'; '.join(failed)}."
            " Training would continue with other numbers, so this run ends on all ranks. Start "
            "from the last checkpoint, and leave what holds this tensor or state out of the graphs."
        )


class EarlierWorkError(CaptureError):
    """The GPU failed before capture began; nothing more can run in this process."""


class PhaseError(MegatronCGError):
    """The current phase of a session does not allow the requested operation."""


class FastPathError(MegatronCGError):
    """A parameter was used in a way that the FSDP fast path does not support."""


class ReplayMismatchError(MegatronCGError):
    """A graph must not be replayed: something has changed since capture."""


class PrecompileError(MegatronCGError):
    """A region cannot be compiled on one rank for all of them; nothing has been written."""


class ArtifactRefusedError(MegatronCGError):
    """A precompiled artifact must not be used; nothing in it has been used for training."""
