"""A backend without a GPU: it records ATen operations on a tape instead of a CUDA graph.

Warmup, the order of passes, hooks and the life of results are the driver's
(``backends/driver/capture.py``), which follows TE's contract.

The tape reproduces these properties of a graph: no Python of the module runs at a replay, arguments
are addresses and not Python tensors, gradients of weights are tensors without an owner, memory is
poisoned as soon as other graphs of the pool might use it, and a read on the host is refused. It
does not reproduce kernels, streams, speed, or which tensors are on the host.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import nn

from megatron_cg.backends.base import Backend
from megatron_cg.backends.driver.capture import Recorder, capture_modules, parts
from megatron_cg.backends.driver.graphed import GraphedModule, Recorded, Tensors
from megatron_cg.backends.tape.tape_memory import Pool
from megatron_cg.backends.tape.tape_recording import Tape, recording, storage_keys
from megatron_cg.memory.storage import without_owners


class TapeBackend(Backend):
    name = "tape"
    device_type = "cpu"

    def capture(
        self,
        callables: tuple[nn.Module, ...],
        sample_args: Sequence[tuple[Any, ...]],
        **options: Any,
    ) -> tuple[GraphedModule, ...]:
        return capture_modules(self.name, TapeRecorder, callables, sample_args, **options)

    def synchronize(self) -> None:
        """Nothing to wait for: a replay has finished when its call returns."""


class TapeRecorder(Recorder):
    """Records passes on tapes, and determines when the pool may reuse each storage."""

    def __init__(self) -> None:
        self._pool = Pool()
        self._tapes: list[Tape] = []
        self._released: dict[int, int] = {}
        """By the id of a result: how many tapes there were when it was released."""

    @contextmanager
    def recording(self, module: nn.Module, label: str) -> Iterator[Tape]:
        with recording(self._pool, module, label) as tape:
            yield tape
        self._tapes.append(tape)

    def release(self, results: Tensors) -> Tensors:
        """The same tensors: the pool keeps all memory, and poisons what was released."""
        self._released.update((id(result), len(self._tapes)) for result in results)
        return results

    def settle(self, samples: Sequence[Recorded]) -> None:
        """Determine when the pool may reuse each storage, and poison everything once.

        A storage of a sample that no caller reads after the sample's backward pass is dead then.
        A storage that was released later is dead before the next tape.
        """
        at = {id(tape): number for number, tape in enumerate(self._tapes)}
        for item in samples:
            forward, backward = item.forward, item.backward
            assert isinstance(forward, Tape) and isinstance(backward, Tape)
            outputs = storage_keys(item.outputs)
            saved = forward.made & backward.used
            forward.dead_after = frozenset(forward.made - saved - outputs)
            end = at[id(backward)] + 1
            dies = self._ends_of((*item.outputs, *item.grad_inputs))
            own = backward.made | saved | outputs
            backward.dead_after = frozenset(key for key in own if dies.get(key, end) <= end)
            for key, number in dies.items():
                if end < number < len(self._tapes):
                    later = self._tapes[number]
                    later.dead_before |= {key} - later.used
        for item in samples:
            assert isinstance(item.backward, Tape)
            of_inputs, of_weights = parts(item)
            item.backward.of_weights = storage_keys(of_weights)
            # In a CUDA graph's memory each is without an owner.
            item.grad_inputs = (*of_inputs, *without_owners(of_weights, self._pool.owns))
            for tape in (item.forward, item.backward):
                assert isinstance(tape, Tape)
                self._pool.poison(tape.made)

    def _ends_of(self, results: Tensors) -> dict[int, int]:
        """The release of each storage of ``results``: when the last of its tensors is released."""
        never = len(self._tapes) + 1
        ends: dict[int, int] = {}
        for result in results:
            for key in storage_keys((result,)):
                ends[key] = max(ends.get(key, 0), self._released.get(id(result), never))
        return ends
