"""Records passes on tapes, and determines when the pool may reuse each storage."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext

from torch import nn

from megatron_cg.backends.driver.recorder import Recorded, Tensors
from megatron_cg.backends.tape.tape_memory import Pool
from megatron_cg.backends.tape.tape_recording import Tape, recording, storage_keys


class TapeRecorder:
    """See :class:`megatron_cg.backends.driver.recorder.Recorder`."""

    def __init__(self) -> None:
        self._pool = Pool()
        self._tapes: list[Tape] = []
        self._released: dict[int, int] = {}
        """By the id of a result: how many tapes there were when it was released."""

    def warming_up(self) -> AbstractContextManager[None]:
        """Nothing to prepare."""
        return nullcontext()

    @contextmanager
    def recording(self, module: nn.Module, label: str) -> Iterator[Tape]:
        """See :class:`megatron_cg.backends.driver.recorder.Recorder`."""
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
            for tape in (item.forward, item.backward):
                assert isinstance(tape, Tape)
                self._pool.poison(tape.made)

    def abandon(self) -> None:
        """Nothing to release: tapes use ordinary memory."""

    def _ends_of(self, results: Tensors) -> dict[int, int]:
        """The release of each storage of ``results``: when the last of its tensors is released."""
        never = len(self._tapes) + 1
        ends: dict[int, int] = {}
        for result in results:
            for key in storage_keys((result,)):
                ends[key] = max(ends.get(key, 0), self._released.get(id(result), never))
        return ends
