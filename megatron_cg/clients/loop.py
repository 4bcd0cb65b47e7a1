"""Layerwise graphs in a custom training loop on megatron-core, without megatron.training.

For models of the standalone megatron_fsdp package see :mod:`megatron_cg.units`.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, Self

from megatron.core.transformer.cuda_graphs import TECudaGraphHelper
from torch import nn

from megatron_cg.arguments.schema import OnFailure, OnMismatch, at_least
from megatron_cg.backends.base import Backend
from megatron_cg.errors import speaking
from megatron_cg.integrations.call_arguments import (
    BackendName,
    CallVoice,
    backend_of,
    check_settings,
    refuse,
    settings_in,
    with_settings,
)
from megatron_cg.integrations.megatron.helper import FsdpHelper, check_model, meet
from megatron_cg.integrations.megatron.patches import settings_now
from megatron_cg.integrations.megatron.steps import repeat_steps
from megatron_cg.integrations.teardown import graphs_close_in_time
from megatron_cg.replay.mismatch_policy import Counters

_CALL = "GraphedLayers"
_VOICE = CallVoice(_CALL)


class GraphedLayers:
    """The graphs of a megatron-core model's layers, over the steps of a training loop.

    All ranks create it together, after the model is wrapped and before the first step. Steps inside
    :meth:`step` train eagerly for the first ``config.cuda_graph_warmup_steps`` steps. Then the
    scopes in ``config.cuda_graph_modules`` are captured. Settings are as those of ``enable()``,
    which hold where none is given; ``backend`` may be an object too. With ``verify_steps`` a loop
    calls ``get_forward_backward_func()`` after this, for all passes of each step.

    Args:
        model: megatron-core's ``FullyShardedDataParallel`` around one model. Its config has
            ``cuda_graph_impl="transformer_engine"``.
        optimizer: its gradients are cleared after capture (``zero_grad()``).
        seq_length: tokens in a sequence.
        micro_batch_size: sequences in a microbatch. Megatron's number of microbatches has to be set
            (``init_num_microbatches_calculator``).
        layers: such as ``("attn:0-23", "moe_router:4-")``.
        backend: ``"te"``, ``"native"``, ``"tape"`` or a backend.

    Raises:
        ArgumentError: with every argument that is wrong.
        AgreementError: with settings, versions and variables in which ranks differ.
        ConfigurationError: with every reason why this model cannot be graphed.
        HookError: ``model`` is not under Megatron-FSDP.
    """

    @speaking(_VOICE)
    def __init__(
        self,
        model: nn.Module,
        optimizer: Any,
        *,
        seq_length: int,
        micro_batch_size: int,
        layers: str | Sequence[str] | None = None,
        backend: Backend | BackendName | None = None,
        on_failure: OnFailure | None = None,
        on_mismatch: OnMismatch | None = None,
        verify_interval: int | None = None,
        verify_steps: int | None = None,
        fast_path: bool | None = None,
    ) -> None:
        settings = settings_in(locals())
        refuse(
            [
                *at_least(1).check("seq_length", seq_length),
                *at_least(1).check("micro_batch_size", micro_batch_size),
                *check_settings(settings, _CALL),
            ]
        )
        before = settings_now()
        captures = backend_of(settings.pop("backend", before.cg_backend))
        given = with_settings(before, settings)
        config: Any = getattr(model, "config", None)
        made = partial(new_helper, [model], config, seq_length, micro_batch_size, [optimizer])
        sizes = {"seq_length": seq_length, "micro_batch_size": micro_batch_size}
        agreement = meet(_CALL, captures.name, given, {"config": config, **sizes})
        with ExitStack() as undo:
            undo.callback(agreement.close)
            check_model(model, optimizer, given, captures.name, _CALL)
            self._warmup_steps = int(config.cuda_graph_warmup_steps)
            self._steps = 0
            if given.cg_verify_steps:
                undo.callback(repeat_steps())
            self._helper = FsdpHelper(made, captures, given, agreement=agreement)
            undo.callback(self._helper.close)
            undo.callback(graphs_close_in_time())
            self._undo = undo.pop_all()

    @property
    def counters(self) -> Counters:
        """The counts of all captures so far."""
        return self._helper.controller.counters

    @contextmanager
    def step(self) -> Iterator[None]:
        """One training step of all ranks: every microbatch, and the optimizer's step.

        On entry, graphs are captured if they are due.

        Raises:
            CaptureError, AgreementError, ReplayMismatchError: as in a run of Megatron.
        """
        with speaking(_VOICE), ExitStack() as stack:
            if self._steps == self._warmup_steps and self._helper.controller.awaits_capture:
                self._helper.capture()
            stack.enter_context(self._helper.steps.one(self._steps))
            yield
            self._steps += 1

    def close(self) -> None:
        """Delete the graphs and undo all changes. Safe to call twice."""
        self._undo.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_exception: object) -> None:
        self.close()


def new_helper(*args: Any, **kwargs: Any) -> Any:
    """A ``TECudaGraphHelper`` that ``enable()`` leaves alone: it replaces the constructor."""
    made = TECudaGraphHelper.__new__(TECudaGraphHelper)
    inspect.unwrap(TECudaGraphHelper.__init__)(made, *args, **kwargs)
    return made
