"""What a captured pass writes besides its results: frozen parameters, buffers and inputs.

Note [A made-up pass must leave no trace]
    Warmup and capture run the unit's own code on made-up inputs. A module may update a frozen
    parameter or a buffer in its forward pass, such as a codebook that follows a moving average.
    Buffers are restored after the capture (``transaction.py``). Frozen parameters may be as large
    as the model, so those of one unit at a time are copied, and restored right after its pass.

Note [What a graph cannot write]
    A graph writes to addresses. If a module makes another tensor its buffer, the graph writes to
    the tensor of the capture, and the module never sees the new values. If a module writes into an
    input, the graph writes into its own copy, and the caller never sees the new values. Both would
    be wrong without an error, so the capture refuses them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack

import torch

from megatron_cg.capture.static_inputs import version_of
from megatron_cg.capture.transaction import frozen_kept
from megatron_cg.errors import CaptureError
from megatron_cg.replay.unit import Unit


class InPlace:
    """Looks at the forward passes of one unit.

    Args:
        unit: the unit.
        args: its positional samples.
        kwargs: its keyword samples.
        borrowed: the samples that are the model's own tensors, which a graph writes itself.
    """

    def __init__(
        self,
        unit: Unit,
        args: Sequence[torch.Tensor],
        kwargs: Mapping[str, torch.Tensor],
        borrowed: Iterable[torch.Tensor],
    ) -> None:
        self._unit = unit
        own = {id(tensor) for tensor in borrowed}
        labels = [f"number {index}" for index in range(len(args))]
        labels[: len(unit.inputs)] = unit.inputs[: len(args)]
        self._inputs = [
            (label, tensor)
            for label, tensor in [*zip(labels, args, strict=True), *kwargs.items()]
            if id(tensor) not in own
        ]
        self._buffers = [
            (owner._buffers, name, buffer, f"{path}.{name}" if path else name)
            for path, owner in unit.layer.named_modules()
            for name, buffer in owner._buffers.items()
            if buffer is not None
        ]
        self._versions: list[int] = []
        self._undo = ExitStack()

    def begun(self) -> None:
        """A forward pass begins."""
        self._versions = [version_of(tensor) for _, tensor in self._inputs]
        self._undo.enter_context(frozen_kept(self._unit.graphed))

    def restore(self) -> None:
        """Restore frozen parameters. Safe to call twice, and without a pass."""
        self._undo.close()

    def refuse(self) -> None:
        """Raise CaptureError for what a graph cannot write; see the second note above."""
        for owner, name, buffer, label in self._buffers:
            if owner.get(name) is not buffer:
                raise CaptureError(
                    f"{self._unit.name} replaces its buffer {label} by another tensor in its "
                    "forward pass, but a graph always writes to the tensor of the capture. Write "
                    f"into the buffer instead, such as self.{name}.copy_(...). Or: "
                    f"{self._unit.leave_out(None)}"
                )
        for (label, tensor), version in zip(self._inputs, self._versions, strict=True):
            if version_of(tensor) != version:
                raise CaptureError(
                    f"{self._unit.name} writes into its argument {label}, but a graph would write "
                    "into its own copy. Return the new values instead, keep them in a buffer, or "
                    f"write into a clone. Or: {self._unit.leave_out(None)}"
                )
