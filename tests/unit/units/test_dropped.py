"""A model that is dropped is freed with its graphs, though nobody closed them."""

import gc
from typing import Any
from weakref import ref

import pytest

from megatron_cg.capture.session import close_all_sessions, open_sessions
from megatron_cg.tape.tape_backend import TapeBackend
from megatron_cg.units import graph_units, graphs
from tests.unit.units.plain import REPLAYED, WARMUP, Training


class Waits(TapeBackend):
    """Counts how often the host waits for graphs."""

    def __init__(self) -> None:
        super().__init__()
        self.waits = 0

    def synchronize(self) -> None:
        self.waits += 1


def trained(backend: Waits) -> Any:
    """A model with graphs that nobody else holds."""
    training = Training()
    graphs = graph_units(training.model, "*", warmup_steps=WARMUP, backend=backend)
    for _ in training.run(graphs):
        pass
    assert graphs.counters.replayed == REPLAYED
    return training.model


@pytest.fixture
def backend(monkeypatch: pytest.MonkeyPatch) -> Waits:
    # What closes graphs at the end of a process stays until then, and holds no model.
    monkeypatch.setattr(graphs, "graphs_close_in_time", lambda: lambda: None)
    gc.collect()
    assert not open_sessions()
    return Waits()


def test_it_is_freed_after_the_last_replay(backend: Waits) -> None:
    model = trained(backend)
    gc.collect()
    waits = backend.waits
    dropped = ref(model), ref(model[0].cuda_graphs[0].graph)
    assert open_sessions() == 1
    del model
    gc.collect()
    assert [one() for one in dropped] == [None, None] and not open_sessions()
    # The GPU might still have been in a replay.
    assert backend.waits == waits + 1


def test_its_graphs_are_found_while_it_lives(backend: Waits) -> None:
    model = trained(backend)
    gc.collect()
    layer = model[0]
    assert layer.cuda_graphs
    close_all_sessions()
    assert not open_sessions() and not getattr(layer, "cuda_graphs", [])
    assert not [name for name in vars(layer) if "megatron_cg" in name]
    waits = backend.waits
    del model, layer
    gc.collect()
    assert backend.waits == waits
