"""A device that orders nothing by itself: all doubles put in together."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from tests.unit.ordering.doubles.collectives import Collectives, modelled_collectives
from tests.unit.ordering.doubles.notes import Notes
from tests.unit.ordering.doubles.operations import Operations, modelled_operations
from tests.unit.ordering.doubles.streams import Streams, modelled_streams


@contextmanager
def modelled_device() -> Iterator[Notes]:
    """Record what runs in the block, inside ``cpu_fakes``, while the trace is on.

    Everything runs at once and in the order of the host, so no number changes.
    """
    notes = Notes()
    streams = Streams(notes)
    collectives = Collectives(streams)
    operations = Operations(notes, streams, collectives)
    with (
        modelled_streams(streams),
        modelled_collectives(collectives),
        modelled_operations(operations),
    ):
        yield notes
