"""What nothing looked at in the tape's memory, found by ``python -m tools.mutate``."""

from __future__ import annotations

import pytest
import torch

from megatron_cg.backends.tape.tape_memory import POISON, FreedStorageError, Pool


def poisoned(tensor: torch.Tensor) -> bool:
    return bool((tensor.view(torch.uint8) == POISON).all())


def test_what_is_borrowed_is_overwritten_by_the_next_tape_that_runs_and_by_that_one_alone() -> None:
    pool, borrowed, kept = Pool(), torch.ones(3), torch.ones(3)
    keys = [pool.adopt(borrowed)]
    pool.adopt(kept)
    pool.poison_before_next_replay(keys)
    assert borrowed.tolist() == [1.0] * 3
    pool.poison_borrowed()
    assert poisoned(borrowed) and kept.tolist() == [1.0] * 3
    borrowed.fill_(2.0)
    pool.poison_borrowed()
    assert borrowed.tolist() == [2.0] * 3


def test_a_pool_owns_what_it_adopted_and_not_what_it_uses() -> None:
    pool, own, outside, whole = Pool(), torch.ones(2), torch.ones(2), torch.ones(4)
    key = pool.adopt(own)
    slot = pool.slot(outside, "aten.add")
    assert pool.owns(key) is True and pool.owns(slot.key) is False
    pool.poison([slot.key])
    assert outside.tolist() == [1.0] * 2
    part = pool.slot(whole[1:3], "aten.add")
    assert pool.tensor(part).shape == (2,)
    pool.tensor(part).fill_(5.0)
    assert whole.tolist() == [1.0, 5.0, 5.0, 1.0]


def test_the_first_use_of_memory_that_is_gone_is_named() -> None:
    pool, outside = Pool(), torch.ones(2)
    slot = pool.slot(outside, "the first use")
    assert pool.slot(outside, "another use") == slot
    del outside
    with pytest.raises(FreedStorageError, match="8 bytes that the first use used"):
        pool.tensor(slot)


def test_memory_that_was_let_go_of_without_its_owner_is_gone_and_an_empty_one_is_not() -> None:
    pool, outside, empty = Pool(), torch.ones(2, dtype=torch.uint8), torch.ones(0)
    one = torch.ones(1, dtype=torch.uint8)
    slots = [pool.slot(tensor, "aten.add") for tensor in (outside, empty, one)]
    assert pool.tensor(slots[1]).numel() == 0
    for tensor, slot in ((outside, slots[0]), (one, slots[2])):
        tensor.untyped_storage().resize_(0)
        with pytest.raises(FreedStorageError, match="was freed since"):
            pool.tensor(slot)
