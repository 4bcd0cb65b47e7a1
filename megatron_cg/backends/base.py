"""What a capture backend does, and how it restores what a capture leaves changed.

Note [A generator can stay in a capture]
    If CUDA refuses a capture, ``capture_end`` raises before it notifies the generators. Every later
    draw then fails with "Offset increment outside graph capture" (torch 2.11, not 2.12 to 2.15). A
    clone of a generator's state is not in a capture, so one that cannot draw gets that. One that
    can is left unchanged, since graphs of another model may be registered with it.
"""

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from megatron_cg.errors import CaptureError
from megatron_cg.fsdp.roles import CaptureTimeHooks
from megatron_cg.replay.guard import Entry
from megatron_cg.replay.guarded_graph import ReplayFunction
from megatron_cg.restore import Restores, device_generator
from megatron_cg.upstream.symbols import Symbol
from megatron_cg.upstream.te import fp8_recipe, rng_states

_RANDOM = "megatron.core.tensor_parallel.random"
_TRACKER = Symbol(f"{_RANDOM}:_CUDA_RNG_STATE_TRACKER", "the RNG tracker; None before it is made")
_STATES = Symbol(
    f"{_RANDOM}:CudaRNGStatesTracker",
    "the RNG tracker, which draws from one of its states",
    attributes=("states_",),
)
_ENDS = tuple(
    Symbol(f"torch._C:{name}", "the allocator's end of a capture that CUDA refused")
    for name in ("_cuda_endAllocateToPool", "_cuda_releasePool")
)
RELIES_ON = (_TRACKER, _STATES, *_ENDS)


def megatron_tracker() -> Any:
    """Megatron's RNG tracker, or None: Megatron is not in use, or nobody has seeded it.

    ``get_cuda_rng_tracker`` would make one, which a later seeding does not replace.
    """
    return _TRACKER.find() if _RANDOM in sys.modules else None


def tracked_states() -> dict[str, Any]:
    """The random states of Megatron's tracker by name, as they are now."""
    return getattr(megatron_tracker(), "states_", {})


def same_generators() -> Callable[[], None]:
    """Returns what lets Megatron's tracker have the generators of now, with the states of then.

    Graphs draw from these. Who sets a seed or loads random states gives the tracker others. It is
    called between passes: in one, a checkpoint sets the states of an earlier one for some time.
    A fork of the graph-safe tracker gives it another object with the same state, which torch does
    not tell from one with a state of its own. So states are set after each pass with a fork.
    """
    own = {n: one for n, one in tracked_states().items() if isinstance(one, torch.Generator)}

    def keep() -> None:
        states = tracked_states()
        for name, generator in own.items():
            now = states.get(name)
            if now is not generator and isinstance(now, torch.Generator):
                generator.set_state(now.get_state())
                states[name] = generator

    return keep if own else lambda: None


def generators_of(callables: Iterable[nn.Module], device_type: str) -> list[torch.Generator]:
    """The generators that captured code may draw from, besides the device's own.

    Those of Megatron's and of TE's RNG trackers, and attributes of the modules. A tracker that is
    not graph-safe holds states as tensors, and torch refuses to set one in a capture.
    """
    states = [*rng_states().values(), *tracked_states().values()]
    states += [value for root in callables for m in root.modules() for value in vars(m).values()]
    generators = {id(value): value for value in states if isinstance(value, torch.Generator)}
    return [generator for generator in generators.values() if generator.device.type == device_type]


@contextmanager
def random_states_kept(callables: Iterable[nn.Module], device_type: str) -> Iterator[None]:
    """Restore the host's generator, all that captured code may draw from, and Megatron's tracker.

    A fork replaces states of the tracker. See Note [A generator can stay in a capture].
    """
    own = device_generator() if device_type == "cuda" else []
    drawn = [*own, *generators_of(callables, device_type)]
    with Restores() as stack:
        states = tracked_states()
        stack.callback(states.update, dict(states))
        stack.callback(states.clear)
        for generator in (torch.default_generator, *drawn):
            stack.restore("a random generator", generator.set_state, generator.get_state())
        try:
            yield
        except BaseException:
            for generator in drawn:
                try:  # A draw ends a capture that it is still in; the stack restores its state.
                    torch.empty(1, device=generator.device).uniform_(generator=generator)
                except RuntimeError:
                    generator.graphsafe_set_state(generator.clone_state())
            raise


def leave_pool(pool: tuple[int, int]) -> None:
    """Make the allocator leave a capture that CUDA refused to end; torch 2.11 and 2.12.

    ``CUDAGraph.capture_end`` raises before it notifies the allocator, which then defers frees and
    keeps the pool's memory. Later torch does this itself, but 2.13 keeps the memory all the same.
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


def uninitialized(nbytes: int, device: torch.device) -> torch.Tensor:
    """uint8 ``[nbytes]`` that no kernel has filled.

    With deterministic algorithms ``torch.empty`` fills what it returns
    (``torch.utils.deterministic.fill_uninitialized_memory``).
    """
    storage = torch.UntypedStorage(nbytes, device=device)
    return torch.empty(0, dtype=torch.uint8, device=device).set_(storage)


def stream_kept() -> AbstractContextManager[Any]:
    """Restore the stream: ``torch.cuda.graph`` stays on its own if ending a capture raises.

    In torch 2.11 to 2.13, ``graph.__exit__`` leaves it after ``capture_end``, without ``finally``.
    """
    if not torch.cuda.is_available():
        return nullcontext()
    return torch.cuda.stream(torch.cuda.current_stream())


@dataclass
class CaptureRequest:
    """What to capture: modules in the order of their forward passes, each with one sample.

    A backend may replace samples in the lists, by memory that graphs share.

    Raises CaptureError if modules and samples do not match.
    """

    callables: tuple[nn.Module, ...]
    args: list[tuple[Any, ...]]
    kwargs: list[dict[str, Any]] = field(default_factory=list)
    """For each module; an empty list stands for none."""
    hooks: list[CaptureTimeHooks] = field(default_factory=list)
    """They run outside of the graphs; empty until the session knows them."""
    warmups: int = 3
    """How often all passes run before they are captured."""
    share_buffers: bool = False
    """Whether results may lie in memory that passes captured later use too."""
    retain_graph: bool = False
    """Whether backward passes keep what they share with others."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Others of TE's ``make_graphed_callables``, such as those of FP8."""
    names: Sequence[str] = ()
    """Of the modules, for messages."""

    def __post_init__(self) -> None:
        self.kwargs = [dict(named) for named in self.kwargs] or [{} for _ in self.args]
        self.hooks = self.hooks or [{} for _ in self.callables]
        if not len(self.callables) == len(self.args) == len(self.kwargs):
            raise CaptureError(
                f"{len(self.args)} samples for {len(self.callables)} callables: each callable has "
                "one sample and one graph. Leave pipeline parallelism out"
            )

    def label(self, index: int) -> str:
        name = self.names[index] if self.names else f"callable {index}"
        return f"{name} ({type(self.callables[index]).__name__})"


class Backend:
    """Captures layers into graphs. The members here are those of a backend without FP8."""

    name: str
    device_type = "cuda"
    pool: tuple[int, int] | None = None
    """The CUDA memory pool of the graphs, once they are captured."""

    numerics = staticmethod(fp8_recipe)
    """What the backend's kernels follow besides torch's modes."""

    def capture(self, request: CaptureRequest) -> tuple[Callable[..., Any], ...]:
        """Warm the callables up and capture them. A graph's ``reset()`` releases it."""
        raise NotImplementedError

    def replay_function(self, graph: Any) -> ReplayFunction:
        """How autograd sees the replays of one graph that :meth:`capture` returned.

        Raises UpstreamChangedError if the graph is not built as expected.
        """
        return graph.replay_function()  # type: ignore[no-any-return]

    def synchronize(self) -> None:
        """Wait until no graph is replaying: a replaying graph must not be destroyed."""
        torch.cuda.synchronize()

    def captured_numerics(self, index: int, options: Mapping[str, Any]) -> Any:
        """What :meth:`numerics` must return when the callable replays; see CaptureRequest."""

    def entries(self, modules: Sequence[nn.Module]) -> Iterable[Entry]:
        """Objects in ``modules``, besides their tensors, whose memory graphs read or write."""
        return ()

    def without_updates(self) -> AbstractContextManager[None]:
        """Skip updates for the whole model, such as FP8 scales, in passes inside the block."""
        return nullcontext()

    @contextmanager
    def preserved(self, callables: Sequence[nn.Module]) -> Iterator[None]:
        """Restore everything that capture leaves changed, also after an exception."""
        # The stream is left first: the others then exit on the original stream.
        with random_states_kept(callables, self.device_type), stream_kept():
            yield
