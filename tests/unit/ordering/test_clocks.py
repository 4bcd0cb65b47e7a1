"""Vector clocks on classical cases."""

from __future__ import annotations

from tests.unit.ordering.check import races
from tests.unit.ordering.clocks import HOST, Clocks
from tests.unit.ordering.trace import (
    Allocate,
    Await,
    AwaitStream,
    Entry,
    HostAwaits,
    HostReads,
    Keep,
    Launch,
    Record,
    Release,
    Site,
    Span,
)

MAIN, SIDE, THIRD = range(3)
ALL = Span(0, 0, 8)


def writes(stream: int, *spans: Span, name: str = "writes") -> Launch:
    return Launch(stream, name, (), spans or (ALL,))


def reads(stream: int, *spans: Span, name: str = "reads") -> Launch:
    return Launch(stream, name, spans or (ALL,), ())


def count(*entries: Entry, reads_order: bool = False) -> int:
    return len(races(entries, reads_order=reads_order))


def test_a_clock_knows_what_it_joined_and_no_more() -> None:
    clocks = Clocks()
    assert (clocks.tick(MAIN), clocks.tick(MAIN), clocks.tick(SIDE)) == (1, 2, 1)
    then = clocks.now(MAIN)
    clocks.tick(MAIN)
    clocks.join(SIDE, then)
    assert clocks.knows(SIDE, MAIN, 2) and not clocks.knows(SIDE, MAIN, 3)
    assert not clocks.knows(MAIN, SIDE, 1) and clocks.knows(MAIN, HOST, 0)
    assert not clocks.knew(SIDE, MAIN, 2)  # Its last operation came before.
    clocks.tick(SIDE)
    assert clocks.knew(SIDE, MAIN, 2) and clocks.count(SIDE) == 2


def test_joining_an_older_clock_forgets_nothing() -> None:
    clocks = Clocks()
    clocks.tick(MAIN)
    old = clocks.now(MAIN)
    clocks.tick(MAIN)
    clocks.join(SIDE, clocks.now(MAIN))
    clocks.join(SIDE, old)
    assert clocks.knows(SIDE, MAIN, 2)


def test_one_stream_is_in_order() -> None:
    assert count(writes(MAIN), reads(MAIN), writes(MAIN)) == 0


def test_two_streams_are_not_and_reads_need_not_be() -> None:
    assert count(writes(MAIN), reads(SIDE)) == 1
    assert count(reads(MAIN), writes(SIDE)) == 1
    assert count(writes(MAIN), writes(SIDE)) == 1
    assert count(reads(MAIN), reads(SIDE)) == 0


def test_a_race_names_both_and_the_bytes() -> None:
    first, second = writes(MAIN, Span(3, 0, 6)), reads(SIDE, Span(3, 4, 8))
    (race,) = races([first, second])
    assert (race.first, race.second, race.writes) == (first, second, False)
    assert race.span == Span(3, 4, 6)


def test_only_the_same_bytes_of_the_same_storage_count() -> None:
    assert count(writes(MAIN, Span(0, 0, 4)), writes(SIDE, Span(0, 4, 8))) == 0
    assert count(writes(MAIN, Span(0, 0, 4)), writes(SIDE, Span(1, 0, 4))) == 0
    assert count(writes(MAIN, Span(0, 0, 5)), writes(SIDE, Span(0, 4, 8))) == 1


def test_each_byte_keeps_its_own_last_uses() -> None:
    whole, left, right = ALL, Span(0, 0, 4), Span(0, 4, 8)
    before: list[Entry] = [writes(MAIN, whole), AwaitStream(SIDE, MAIN), writes(SIDE, left)]
    assert count(*before, reads(MAIN, right)) == 0
    assert count(*before, reads(MAIN, whole)) == 1
    assert count(*before, reads(MAIN, right), writes(SIDE, right)) == 1
    assert count(writes(MAIN, left), writes(MAIN, right), reads(SIDE, Span(0, 3, 5))) == 2


def test_a_write_comes_after_every_read() -> None:
    shared: list[Entry] = [writes(MAIN), AwaitStream(SIDE, MAIN), AwaitStream(THIRD, MAIN)]
    both: list[Entry] = [*shared, reads(SIDE), reads(THIRD)]
    assert count(*both, AwaitStream(MAIN, SIDE), writes(MAIN)) == 1
    assert count(*both, AwaitStream(MAIN, SIDE), AwaitStream(MAIN, THIRD), writes(MAIN)) == 0


def test_order_is_transitive() -> None:
    chain: list[Entry] = [writes(MAIN), AwaitStream(SIDE, MAIN), AwaitStream(THIRD, SIDE)]
    assert count(*chain, reads(THIRD)) == 0
    assert count(chain[0], chain[2], chain[1], reads(THIRD)) == 1


def test_an_event_stands_for_what_came_before_its_last_record() -> None:
    record, wait = Record(5, MAIN), Await(SIDE, 5)
    assert count(writes(MAIN), record, wait, reads(SIDE)) == 0
    assert count(record, writes(MAIN), wait, reads(SIDE)) == 1
    assert count(writes(MAIN), wait, record, reads(SIDE)) == 1
    assert count(writes(MAIN), wait, reads(SIDE)) == 1  # Never recorded: nothing to wait for.
    assert count(record, writes(MAIN), record, wait, reads(SIDE)) == 0


def test_what_the_host_has_waited_for_is_before_all_that_it_launches() -> None:
    waits: list[Entry] = [
        HostAwaits(),
        HostAwaits(stream=MAIN),
        HostAwaits(event=5),
        HostAwaits(event=0),
        HostAwaits(stream=SIDE),
    ]
    found = [
        count(writes(MAIN), Record(5, MAIN), Record(0, SIDE), wait, writes(SIDE)) for wait in waits
    ]
    assert found == [0, 0, 0, 1, 1]


def test_a_value_read_on_the_host_orders_only_if_that_is_asked_for() -> None:
    entries: list[Entry] = [writes(MAIN), HostReads(MAIN), writes(SIDE)]
    assert (count(*entries), count(*entries, reads_order=True)) == (1, 0)


def test_a_new_storage_is_used_after_what_its_stream_did() -> None:
    """Its memory may be that of any tensor that was freed there."""
    old, new = Span(0, 0, 8), Span(1, 0, 8)
    entries: list[Entry] = [Allocate(0, MAIN), writes(MAIN, old), Release(0), Allocate(1, MAIN)]
    assert count(*entries, writes(MAIN, new)) == 0
    assert count(*entries, writes(SIDE, new)) == 1
    assert count(*entries, AwaitStream(SIDE, MAIN), writes(SIDE, new)) == 0


def test_memory_that_another_stream_still_reads_is_given_out_again() -> None:
    old, new = Span(0, 0, 8), Span(1, 0, 8)
    used: list[Entry] = [
        Allocate(0, MAIN),
        writes(MAIN, old),
        AwaitStream(SIDE, MAIN),
        reads(SIDE, old),
    ]
    again: list[Entry] = [Allocate(1, MAIN), writes(MAIN, new)]
    assert count(*used, Release(0), *again) == 1
    assert count(*used, Keep(0, SIDE), Release(0), *again) == 0
    assert count(*used, Keep(0, THIRD), Release(0), *again) == 1
    assert count(*used, AwaitStream(MAIN, SIDE), Release(0), *again) == 0
    assert count(*used, Release(0), AwaitStream(MAIN, SIDE), *again) == 0
    # Memory in another stream's pool goes to that stream.
    assert count(*used, Release(0), Allocate(1, THIRD), writes(THIRD, new)) == 0


def test_memory_is_given_out_more_than_once_before_it_is_free() -> None:
    old = Span(0, 0, 8)
    used: list[Entry] = [
        Allocate(0, MAIN),
        writes(MAIN, old),
        AwaitStream(SIDE, MAIN),
        reads(SIDE, old),
    ]
    twice: list[Entry] = [
        entry for n in (1, 2) for entry in (Allocate(n, MAIN), writes(MAIN, Span(n, 0, 8)))
    ]
    assert count(*used, Release(0), *twice) == 2


def test_a_storage_that_grows_anew_is_as_a_new_one() -> None:
    used: list[Entry] = [
        Allocate(0, MAIN),
        writes(MAIN),
        AwaitStream(SIDE, MAIN),
        reads(SIDE),
        Release(0),
    ]
    assert count(*used, Allocate(0, MAIN), writes(MAIN)) == 1
    assert count(*used, Allocate(0, SIDE), writes(SIDE)) == 0


def test_what_stands_at_a_place_can_be_left_out() -> None:
    place, other = Site("a.py", 1), Site("a.py", 2)
    entries: list[Entry] = [writes(MAIN), AwaitStream(SIDE, MAIN, place), reads(SIDE)]
    assert len(races(entries, without=[place])) == 1
    assert not races(entries, without=[other])
    launched: list[Entry] = [Launch(MAIN, "writes", (), (ALL,), place), reads(SIDE)]
    assert len(races(launched, without=[place])) == 1  # Operations stay.
