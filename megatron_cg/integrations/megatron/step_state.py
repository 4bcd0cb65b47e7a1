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
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy
import torch
from megatron.core.transformer.moe.moe_logging import get_moe_metrics_tracker
from torch import nn

from megatron_cg.upstream.symbols import Symbol

_LOGITS = "current_max_attn_logits"
_RNG = Symbol(
    "megatron.core.tensor_parallel.random:get_cuda_rng_tracker", "Megatron's random states"
)
_MACHINE = Symbol(
    "megatron.core.rerun_state_machine:_GLOBAL_RERUN_STATE_MACHINE",
    "Megatron's checks of results; None in a loop without them",
)
_SUMS = tuple(
    Symbol(f"megatron.core.transformer.{path}.tracker", "sums of losses for the log")
    for path in (
        "multi_token_prediction:MTPLossLoggingHelper",
        "experimental_attention_variant.dsa:DSAIndexerLossLoggingHelper",
    )
)
RELIES_ON = (_RNG, _MACHINE, *_SUMS)


class StepState:
    """What a step of ``model`` changes, in memory that is reused by later steps."""

    def __init__(self, model: Sequence[nn.Module]) -> None:
        modules = [module for chunk in model for module in chunk.modules()]
        self._attention = [module for module in modules if hasattr(module, _LOGITS)]
        self._buffers = list({id(b): b for chunk in model for b in chunk.buffers()}.values())
        self._copies = [torch.empty_like(buffer) for buffer in self._buffers]
        self._saved: list[Callable[[], None]] = []

    def save(self) -> None:
        """Save everything, before the step begins."""
        metrics = get_moe_metrics_tracker().metrics
        found = [symbol.find() for symbol in _SUMS]
        _copy(self._copies, self._buffers)
        self._saved = [
            partial(_copy, self._buffers, self._copies),
            _saved_random_states(),
            *(_saved_values(vars(module), (_LOGITS,)) for module in self._attention),
            *(_saved_values(vars(entry), ("values",)) for entry in metrics.values()),
            *(_saved_values(sums, tuple(sums), others=False) for sums in (metrics, *found)),
        ]
        machine = _MACHINE.find()
        if machine is not None:
            self._saved.append(_saved_values(vars(machine), tuple(vars(machine))))

    def restore(self) -> None:
        """Put back what :meth:`save` saved; once for each call of it."""
        for restore in self._saved:
            restore()


def _saved_values(
    holder: dict[str, Any], names: tuple[str, ...], *, others: bool = True
) -> Callable[[], None]:
    """Restores these values of ``holder``, tensors in place; without ``others`` it has no more."""
    values = {name: (holder[name], _copied(holder[name])) for name in names}

    def restore() -> None:
        if not others:
            holder.clear()
        for name, (value, copied) in values.items():
            if isinstance(value, torch.Tensor):
                _copy([value], [copied])
            holder[name] = value if isinstance(value, torch.Tensor) else copied

    return restore


def _copied(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.clone()
    return copy.copy(value) if isinstance(value, dict | list) else value


def _copy(into: list[torch.Tensor], tensors: list[torch.Tensor]) -> None:
    if tensors:
        with torch.no_grad():
            torch._foreach_copy_(into, tensors)


def _saved_random_states() -> Callable[[], None]:
    host, device = torch.get_rng_state(), torch.cuda.get_rng_state()
    python, arrays = random.getstate(), numpy.random.get_state()
    # A generator of Megatron's tracker may be in graphs, which keep it: its state is copied.
    tracked = {
        name: state.get_state() if isinstance(state, torch.Generator) else state
        for name, state in _RNG.find()().states_.items()
    }

    def restore() -> None:
        random.setstate(python)
        numpy.random.set_state(arrays)
        torch.set_rng_state(host)
        torch.cuda.set_rng_state(device)
        states = _RNG.find()().states_
        for name, state in tracked.items():
            if isinstance(states[name], torch.Generator):
                states[name].set_state(state)
            else:
                states[name] = state

    return restore
