"""Modes that a layer's Python code reads and a replay does not.

Dropout and batch statistics depend on ``training``. Which gradients are computed depends on
``requires_grad`` of parameters. The precision of operations depends on autocast
and TE's FP8 state. Grad mode decides which tensors are saved for the backward pass. Each decision
was made at capture, and a replay repeats it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

from megatron_cg.replay.guard.mismatch import Mismatch


class Training:
    """Every module inside the graph is in training or evaluation mode as at capture."""

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        self._modules = [(vars(module), module.training, module) for module in modules]

    def broken(self) -> Mismatch | None:
        """The first module whose mode has changed."""
        for attributes, training, module in self._modules:
            if attributes["training"] is not training:
                return Mismatch(
                    "training",
                    f"the mode of a {type(module).__name__}",
                    _mode(training),
                    _mode(not training),
                    "It was switched alone, but the graph would run it in the old mode. Switch the "
                    "whole model with model.train() and model.eval().",
                )
        return None


class Frozen:
    """Parameters inside the graph that needed no gradient at capture still need none.

    The reverse is allowed: a gradient that the graph computes and nobody needs is discarded.

    Args:
        layer: the unit.
        graphed: the modules inside its graph. Only their frozen parameters are looked at.
    """

    def __init__(self, layer: nn.Module, graphed: Iterable[nn.Module]) -> None:
        names = {id(module): f"{name}." if name else "" for name, module in layer.named_modules()}
        self._frozen = [
            (module._parameters, name, f"{names.get(id(module), '')}{name}")
            for module in graphed
            for name, parameter in module.named_parameters(recurse=False, remove_duplicate=False)
            if not parameter.requires_grad
        ]

    def broken(self) -> Mismatch | None:
        """The first parameter that was unfrozen; a replaced one is another clause's."""
        for owner, name, label in self._frozen:
            parameter = owner.get(name)
            if parameter is not None and parameter.requires_grad:
                return Mismatch(
                    "frozen",
                    f"parameter {label}",
                    "without requires_grad",
                    "with it",
                    "It was unfrozen after capture, and the graph computes no gradient for it. Set "
                    "requires_grad before training begins, or delete the graphs and capture again.",
                )
        return None


class Autograd:
    """Grad mode is as at capture, where it is always on."""

    def broken(self) -> Mismatch | None:
        """A mismatch if the layer runs under ``torch.no_grad()`` or in inference mode."""
        if torch.is_grad_enabled():
            return None
        return Mismatch(
            "grad mode",
            "grad mode",
            "on",
            "off",
            "The layer runs in training under torch.no_grad() (activation recompute of whole "
            "layers does so): a replay would overwrite activations that a backward still needs.",
        )


class Autocast:
    """``torch.autocast`` is as it is now: on or off, and its dtype.

    Args:
        device_type: where the unit runs.
        where: ends its name in messages.
    """

    def __init__(self, device_type: str, where: str = "") -> None:
        self._device_type, self._where = device_type, where
        self._state: torch.dtype | None = None
        if torch.is_autocast_enabled(device_type):
            self._state = torch.get_autocast_dtype(device_type)

    def broken(self) -> Mismatch | None:
        """A mismatch if autocast was entered, exited, or set to another dtype."""
        now = None
        if torch.is_autocast_enabled(self._device_type):
            now = torch.get_autocast_dtype(self._device_type)
        if now is self._state:  # There is one object of each dtype.
            return None
        return Mismatch(
            "autocast",
            f"torch.autocast for {self._device_type}{self._where}",
            _autocast(self._state),
            _autocast(now),
            "The graph computes in the precision of capture. Keep one torch.autocast around the "
            "same passes in all steps (with Megatron: none, but --bf16), or train without graphs.",
        )


class Numerics:
    """The backend's own numerics state (TE: FP8 on or off, and its recipe).

    Args:
        captured: the state at capture.
        read: returns the current state; a replay is correct while it equals ``captured``.
    """

    def __init__(self, captured: Any, read: Callable[[], Any]) -> None:
        self._captured, self._read = captured, read

    def broken(self) -> Mismatch | None:
        """A mismatch if FP8 was switched on or off, or has another recipe."""
        now = self._read()
        if now == self._captured:
            return None
        return Mismatch(
            "fp8",
            "the FP8 state",
            str(self._captured),
            str(now),
            "The graph quantizes as it did at capture. Keep --fp8-format and --fp8-recipe for the "
            "whole run, and call the layer inside Megatron's own FP8 context.",
        )


def _mode(training: bool) -> str:
    return "training" if training else "evaluation"


def _autocast(state: torch.dtype | None) -> str:
    return "off" if state is None else str(state)
