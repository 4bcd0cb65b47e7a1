"""Checks arguments of the Python API: reports every mistake at once, with what to type instead."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Literal, get_args

import torch.distributed as dist

from megatron_cg.backends.base import Backend
from megatron_cg.errors import ArgumentError, Violation

OnFailure = Literal["error", "eager"]
OnMismatch = Literal["eager", "error"]
GroupedGemm = Literal["te", "torch"]
Exchange = Literal["nccl", "peer"]
BackendName = Literal["transformer_engine", "te", "native", "tape"]


def check_policy(
    on_failure: object,
    on_mismatch: object,
    verify_interval: object,
    backend: object,
    fast_path: object,
) -> Iterator[Violation]:
    """Mistakes in the arguments that both APIs have."""
    yield from one_of("on_failure", on_failure, get_args(OnFailure))
    yield from one_of("on_mismatch", on_mismatch, get_args(OnMismatch))
    yield from at_least("verify_interval", verify_interval, 0)
    if isinstance(backend, str):
        yield from one_of("backend", backend, get_args(BackendName))
    elif backend is not None and not callable(getattr(backend, "capture", None)):
        reason = "it is a name, or an object with the method capture (megatron_cg.backends.base)"
        remedy = 'backend="transformer_engine", or leave it out'
        yield Violation("argument", f"backend={backend!r}", reason, remedy)
    if not isinstance(fast_path, bool):
        reason = "it is True or False"
        yield Violation("argument", f"fast_path={fast_path!r}", reason, "fast_path=True")


def refuse(broken: Sequence[Violation]) -> None:
    """Raise ArgumentError with every mistake, if there is any."""
    if broken:
        raise ArgumentError(broken)


def one_of(name: str, value: object, known: Sequence[str]) -> Iterator[Violation]:
    """Check an argument that is one of some words."""
    if value not in known:
        words = ", ".join(map(repr, known))
        yield Violation(
            "argument", f"{name}={value!r}", f"it is one of {words}", f"{name}={known[0]!r}"
        )


def at_least(name: str, value: object, least: int) -> Iterator[Violation]:
    """Check an argument that is an integer and at least ``least``."""
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        reason = f"it is a whole number from {least} on"
        yield Violation("argument", f"{name}={value!r}", reason, f"{name}={least}")


def member_of(group: object) -> Iterator[Violation]:
    """Check an argument that is a process group of this rank, or None."""
    known = isinstance(group, dist.ProcessGroup) and dist.get_rank(group) >= 0
    if group is not None and not known:
        reason = "it is a process group of torch.distributed with this rank in it; None: all ranks"
        remedy = "group=mesh.get_group(), on the ranks of that group only"
        yield Violation("argument", f"group={group!r}", reason, remedy)


def several(value: Any) -> tuple[Any, ...]:
    """The value as a tuple; a single value or a string becomes a tuple of one."""
    if isinstance(value, str) or not isinstance(value, Iterable):
        return (value,)
    return tuple(value)


def backend_of(value: Backend | BackendName | None) -> Backend:
    """The backend by that name; Transformer Engine's if None.

    Raises:
        UpstreamChangedError: Transformer Engine is needed, and not there or without a symbol.
        CaptureError: the native backend, and there is no GPU.
    """
    if value == "tape":
        from megatron_cg.backends.tape.tape_backend import TapeBackend

        return TapeBackend()
    if value == "native":
        from megatron_cg.backends.native.native_backend import NativeBackend

        return NativeBackend()
    if value is None or isinstance(value, str):
        from megatron_cg.backends.te.te_backend import TransformerEngineBackend

        return TransformerEngineBackend()
    return value
