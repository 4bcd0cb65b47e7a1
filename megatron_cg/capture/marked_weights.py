"""Refuses a layer that writes a weight's gradient somewhere itself, and says so from Python.

With gradient-accumulation fusion a layer writes into ``main_grad`` and sets
``weight.grad_added_to_main_grad``, the mark that Megatron's and Megatron-FSDP's hooks look at. A
replay would not set it, and what its graph returns as the gradient is a placeholder.
"""

from __future__ import annotations

from megatron_cg.errors import CaptureError
from megatron_cg.replay.unit import Unit

_MARK = "grad_added_to_main_grad"


def refuse_marked_weights(unit: Unit) -> None:
    """Raise CaptureError, and remove the marks, if a backward pass has marked weights of a unit."""
    parameters = list(unit.layer.named_parameters())
    marked = [(name, one) for name, one in parameters if getattr(one, _MARK, False)]
    for _, weight in marked:
        setattr(weight, _MARK, False)
    if marked:
        raise CaptureError(
            f"{unit.name} writes the gradient of {marked[0][0]} into main_grad by itself "
            f"(gradient-accumulation fusion; {len(marked)} such weights), so a replay would "
            "return a placeholder instead. Add --no-gradient-accumulation-fusion, or build the "
            "layer with fuse_wgrad_accumulation=False."
        )
