"""What counters of graphs are expected to be, and what calls of a method returned."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

from megatron_cg.replay.mismatch_policy import Counters


def expect(counters: Counters, **counts: int) -> None:
    found = counters.as_dict()
    assert found | counts == found


@contextmanager
def calls_of(owner: Any, name: str) -> Iterator[list[Any]]:
    """The results of each call of a method inside of the block."""
    returned, method = list[Any](), getattr(owner, name)

    def call(*args: Any, **kwargs: Any) -> Any:
        returned.append(method(*args, **kwargs))
        return returned[-1]

    with patch.object(owner, name, call):
        yield returned
