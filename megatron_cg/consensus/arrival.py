"""The ranks of a group meet before they make a process group, and do not wait for one for long.

``torch.distributed.new_group`` waits for all ranks silently, for as long as the new group's own
timeout. Here a rank that waits in vain learns which ranks did not come. The ranks meet in the store
of the default group, so ranks outside of the group are not needed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from megatron_cg.consensus.decision import AgreementError, digest, ranks_text
from megatron_cg.upstream.patch import put_over, undone_after
from megatron_cg.upstream.symbols import Symbol

_STORE = Symbol(
    "torch.distributed.distributed_c10d:_get_default_store",
    "where all ranks of the default group can write",
)
_NAME = Symbol(
    "torch.distributed.distributed_c10d:_process_group_name",
    "the name of a new group, equal on its ranks",
    parameters=("ranks", "use_hashed_name"),
)
RELIES_ON = (_STORE, _NAME)

_met: Counter[str] = Counter()
"""How often these ranks have met; equal on all of them."""


def gloo_group(
    group: dist.ProcessGroup | None, timeout: timedelta, arrival: timedelta, remedy: str
) -> dist.ProcessGroup:
    """A new gloo group of the ranks of ``group``; all of them, and no others, call this together.

    Args:
        group: the default group if None.
        timeout: of the new group.
        arrival: how long to wait for a rank that does not come.
        remedy: what the user does if only some ranks come here.

    Raises AgreementError, with the ranks that did not come in time.
    """
    ranks = sorted(dist.get_process_group_ranks(group or dist.group.WORLD))
    those = f"megatron_cg/{digest(map(str, ranks))}"
    name = f"{those}/{_met[those]}"
    _meet(name, ranks, arrival, remedy)
    _met[those] += 1
    options: dict[str, Any] = {"backend": "gloo", "timeout": timeout}
    made: dist.ProcessGroup
    if group is None:
        made = dist.new_group(**options)
    else:
        # torch takes the number of the groups that this process knows into the name. Ranks of one
        # group may be in other groups too, which differ.
        with undone_after(put_over(*_NAME.place(), lambda *_args, **_kwargs: name)):
            made = dist.new_group(ranks, use_local_synchronization=True, **options)
    return made


def gloo_backend(group: dist.ProcessGroup) -> Any:
    """The group's gloo backend, without the wrapper of ``TORCH_DISTRIBUTED_DEBUG=DETAIL``.

    The wrapper (``_ProcessGroupWrapper``, torch 2.11) has no ``set_timeout`` of its own. Its check
    before each exchange keeps the timeout that the group was created with.
    """
    backend = group._get_backend(torch.device("cpu"))
    return getattr(backend, "wrapped_pg", backend)


def _meet(name: str, ranks: Sequence[int], arrival: timedelta, remedy: str) -> None:
    """Wait for all ranks: the first one for each other's key, and the others for the first."""
    store: Any = _STORE.find()()
    own, met = f"{name}/{dist.get_rank()}", f"{name}/all"
    keys = {rank: f"{name}/{rank}" for rank in ranks}
    store.set(own, "here")
    try:
        if dist.get_rank() == ranks[0]:
            store.wait(list(keys.values()), arrival)
            store.set(met, "here")
        else:
            store.wait([met], arrival)
    except RuntimeError as error:
        absent: list[int] = []
        with suppress(RuntimeError):  # The rank that holds the store may be gone.
            absent = [rank for rank, key in keys.items() if not store.check([key])]
            if not absent and store.check([met]):
                return  # The last one came just in time.
            store.delete_key(own)  # Else a rank that comes later would take this one for present.
        who = f"{ranks_text(absent)} did not come here" if absent else "the others left again"
        raise AgreementError(
            f"{who} within {arrival.total_seconds():g} seconds of rank {dist.get_rank()}: each "
            f"rank of the group votes, so all of them make this call, together. {remedy}"
        ) from error
