"""Fakes that let the real Megatron-FSDP run on a machine without a GPU.

Megatron-core 0.19.2 and megatron-fsdp 0.6.1 refer to ``cuda`` in many places: streams and events,
the device of every buffer, the device type of their meshes, the GPU's random generator. Inside
:func:`cpu_fakes` those names lead to the CPU. FSDP's own logic is not replaced: its hooks, buckets,
buffers, all-gathers and reduce-scatters run unchanged, over gloo.

A run under the fakes differs from a GPU, and therefore does *not* test the following:

* one stream: every copy, collective and kernel is done when its call returns, so a race between
  streams changes no number. ``tests/unit/ordering`` finds such races with clocks instead
  (docs/fast_path.md, "Ordering");
* one generator: torch's CPU generator replaces the GPU's;
* ``transformer_engine`` is an empty module that reports release 2.20.2. Megatron imports it
  before a replay only to check that CUDA graphs may be used; no kernel of TE is called.
"""

import functools
import importlib
import importlib.util
import sys
import types
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from typing import Any, Self

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.utils._device import _device_constructors

from megatron_cg.tape.launch import as_nccl, one_worker_a_group
from megatron_cg.tape.tape_backend import host_waits, is_recording, recorded_action
from megatron_cg.upstream.patch import set_attribute, undone_after

FACTORIES = (
    *("arange", "as_tensor", "asarray", "empty", "empty_like", "empty_strided", "eye", "full"),
    *("full_like", "linspace", "ones", "ones_like", "rand", "rand_like", "randint", "randn"),
    *("randn_like", "randperm", "scalar_tensor", "tensor", "zeros", "zeros_like"),
)
"""Functions of ``torch`` that take ``device=`` and make a tensor."""
METHODS = ("new_empty", "new_full", "new_ones", "new_tensor", "new_zeros", "to")
"""Methods of ``torch.Tensor`` that take ``device=`` or, for ``to``, a device by position."""
TE_VERSION = "2.20.2"
"""The release whose replay path Megatron should take (``is_te_min_version("1.10.0")`` is asked in
``TransformerLayer._get_te_cuda_graph_replay_args``)."""

_CPU = torch.device("cpu")
_Contexts = Iterator[AbstractContextManager[None]]


def _nothing(*_args: object) -> None:
    """What waits for a stream or an event, or marks one, has nothing to do."""


class FakeEvent:
    """In place of ``torch.cuda.Event``: it has happened. Takes and ignores torch's arguments."""

    stream_id = 0
    record: Callable[..., None] = _nothing
    wait: Callable[..., None] = _nothing

    def __init__(self, *_args: object, **_kwargs: object) -> None: ...

    def synchronize(self) -> None:
        """Return at once. Raises HostSyncError in a capture."""
        host_waits("synchronize of a stream or an event")

    def query(self) -> bool:
        return True


class FakeStream(FakeEvent):
    """In place of ``torch.cuda.Stream``; all its waits return at once."""

    cuda_stream = 0
    device = _CPU
    wait_stream: Callable[..., None] = _nothing
    wait_event: Callable[..., None] = _nothing
    __exit__: Callable[..., None] = _nothing

    def record_event(self, event: FakeEvent | None = None) -> FakeEvent:
        return FakeEvent() if event is None else event

    def __enter__(self) -> Self:
        return self


def converted(device: Any) -> Any:
    """Return the CPU for anything that names a cuda device, otherwise ``device`` itself.

    A bare int is a cuda index in Megatron (``device=torch.cuda.current_device()``).
    """
    if isinstance(device, bool) or not isinstance(device, (int, str, torch.device)):
        return device
    return _CPU if isinstance(device, int) or torch.device(device).type == "cuda" else device


def replaced(owner: object, name: str, value: object) -> AbstractContextManager[None]:
    """Set ``owner.name`` to ``value`` at once; exit restores the old value, or removes a new one.

    Only the owner's own dictionary is restored, so an inherited class attribute becomes visible
    again and is not copied into the subclass.
    """
    # Shared: Megatron sets some of these while they are replaced, such as TE's cached version.
    return undone_after(set_attribute(owner, name, value, shared=True))


@contextmanager
def module_entry(name: str, module: types.ModuleType) -> Iterator[None]:
    """Set ``module`` in ``sys.modules`` as ``name``; on exit restore the previous entry."""
    before = {name: sys.modules[name]} if name in sys.modules else {}
    sys.modules[name] = module
    try:
        yield
    finally:
        sys.modules.pop(name, None)
        sys.modules.update(before)


def _redirected(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def elsewhere(*args: Any, **kwargs: Any) -> Any:
        if "device" in kwargs:
            kwargs["device"] = converted(kwargs["device"])
        if kwargs.get("pin_memory"):
            # Pinned memory needs CUDA's allocator; here host and device memory are the same.
            kwargs["pin_memory"] = False
        return function(*args, **kwargs)

    return elsewhere


def _to(original: Callable[..., Any]) -> Callable[..., Any]:
    """``Tensor.to``, whose first argument may also be the device."""
    by_keyword = _redirected(original)

    @functools.wraps(original)
    def to(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if args and isinstance(args[0], (str, int, torch.device)):
            args = (converted(args[0]), *args[1:])
        return by_keyword(self, *args, **kwargs)

    return to


def _devices() -> _Contexts:
    """Make everything for cuda on the CPU instead.

    The factories themselves are wrapped: hooks that autograd calls run without TorchFunctionMode.
    ``torch.device`` as a context knows factories by identity, from a set that is made at its first
    use (torch 2.11, ``torch/utils/_device.py``). Made here, the set has torch's own factories,
    which the wrappers call: the context works inside of the block and after it.
    """
    _device_constructors()
    for name in FACTORIES:
        yield replaced(torch, name, _redirected(getattr(torch, name)))
    for name in METHODS:
        wrapper = _to if name == "to" else _redirected
        yield replaced(torch.Tensor, name, wrapper(getattr(torch.Tensor, name)))
    yield replaced(torch.Tensor, "cuda", lambda tensor, *_a, **_k: tensor.to(_CPU))
    yield replaced(torch.nn.Module, "cuda", lambda module, *_a, **_k: module)
    for name, value in _cuda_names().items():
        yield replaced(torch.cuda, name, value)


def _cuda_names() -> dict[str, object]:
    """Return a replacement without a GPU for each name of ``torch.cuda`` that Megatron uses."""
    stream = FakeStream()
    return {
        **_rng_functions("get_rng_state", "set_rng_state"),
        "Stream": FakeStream,
        "Event": FakeEvent,
        "stream": lambda *_a, **_k: nullcontext(),
        "device": lambda *_a, **_k: nullcontext(),
        "current_stream": lambda *_a, **_k: stream,
        "default_stream": lambda *_a, **_k: stream,
        "synchronize": lambda *_a, **_k: host_waits("torch.cuda.synchronize"),
        "empty_cache": lambda: None,
        "current_device": lambda: 0,
        "set_device": lambda *_a: None,
        "device_count": lambda: 1,
        "is_current_stream_capturing": is_recording,
        "memory_allocated": lambda *_a: 0,
        "max_memory_allocated": lambda *_a: 0,
        "memory_reserved": lambda *_a: 0,
        "get_device_capability": lambda *_a: (0, 0),
        "default_generators": (torch.default_generator,),
        "manual_seed": torch.manual_seed,
    }


def _rng_functions(get: str, put: str) -> dict[str, Callable[..., Any]]:
    generator = torch.default_generator
    return {
        get: lambda *_args, **_named: generator.get_state(),
        put: lambda state, *_args, **_named: generator.set_state(state),
    }


def _streams_of_buffers() -> _Contexts:
    """Buffers of Megatron-FSDP v2 are of a stream on a GPU alone (megatron-core 0.20)."""
    in_core = "megatron.core.distributed.fsdp.src.megatron_fsdp.experimental.dbuffer"

    def allocated(buffer: Any, stream: Any) -> None:
        vars(buffer)["stream"] = stream or torch.cuda.current_stream()

    stream = property(lambda buffer: vars(buffer)["stream"], allocated)
    for module in _loaded(in_core, "megatron_fsdp.experimental.dbuffer"):
        yield replaced(module.DBuffer, "allocation_stream", stream)


@contextmanager
def _forked(tracker: Any, name: str = "model-parallel-rng") -> Iterator[None]:
    """Draw from the tracker's state ``name`` in the block, as ``CudaRNGStatesTracker.fork``.

    Rewritten for two reasons. Megatron's version warns at each use that the CPU's generator
    changed, which is intended here. And a tape must repeat both state swaps in every replay, as a
    CUDA graph does with the generator states registered with it.
    """
    if name not in tracker.states_:
        raise KeyError(f"cuda rng state {name} is not added")
    generator = torch.default_generator
    outer: list[tuple[str, torch.Tensor]] = []

    def enter() -> None:
        current = tracker._current_state_name
        if current in tracker.states_:
            tracker.states_[current] = generator.get_state()
        outer.append((current, generator.get_state()))
        generator.set_state(tracker.states_[name])
        tracker._current_state_name = name

    def leave() -> None:
        tracker.states_[name] = generator.get_state()
        current, state = outer.pop()
        generator.set_state(tracker.states_.get(current, state))
        tracker._current_state_name = current

    recorded_action(enter)
    try:
        yield
    finally:
        recorded_action(leave)


def _generators() -> _Contexts:
    """Redirect the RNG trackers of Megatron and of Megatron-FSDP to the CPU's generator.

    Both have private ``_get_cuda_rng_state``/``_set_cuda_rng_state`` (megatron-core 0.19.2,
    tensor_parallel/random.py; megatron-fsdp 0.6.1, utils.py) that call into torch._C.
    """
    trackers = [*_loaded("megatron.core.tensor_parallel.random")]
    others = ("megatron.core.distributed.fsdp.src.megatron_fsdp.utils", "megatron_fsdp.utils")
    functions = _rng_functions("_get_cuda_rng_state", "_set_cuda_rng_state")
    for module in (*trackers, *_loaded(*others)):
        for name, function in functions.items():
            yield replaced(module, name, function)
    for module in trackers:
        yield replaced(module.CudaRNGStatesTracker, "fork", _forked)


def _loaded(*names: str) -> Iterator[Any]:
    for name in names:
        with suppress(ModuleNotFoundError):
            yield importlib.import_module(name)


def _meshes() -> _Contexts:
    """Convert the device type of every device mesh, however the mesh is created."""
    made, made_from = DeviceMesh.__init__, DeviceMesh.from_group

    @functools.wraps(made)
    def init(self: DeviceMesh, device_type: str, *args: Any, **kwargs: Any) -> None:
        made(self, str(converted(device_type)), *args, **kwargs)

    def from_group(group: Any, device_type: str, *args: Any, **kwargs: Any) -> DeviceMesh:
        return made_from(group, str(converted(device_type)), *args, **kwargs)

    yield replaced(DeviceMesh, "__init__", init)
    yield replaced(DeviceMesh, "from_group", staticmethod(from_group))


def _transformer_engine() -> _Contexts:
    """Make ``import transformer_engine.pytorch`` and the query for its version succeed.

    An installed TE stays unchanged, except for the one kernel that Megatron's router calls directly
    (megatron-core 0.19.2, moe_utils.py: without it torch multiplies).
    """
    for module in _loaded("megatron.core.transformer.moe.moe_utils"):
        yield replaced(module, "te_general_gemm", None)
    if importlib.util.find_spec("transformer_engine") is not None:
        return
    for module in _loaded("megatron.core.transformer.multi_token_prediction"):
        # megatron-core 0.20 asks for classes of its own, which are none without TE.
        yield replaced(module, "is_inference_column_parallel_linear", lambda _module: False)
    for module in _loaded("megatron.core.utils"):
        # megatron-core 0.19.2 caches the first answer for the whole process.
        yield replaced(module, "_te_version", None)
    package = types.ModuleType("transformer_engine")
    package.__version__ = TE_VERSION  # type: ignore[attr-defined]
    package.__path__ = []
    pytorch = types.ModuleType("transformer_engine.pytorch")
    package.pytorch = pytorch  # type: ignore[attr-defined]
    yield module_entry("transformer_engine", package)
    yield module_entry("transformer_engine.pytorch", pytorch)


@contextmanager
def cpu_fakes() -> Iterator[None]:
    """Let the real Megatron-FSDP, of either package, run on the CPU inside the block.

    Enter it before the model is built and leave it after the model's last use.
    """
    with ExitStack() as stack:
        stack.callback(one_worker_a_group())
        stack.callback(as_nccl())
        for contexts in (_devices, _meshes, _generators, _streams_of_buffers, _transformer_engine):
            for context in contexts():
                stack.enter_context(context)
        yield
