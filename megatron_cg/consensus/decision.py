"""The pure part of an agreement: the votes of the ranks, and the decision that follows from them.

Note [One row from each rank]
    A vote is one all-gather of a short int64 row from every rank, so the decision can name the
    ranks that failed, hold other graphs, or are at another vote. All votes have the same shape.
    So ranks at different votes meet in one collective, and the head of the row shows the
    difference. Different collectives would wait for each other until the timeout.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import IntEnum
from hashlib import blake2b

import torch

from megatron_cg.errors import MegatronCGError


class AgreementError(MegatronCGError):
    """Ranks are out of step: one is gone or late, or they are at different votes.

    Or they were started with other settings; then nothing has been changed.
    """


class Kind(IntEnum):
    """What a vote is about. All ranks must hold votes of the same kinds in the same order."""

    CAPTURE_START = 1
    CAPTURE_END = 2
    DELETION = 3
    MISMATCH = 4
    """What to do at a graph with collectives, and whether its replay differs from an eager pass."""
    GUARD = 5
    """Whether a compiled region's guards pass (``compiled/together.py``)."""
    COMPILE = 6
    """Which function is being compiled."""
    SETTINGS = 7
    """Whether ranks that meet have the same settings, versions and variables."""


@dataclass(frozen=True)
class Vote:
    against: bool = False
    """Whether something failed on this rank, so that no rank may go on with it."""
    size: int = 0
    """The static size that this rank would choose, such as the tokens of a microbatch."""
    graphs: int = 0
    """The :func:`digest` of the set of graphs that this rank holds, and of their fast path."""
    ends: bool = False
    """Whether this rank could not restore what it had changed, so that no rank may train on."""


@dataclass(frozen=True)
class Decision:
    """What all ranks do; the same on all of them."""

    against: tuple[int, ...] = ()
    """The ranks that voted against it."""
    smallest: int = 0
    largest: int = 0
    minority: tuple[int, ...] = ()
    """The ranks that do not hold the set of graphs that most ranks hold."""
    ends: tuple[int, ...] = ()
    """The ranks that could not restore what they had changed."""

    @property
    def sizes_agree(self) -> bool:
        return self.smallest == self.largest


def digest(names: Iterable[str]) -> int:
    """A number for a set of names: the same in every process, whatever the order and repeats.

    63 bits, so that it fits a signed 64-bit integer.
    """
    state = blake2b(digest_size=8)
    for name in sorted(set(names)):
        data = name.encode()
        state.update(len(data).to_bytes(8) + data)
    return int.from_bytes(state.digest()) >> 1


def encode(kind: Kind, serial: int, vote: Vote) -> torch.Tensor:
    """The row of a rank, (5,) int64: two values say which vote it is, three are the vote."""
    against = 2 if vote.ends else int(vote.against)
    row = (kind, serial, against, vote.size, vote.graphs)
    return torch.tensor(row, dtype=torch.int64, device="cpu")


def decide(rows: torch.Tensor, ranks: Sequence[int]) -> Decision:
    """The decision that follows from the rows of these ranks, (world, 5) int64 in their order.

    Raises AgreementError, with ranks and votes, if the rows belong to different votes.
    """
    heads, (against, sizes, graphs) = rows[:, :2], rows[:, 2:].unbind(1)
    if not torch.equal(heads, heads[:1].expand_as(heads)):
        named = (f"{name_of(Kind(kind))} {serial}" for kind, serial in heads.tolist())
        raise AgreementError(
            f"ranks came to different votes: {differing(named, ranks)}. They no longer do the "
            "same, so this run ends on all of them."
        )
    held = graphs.tolist()
    most = Counter(held).most_common(1)[0][0]
    minority = tuple(rank for rank, own in zip(ranks, held, strict=True) if own != most)
    voted_against, ends = (
        tuple(ranks[row] for row in votes.nonzero().flatten().tolist())
        for votes in (against, against == 2)
    )
    return Decision(voted_against, int(sizes.min()), int(sizes.max()), minority, ends)


def differing(values: Iterable[object], ranks: Iterable[int]) -> str:
    """``3 on ranks 0, 1, 5 on rank 2``, for the values of these ranks; empty if all are equal."""
    found: dict[str, list[int]] = {}
    for rank, value in zip(ranks, values, strict=True):
        found.setdefault(str(value), []).append(rank)
    if len(found) == 1:
        return ""
    return ", ".join(f"{value} on {ranks_text(those)}" for value, those in found.items())


def name_of(member: IntEnum) -> str:
    """``capture start`` for CAPTURE_START."""
    return member.name.lower().replace("_", " ")


def ranks_text(ranks: Iterable[int]) -> str:
    """``rank 1``, ``ranks 1, 3``; long lists are shortened."""
    given = list(ranks)
    shown = ", ".join(map(str, given[:8]))
    more = f" and {len(given) - 8} more" if len(given) > 8 else ""
    return f"rank{'s' * (len(given) != 1)} {shown}{more}"
