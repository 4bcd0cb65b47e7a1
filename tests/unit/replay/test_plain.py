"""Contents that are compared by identity first, and by value only where an object is another."""

import copy
import random
from typing import Any

from megatron_cg.replay.plain import Contents, contents

OBJECT = object()
LEAVES = (0, 0.0, -0.0, 1, True, None, "a", float("nan"), 1.5, OBJECT)


def drawn(chance: random.Random, depth: int) -> Any:
    kind = chance.choice(("leaf", "leaf", "list", "tuple", "set", "dict")) if depth else "leaf"
    several = range(chance.randint(0, 3))
    if kind == "leaf":
        return chance.choice(LEAVES)
    if kind == "set":
        return {chance.choice((0, 1, 2, OBJECT)) for _ in several}
    if kind == "dict":
        return {chance.choice("abc"): drawn(chance, depth - 1) for _ in several}
    made = [drawn(chance, depth - 1) for _ in several]
    return made if kind == "list" else tuple(made)


def change(value: Any, chance: random.Random) -> Any:
    """Change the value in place, or one inside, or copy it, or put the same in again."""
    inner = [*value.values()] if isinstance(value, dict) else value
    if isinstance(value, dict | list | tuple) and inner and chance.random() < 0.5:
        change(chance.choice(inner), chance)
    elif isinstance(value, list):
        value[:] = chance.choice((value[:-1], [*value, chance.choice(LEAVES)], value[::-1]))
    elif isinstance(value, dict):
        value[chance.choice("abc")] = chance.choice(LEAVES)
    elif isinstance(value, set):
        value.add(chance.choice((0, 1, 2, 3, True)))
    return copy.copy(value) if chance.random() < 0.2 else value


def test_contents_are_found_the_same_as_by_value() -> None:
    found = []
    for seed in range(3000):
        chance = random.Random(seed)
        value = drawn(chance, 4)
        known, before = Contents(value), contents(value)
        for _ in range(3):
            value = change(value, chance)
            found.append(known.are_in(value))
            assert found[-1] == (contents(value) == before), (seed, value)
    assert 1000 < sum(found) < len(found) - 1000


def test_only_a_container_in_which_nothing_can_be_replaced_need_not_be_looked_at() -> None:
    fixed = (1, ("a", frozenset({2})))
    assert not Contents(fixed).can_change
    assert Contents((1, ("a", [2]))).can_change
