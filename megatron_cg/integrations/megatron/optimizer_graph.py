"""A graph of the optimizer's step beside the graphs of layers (``--optimizer-cuda-graph``).

Megatron captures and replays the graph (``OptimizerCudaGraphWrapper``). This module decides when.

Note [No gather in the optimizer's step]
    Megatron-FSDP begins to gather the first weights as the optimizer's step ends, and the next
    forward pass waits for that. If the gather is inside a graph, nothing outside can wait for it.
    So the forward pass begins it, as Megatron sets it for graphs of a whole iteration.

Note [What the step reads]
    A replay reads gradients, weights, moments and learning rates where they were at capture, and
    numbers such as the weight decay as they were then. They are compared before each replay. After
    a difference the step runs eagerly, with the same kernels.

Note [As long as the layers' graphs]
    The graph contains a collective, that of the gradient norm. It is released with the layers'
    graphs, before the process groups, and captured with them again. No rank may run the collective
    eagerly while others replay it (``consensus/collectives.py``). So before a step runs eagerly,
    ranks vote: after a difference in each step, and after a release until all ranks have agreed on
    what follows (Note [Undone by all ranks together] in ``consensus/exchange.py``).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from functools import partial, wraps
from typing import Any

import torch

from megatron_cg.consensus.exchange import Agreement
from megatron_cg.errors import MegatronCGError, ReplayMismatchError
from megatron_cg.memory.usage import optimizer_tensors
from megatron_cg.upstream.patch import Undo, all_of, put_over, set_attribute
from megatron_cg.upstream.symbols import Symbol

logger = logging.getLogger(__name__)

_WRAPPER = Symbol(
    "megatron-core",
    "megatron.core.optimizer.optimizer_cuda_graph:OptimizerCudaGraphWrapper",
    "what replaces the optimizer's step",
    attributes=("__call__", "cuda_graph", "result", "curr_iteration"),
)
_ADAM = Symbol("megatron-core", "megatron.core.optimizer:Adam", "the Adam that optimizers are")
RELIES_ON = (_WRAPPER, _ADAM)
_GATHER = "fsdp_all_gather_in_start_param_sync"
Facts = list[object]


class OptimizerGraph:
    """Decides for each step of one optimizer: eager, capture, or replay.

    Args:
        wrapper: Megatron's, as ``optimizer.step``.
        optimizer: the optimizer whose step it is.
        capture: calls the wrapper as Megatron wrote it.
        votes: those of all ranks.
    """

    def __init__(
        self, wrapper: Any, optimizer: Any, capture: Callable[[], Any], votes: Agreement
    ) -> None:
        self._wrapper, self._optimizer, self._capture = wrapper, optimizer, capture
        self._votes = votes
        self._others_may_replay = False
        self._kind = type(wrapper)
        self._has_stepped = False
        self._may_capture = False
        self._captured: Facts = []
        self.eager_steps = 0
        """Steps that ran eagerly although there was a graph."""

    def follow(self, session: Any) -> None:
        """Capture in the next step, and release the graph when ``session`` closes."""
        self._may_capture = True
        session.on_close(self.release)

    def release(self) -> None:
        """Release the graph, while the GPU is idle; steps then run eagerly."""
        self._may_capture = False
        if self._kind.cuda_graph is not None and not self._others_may_replay:
            self._others_may_replay = True
            self._votes.undo_together(partial(setattr, self, "_others_may_replay", False))
        self._kind.cuda_graph = self._kind.result = None

    def step(self) -> Any:
        """Make a step; returns what Megatron's step returns.

        Raises ReplayMismatchError if this rank alone cannot replay it.
        """
        if self._others_may_replay:
            self._leave("its graph was deleted")
        # The first step makes the moments. In a graph it would make them again in each replay.
        if not self._may_capture or not self._has_stepped:
            self._has_stepped = True
            return self._wrapper.optimizer_step_func()
        facts = list(self._facts())
        if self._kind.cuda_graph is None:
            self._captured = facts
            # Megatron captures in the step of this number.
            self._kind.curr_iteration = self._wrapper.cuda_graph_warmup_steps
            return self._capture()
        if facts == self._captured:
            self._kind.cuda_graph.replay()
            return self._kind.result
        if not self.eager_steps:
            logger.warning(
                "megatron_cg: the optimizer's step runs eagerly, because a gradient, a weight, a "
                "moment or a setting of the optimizer is not as it was when the step was captured."
            )
        self.eager_steps += 1
        self._leave("it would read something else than at capture")
        return self._wrapper.optimizer_step_func()

    def _leave(self, why: str) -> None:
        """Return if all ranks run this step eagerly; see Note [As long as the layers' graphs]."""
        try:
            self._votes.fall_back_together(f"the optimizer's step: {why}")
        except MegatronCGError as error:
            raise ReplayMismatchError(
                f"this rank cannot replay the optimizer's step, since {why}. Its graph holds a "
                "collective, which no rank may run eagerly while others replay it, and not all "
                f"ranks found the same ({error}). Leave out --optimizer-cuda-graph."
            ) from error

    def _facts(self) -> Iterator[object]:
        """See Note [What the step reads]."""
        for group in self._optimizer.param_groups:
            for name, value in group.items():
                if name != "params":
                    yield value.data_ptr() if isinstance(value, torch.Tensor) else value
            for weight in group["params"]:
                yield _place(weight)
                yield _place(weight.grad)
                # The gradients of the precision-aware optimizer.
                yield _place(getattr(weight, "decoupled_grad", None))
        yield from map(_place, optimizer_tensors(self._optimizer))


def _place(tensor: Any) -> object:
    """The address of a tensor's data on this rank; other values as they are."""
    local = getattr(tensor, "_local_tensor", tensor)
    return local.data_ptr() if isinstance(local, torch.Tensor) else local


def follow_optimizer_graph(
    optimizers: Sequence[Any], ddp_config: Any, votes: Agreement
) -> tuple[OptimizerGraph | None, Undo]:
    """Take over the decisions of ``--optimizer-cuda-graph``; the graph is None without that flag.

    Args:
        optimizers: Megatron's, of a model under Megatron-FSDP; its loop gives the flag to one.
        ddp_config: the ``DistributedDataParallelConfig`` of that model.
        votes: those of all ranks.

    Returns:
        The graph, and the undo. Raises UpstreamChangedError if a symbol is missing.
    """
    kind = _WRAPPER.find()
    with_graph = [one for one in optimizers if isinstance(vars(one).get("step"), kind)]
    if not with_graph:
        return None, lambda: None
    (optimizer,) = with_graph
    wrapper, megatrons_own = optimizer.step, kind.__call__
    graph = OptimizerGraph(wrapper, optimizer, lambda: megatrons_own(wrapper), votes)

    @wraps(megatrons_own)
    def call(called: Any, *args: Any, **kwargs: Any) -> Any:
        if called is not wrapper or args or kwargs:
            return megatrons_own(called, *args, **kwargs)
        return graph.step()

    def capture_no_more() -> None:
        """Megatron's wrapper stays, and would capture in the step of its number."""
        kind.curr_iteration = wrapper.cuda_graph_warmup_steps + 1

    def changes() -> Iterator[Undo]:
        yield capture_no_more
        yield put_over(kind, "__call__", call)
        yield set_attribute(ddp_config, _GATHER, False)

    return graph, all_of(changes())


def capturable_adam() -> Undo:
    """Let Adam of optimizers that are made from now on compute as in a graph; returns the undo.

    Transformer Engine then computes the corrections of its moments on the GPU, where the last bits
    differ from those on the host. Raises UpstreamChangedError if Megatron's Adam is missing.
    """
    adam = _ADAM.find()

    class CapturableAdam(adam):  # type: ignore[misc, valid-type]
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **{**kwargs, "capturable": True})

    return set_attribute(*_ADAM.place(), CapturableAdam)
