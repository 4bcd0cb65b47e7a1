"""The autograd function inside the callables that TE's ``make_graphed_callables`` returns.

In TE's ``graph.py`` the function that is returned for each sample calls ``graphed``. That applies
the class ``Graphed`` to three arguments of its own, ``len_user_args`` arguments of the caller, and
the weights. ``Graphed.backward`` returns copies of the gradients that
``returned_param_grad_clone_slots`` names, and the other gradients in the graph's memory. It copies
incoming gradients into ``static_grad_outputs``. All these names are closure
variables, and each sample has its own.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial
from types import CellType
from typing import Any

from torch import nn

from megatron_cg.replay.unit import ReplayFunction
from megatron_cg.upstream.patch import cells_of, set_cell
from megatron_cg.upstream.symbols import Symbol, changed

_PACKAGE = "transformer-engine"
_MAKER = (
    "transformer_engine.pytorch.graph:_make_graphed_callables.<locals>"
    ".make_graphed_autograd_function"
)
_FUNCTION = Symbol(f"{_MAKER}.<locals>.Graphed", "what replays a graph")
_CALLED = Symbol(f"{_MAKER}.<locals>.functionalized", "what applies it")
RELIES_ON = (_FUNCTION, _CALLED)
_OWN_ARGUMENTS = 3
"""TE's own: whether FP8 weights are cast, a stream, and an event."""


def replay_function(graph: Any) -> ReplayFunction:
    """How autograd sees the replays of a graph from ``make_graphed_callables``.

    Raises UpstreamChangedError if a closure variable is missing.
    """
    called = graph.forward if isinstance(graph, nn.Module) else graph
    applied = _cell(_cell(called, "graphed").cell_contents, "Graphed")
    function = applied.cell_contents
    clones = _cell(function.backward, "returned_param_grad_clone_slots")
    none = (False,) * len(clones.cell_contents)

    def borrow() -> Callable[[], None]:  # Called in each backward pass, so it only sets a variable.
        own, clones.cell_contents = clones.cell_contents, none
        return partial(setattr, clones, "cell_contents", own)

    incoming = _cell(function.backward, "static_grad_outputs").cell_contents
    return ReplayFunction(
        function,
        _OWN_ARGUMENTS + _cell(function.forward, "len_user_args").cell_contents,
        replace=lambda replacement: set_cell(applied, replacement),
        borrow=borrow,
        needs=tuple(static is not None for static in incoming),
    )


def _cell(function: Any, name: str) -> CellType:
    cells = cells_of(inspect.unwrap(function))
    if name not in cells:
        raise changed(_PACKAGE, _MAKER, f"{_FUNCTION.expected}, with a variable {name} around it")
    return cells[name]
