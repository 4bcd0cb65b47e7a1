"""Typed errors. They say what was found, why it is wrong, and what to type or do instead."""

import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

LEAVE_OUT = "Leave this module out of {flag:--cuda-graph-modules}"
LEAVE_LAYER_OUT = "leave the layer out of {flag:--cg-layers}"
WITHOUT_GRAPHS = "To train without graphs: {flag:--cuda-graph-impl none}."
WITHOUT_FAST_PATH = "type {flag:--cg-no-fsdp-fast-path}."
"""Remedies of several errors; see :class:`Voice`."""
STEP_DIFFERS = "trained with graphs and then eagerly, has other numbers"
"""In the error and in the log line of a verified step, by which ``align`` finds them."""


class Voice:
    """Names settings in messages as the caller gives them; this one as flags.

    A message is a format string, in which ``{flag:--cg-layers}`` is a setting, with a value or
    without, and ``{add:--bf16}``, ``{type:--fp8-recipe delayed}`` and ``{drop:--cg-layers}`` are
    what to do with one, or with several in a row.
    """

    def say(self, message: str, /, **values: object) -> str:
        verbs = {verb: _Verb(self, verb) for verb in ("add", "type", "drop")}
        return message.format(flag=_Verb(self, ""), **verbs, **values)

    def settings(self, verb: str, flags: str) -> str:
        """``flags`` are as typed; ``verb`` is empty if they are only named."""
        return f"{verb} {flags}".lstrip()


@dataclass(frozen=True)
class _Verb:
    voice: Voice
    verb: str

    def __format__(self, flags: str) -> str:
        return self.voice.settings(self.verb, flags)


_voices = [Voice()]


def current_voice() -> Voice:
    """The voice for the caller that is served now."""
    return _voices[-1]


def say(message: str, /, **values: object) -> str:
    """Format a message that names settings; see :class:`Voice`."""
    return current_voice().say(message, **values)


@contextmanager
def speaking(one: Voice) -> Iterator[None]:
    """Messages that are made in the block name settings in this voice."""
    _voices.append(one)
    try:
        yield
    finally:
        _voices.remove(one)


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
        said = numbered(_paragraphs(self.violations))
        super().__init__(f"CUDA graphs cannot be used as configured, {said}")


def numbered(reasons: Sequence[str]) -> str:
    """How many reasons there are, and each in a line."""
    lines = "\n".join(f"  {number}. {item}" for number, item in enumerate(reasons, 1))
    return f"{len(reasons)} reason{'s' * (len(reasons) != 1)}:\n{lines}"


_UNIT = re.compile(r"\bunit ([^\s:]+)")


def ranged(names: Iterable[str]) -> str:
    """Names in words: "layers.0 to layers.31" for those that count up."""
    runs: list[list[str]] = []
    for name in sorted(
        names, key=lambda one: [int(n) if n.isdigit() else n for n in re.split(r"(\d+)", one)]
    ):
        last = runs[-1][-1] if runs else ""
        if re.sub(r"\d+", lambda number: str(int(number[0]) + 1), last) == name != last:
            runs[-1].append(name)
        else:
            runs.append([name])
    return ", ".join(f"{run[0]} to {run[-1]}" if run[2:] else ", ".join(run) for run in runs)


def _paragraphs(violations: Iterable[Violation]) -> list[str]:
    """What is said of units, once for all units of which the same is said."""
    units: dict[str, list[str]] = {}
    for item in map(str, violations):
        name = named[1] if (named := _UNIT.search(item)) else ""
        own = rf"(?<=\bunit ){re.escape(name)}(?!\w)|(?<![\w.]){re.escape(name)}(?=\.\w)"
        units.setdefault(re.sub(own, "\0", item) if name else item, []).append(name)
    said = []
    for text, names in units.items():
        several = re.sub("\0(?=\\.\\w)", "*", text).replace("unit \0", "each of the units \0")
        said.append((several if len(names) > 1 else text).replace("\0", ranged(names)))
    return said


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


class HostSyncError(CaptureError):
    """Captured code makes the host wait for the device, at ``where``; no graph can contain that."""

    def __init__(self, where: str) -> None:
        super().__init__(
            f"{where} waits for the device and reads its memory on the host; a CUDA graph holds no "
            f"host code. {say(LEAVE_OUT)}, or keep the value in a tensor."
        )


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
