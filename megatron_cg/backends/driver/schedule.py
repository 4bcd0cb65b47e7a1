"""The order of TE's warmup and capture passes: which forward or backward, of which callable.

Follows ``_make_graphed_callables`` of transformer-engine 2.20.2 (``_order``,
``_num_layers_per_chunk``). Chunks are numbered from 1. A positive entry is the forward of all
layers of that chunk; a negative entry is their backward in reverse order. Each chunk's samples are
ordered by microbatch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from megatron_cg.errors import CaptureError


@dataclass(frozen=True)
class Step:
    """One pass to warm up and to capture.

    ``sample`` indexes the sample arguments (and the graphs), ``layer`` the callables.
    """

    forward: bool
    sample: int
    layer: int


def schedule(
    layers: int,
    samples: int,
    order: Sequence[int] | None = None,
    layers_per_chunk: Sequence[int] | None = None,
) -> list[Step]:
    """Return the passes in order.

    Without ``order`` each callable has one sample: all forwards, then the backwards in reverse.

    Raises:
        CaptureError: samples or callables do not match the order, or the order contains a separate
            weight-gradient pass (a fraction), which is not supported.
    """
    if order is None:
        _require(samples == layers, f"{samples} sample_args for {layers} callables")
        forwards = [Step(True, index, index) for index in range(layers)]
        return forwards + [Step(False, index, index) for index in reversed(range(layers))]
    _require(
        all(int(chunk) == chunk and chunk != 0 for chunk in order),
        f"order {list(order)} has an entry that is not a whole chunk number: delayed weight "
        "gradients are not captured. Leave --delay-wgrad-compute out",
    )
    chunks = max(order)
    microbatches = len(order) // chunks // 2
    per_chunk = list(layers_per_chunk or [samples // chunks // max(microbatches, 1)] * chunks)
    _require(
        microbatches * chunks * 2 == len(order)
        and sum(per_chunk) == layers
        and samples == layers * microbatches,
        f"order {list(order)} with {per_chunk} layers a chunk does not fit {layers} callables "
        f"and {samples} sample_args",
    )
    starts = [0, *accumulate(per_chunk)]
    done: dict[int, int] = {}
    steps: list[Step] = []
    for entry in order:
        chunk, forward = abs(entry) - 1, entry > 0
        microbatch = done.get(entry, 0)
        done[entry] = microbatch + 1
        first = starts[chunk] * microbatches + microbatch * per_chunk[chunk]
        inside = range(per_chunk[chunk])
        steps += [
            Step(forward, first + index, starts[chunk] + index)
            for index in (inside if forward else reversed(inside))
        ]
    return steps


def _require(condition: bool, found: str) -> None:
    if not condition:
        raise CaptureError(f"{found}. Pass sample_args and order as Megatron's helper makes them.")
