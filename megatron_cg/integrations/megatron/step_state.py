"""What a step changes before its optimizer does, saved and restored.

Gradients are not among it: they are cleared before a step begins. Megatron's own
``RerunStateMachine`` (megatron-core 0.19.2) saves random states and batches alone, since it expects
the same numbers again. Here the numbers of the first attempt were wrong, so whatever counts or sums
up numbers has to be as before:

- random states: Python's, NumPy's, torch's on the host and on the device, Megatron's tracker
- buffers of modules: counts of tokens and biases of experts, which routers and
  ``finalize_model_grads`` change
- the largest attention logits (``--qk-clip``), an attribute of the attention
- sums for the log: MoE metrics, and losses of multi-token prediction and of the DSA indexer
- ``RerunStateMachine``'s own counts, which the loss function changes

A tensor is restored in place: graphs keep the address of what they write to.
"""

from __future__ import annotations

import copy
import random
import sys
from collections.abc import Sequence
from typing import Any

import numpy
import torch
from torch import nn

from megatron_cg.integrations.megatron.units import metrics_tracker
from megatron_cg.upstream.symbols import Symbol

_LOGITS = "current_max_attn_logits"
_HELPERS = {
    "megatron.core.transformer.multi_token_prediction": "MTPLossLoggingHelper",
    "megatron.core.transformer.experimental_attention_variant.dsa": "DSAIndexerLossLoggingHelper",
}
_RNG = Symbol(
    "megatron-core",
    "megatron.core.tensor_parallel.random:get_cuda_rng_tracker",
    "Megatron's random states",
)
_MACHINE = Symbol(
    "megatron-core",
    "megatron.core.rerun_state_machine:_GLOBAL_RERUN_STATE_MACHINE",
    "Megatron's checks of results; None in a loop without them",
)
_TRACKERS = tuple(
    Symbol("megatron-core", f"{module}:{name}.tracker", "sums of losses for the log")
    for module, name in _HELPERS.items()
)
RELIES_ON = (_RNG, _MACHINE, *_TRACKERS)


class StepState:
    """What a step of ``model`` changes, in memory that is reused by later steps."""

    def __init__(self, model: Sequence[nn.Module]) -> None:
        modules = [module for chunk in model for module in chunk.modules()]
        self._attention = [module for module in modules if hasattr(module, _LOGITS)]
        self._buffers = list({id(b): b for chunk in model for b in chunk.buffers()}.values())
        self._copies = [torch.empty_like(buffer) for buffer in self._buffers]

    def save(self) -> None:
        """Save everything, before the step begins."""
        self._random = _random_states()
        self._logits = [_Saved(getattr(module, _LOGITS)) for module in self._attention]
        _copy(self._copies, self._buffers)
        tracker = metrics_tracker()
        entries = tracker.metrics if tracker is not None else {}
        self._metrics = {name: entry.values.clone() for name, entry in entries.items()}
        self._sums = [
            (sums, {key: _Saved(value) for key, value in sums.items()}) for sums in _sums()
        ]
        self._machine = {key: _copied(value) for key, value in _checks_of_results().items()}

    def restore(self) -> None:
        """Put back what :meth:`save` saved; once for each call of it."""
        _set_random_states(self._random)
        for module, logits in zip(self._attention, self._logits, strict=True):
            setattr(module, _LOGITS, logits.restored())
        _copy(self._buffers, self._copies)
        tracker = metrics_tracker()
        for name, entry in list(tracker.metrics.items()) if tracker is not None else ():
            if name in self._metrics:
                entry.values.copy_(self._metrics[name])
            else:
                del tracker.metrics[name]
        for sums, saved in self._sums:
            sums.clear()
            sums.update({key: value.restored() for key, value in saved.items()})
        _checks_of_results().update(self._machine)


class _Saved:
    """A value, and for a tensor what it held."""

    def __init__(self, value: Any) -> None:
        self._value = value
        self._held = value.clone() if isinstance(value, torch.Tensor) else None

    def restored(self) -> Any:
        """The value itself, as it was."""
        if self._held is not None:
            with torch.no_grad():
                self._value.copy_(self._held)
        return self._value


def _copy(into: list[torch.Tensor], tensors: list[torch.Tensor]) -> None:
    if tensors:
        with torch.no_grad():
            torch._foreach_copy_(into, tensors)


def _sums() -> list[dict[str, Any]]:
    helpers = (getattr(sys.modules.get(module), name, None) for module, name in _HELPERS.items())
    return [helper.tracker for helper in helpers if helper is not None]


def _checks_of_results() -> dict[str, Any]:
    machine = _MACHINE.find()
    return vars(machine) if machine is not None else {}


def _copied(value: Any) -> Any:
    return copy.copy(value) if isinstance(value, dict | list) else value


def _random_states() -> tuple[Any, ...]:
    # A generator of Megatron's tracker may be in graphs, which keep it: its state is copied.
    tracked = {
        name: state.get_state() if isinstance(state, torch.Generator) else state
        for name, state in _RNG.find()().states_.items()
    }
    return (
        random.getstate(),
        numpy.random.get_state(),
        torch.get_rng_state(),
        torch.cuda.get_rng_state(),
        tracked,
    )


def _set_random_states(states: tuple[Any, ...]) -> None:
    python, arrays, host, device, tracked = states
    random.setstate(python)
    numpy.random.set_state(arrays)
    torch.set_rng_state(host)
    torch.cuda.set_rng_state(device)
    current = _RNG.find()().states_
    for name, state in tracked.items():
        if isinstance(current[name], torch.Generator):
            current[name].set_state(state)
        else:
            current[name] = state
