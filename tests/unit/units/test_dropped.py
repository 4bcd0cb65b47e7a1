"""A model that is dropped is freed with its graphs, though nobody closed them."""

import gc
from weakref import ref

import pytest

from megatron_cg.capture.session import open_sessions
from megatron_cg.tape.tape_backend import TapeBackend
from megatron_cg.units import graphs
from tests.unit.units.plain import REPLAYED, Training


class Waits(TapeBackend):
    def __init__(self) -> None:
        super().__init__()
        self.waits = 0

    def synchronize(self) -> None:
        self.waits += 1


def test_it_is_freed_after_the_last_replay(monkeypatch: pytest.MonkeyPatch) -> None:
    # What closes graphs at the end of a process stays until then, and holds no model.
    monkeypatch.setattr(graphs, "graphs_close_in_time", lambda: lambda: None)
    gc.collect()
    assert not open_sessions()
    backend, training = Waits(), Training()
    made = training.graphs(backend=backend)
    assert list(training.run(made)) and made.counters.replayed == REPLAYED
    waits, model = backend.waits, training.model
    dropped = ref(model), ref(model[0].cuda_graphs[0].graph)
    del training, made
    gc.collect()
    assert open_sessions() == 1
    del model
    gc.collect()
    assert [one() for one in dropped] == [None, None] and not open_sessions()
    # The GPU might still have been in a replay.
    assert backend.waits == waits + 1
