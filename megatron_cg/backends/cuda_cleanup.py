"""What torch leaves behind when CUDA refuses a capture, and how it is put right.

Note [A generator can stay in a capture]
    If CUDA refuses a capture (for example because of a host read), ``capture_end`` raises before it
    notifies the generators. Every later draw then fails with "Offset increment outside graph
    capture" (torch 2.11, ``CUDAGeneratorImpl``). A clone of a generator's state is not in a
    capture, so a generator that cannot draw gets a clone of its own state. A generator that can
    draw is left unchanged, since graphs of another model may be registered with it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress

import torch

from megatron_cg.upstream.symbols import Symbol

RELIES_ON = tuple(
    Symbol(f"torch._C:{name}", "the allocator's end of a capture that CUDA refused")
    for name in ("_cuda_endAllocateToPool", "_cuda_releasePool")
)


def device_generator() -> list[torch.Generator]:
    """The current device's own generator; none without a GPU."""
    if not torch.cuda.is_available():
        return []
    return [torch.cuda.default_generators[torch.cuda.current_device()]]


@contextmanager
def generators_kept(on_device: Sequence[torch.Generator]) -> Iterator[None]:
    """Restore the states of the host's generator and of those ``on_device``.

    See Note [A generator can stay in a capture].
    """
    generators = [torch.default_generator, *on_device]
    saved = [generator.get_state() for generator in generators]
    try:
        yield
    except BaseException:
        for generator in on_device:
            _end_capture_of(generator)
        raise
    finally:
        for generator, state in zip(generators, saved, strict=True):
            generator.set_state(state)


def _end_capture_of(generator: torch.Generator) -> None:
    """See Note [A generator can stay in a capture]. The caller restores the state."""
    try:
        torch.empty(1, device=generator.device).uniform_(generator=generator)
    except RuntimeError:
        generator.graphsafe_set_state(generator.clone_state())


def leave_pool(pool: tuple[int, int]) -> None:
    """Make the allocator leave a capture that CUDA refused to end; torch 2.11.

    ``CUDAGraph.capture_end`` raises before it notifies the allocator. The allocator then assumes
    that a capture is running: it defers frees and keeps the pool's memory.
    """
    device = torch.cuda.current_device()
    # The first call raises if every capture has ended: then nothing is held.
    with suppress(RuntimeError):
        torch._C._cuda_endAllocateToPool(device, pool)
        torch._C._cuda_releasePool(device, pool)


@contextmanager
def waited_for() -> Iterator[None]:
    """Wait for the device after the block: what follows may undo what its kernels still change.

    If the block raises, an error of the wait does not hide its own.
    """
    try:
        yield
    except BaseException:
        with suppress(RuntimeError):
            torch.cuda.synchronize()
        raise
    torch.cuda.synchronize()


@contextmanager
def stream_kept() -> Iterator[None]:
    """Restore the stream: ``torch.cuda.graph`` stays on its own if ending a capture raises.

    torch 2.11, ``torch/cuda/graphs.py``: ``graph.__exit__`` leaves the stream after
    ``capture_end`` and has no ``finally``.
    """
    if not torch.cuda.is_available():
        yield
        return
    stream = torch.cuda.current_stream()
    try:
        yield
    finally:
        torch.cuda.set_stream(stream)
