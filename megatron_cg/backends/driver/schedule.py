"""The order of TE's warmup and capture passes: which forward or backward, of which callable.

Follows ``_make_graphed_callables`` of transformer-engine 2.20.2 (``_order``,
``_num_layers_per_chunk``) for one model chunk: 1 is the forward of all callables for the next
microbatch, -1 their backward in reverse order for the next one. Samples are ordered by microbatch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

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
    order: Sequence[float] | None = None,
    layers_per_chunk: Sequence[int] | None = None,
) -> list[Step]:
    """Return the passes in order; without ``order`` each callable has one sample.

    Raises CaptureError: samples or callables do not match the order, or it has several chunks or a
    separate pass for weight gradients (a fraction).
    """
    order = list(order or [1, -1])
    microbatches = order.count(1)
    fits = len(order) == 2 * microbatches == 2 * order.count(-1)
    if not fits or samples != layers * microbatches or (layers_per_chunk or [layers]) != [layers]:
        raise CaptureError(
            f"{samples} sample_args for {layers} callables do not fit the order {order} with "
            f"{layers_per_chunk} layers a chunk. One chunk is captured, each microbatch with a "
            "sample of its own. Leave --delay-wgrad-compute out"
        )
    steps: list[Step] = []
    done = {1: 0, -1: 0}
    for entry in order:
        layers_in_turn = range(layers) if entry == 1 else reversed(range(layers))
        first = layers * done[int(entry)]
        steps += [Step(entry == 1, first + layer, layer) for layer in layers_in_turn]
        done[int(entry)] += 1
    return steps
