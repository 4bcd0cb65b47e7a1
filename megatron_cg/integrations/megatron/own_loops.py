"""Megatron's capture helper in a custom training loop.

Such a loop creates ``megatron.core.transformer.cuda_graphs.TECudaGraphHelper`` itself and has no
``train_step`` to follow. While the package is enabled, a helper for a model under Megatron-FSDP
becomes ours, even if its class was imported before.

Note [A step of such a loop]
    A step ends when the optimizer's ``step`` returns. The decision of the ranks is then applied at
    once: all ranks are at this point, and no work is pending between two steps.

Note [How long a helper votes]
    All ranks must stop voting at the same point, but garbage collectors run at different times. So
    a helper is kept alive until ``close()`` or ``disable()``, even if the loop holds no reference
    to it. A second helper for the same model closes the first one and deletes its graphs.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from functools import partial, wraps
from typing import Any

from megatron_cg.arguments.schema import recomputes_layers
from megatron_cg.capture.session import Phase
from megatron_cg.errors import ConfigurationError, Violation
from megatron_cg.fsdp.fsdp_model import find_megatron_fsdp
from megatron_cg.integrations.megatron.helper import FsdpCudaGraphHelper
from megatron_cg.integrations.megatron.model_rules import check_model
from megatron_cg.upstream.patch import all_of, run_after, set_attribute
from megatron_cg.upstream.symbols import Symbol

_HELPER = Symbol(
    "megatron-core",
    "megatron.core.transformer.cuda_graphs:TECudaGraphHelper",
    "the capture helper of a loop of one's own",
)
_INIT = Symbol(
    "megatron-core",
    "megatron.core.transformer.cuda_graphs:TECudaGraphHelper.__init__",
    "what it is made with",
    parameters=("model", "config", "optimizers"),
)
RELIES_ON = (_HELPER, _INIT)


_RECOMPUTES = Violation(
    "full-recompute-without-fsdp",
    "recompute_granularity full, and graphs of a model that is not under Megatron-FSDP",
    "such layers recompute themselves in their graphs under Megatron-FSDP alone; Megatron's own "
    "graphs do not",
    "wrap the model in FullyShardedDataParallel, or set recompute_granularity to selective or None",
)


class LoopHelper(FsdpCudaGraphHelper):
    """Our helper; the optimizer reports its training steps. See Note [A step of such a loop]."""

    steps: Any

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._steps_done = 0
        with ExitStack() as failed:
            failed.callback(self.undo.close)
            for optimizer in self.optimizers[-1:]:
                self.undo.callback(run_after(optimizer, "step", self.step_done))
            self.steps.before_step(self._steps_done)
            failed.pop_all()

    def create_cudagraphs(self) -> None:
        """Capture as Megatron does, between two steps; then begin the next step."""
        self.steps.after_step()
        super().create_cudagraphs()
        if self.session is not None:
            self.session.mismatches.begin_step()

    def of_model(self, fsdp: Any) -> bool:
        """Whether this helper captures the model in that ``MegatronFSDP``."""
        return self._fsdp is fsdp

    def step_done(self) -> None:
        """End the step, vote, apply what was decided, and begin the next step."""
        self.steps.after_step()
        self._steps_done += 1
        self.steps.vote(self._steps_done)
        self.steps.before_step(self._steps_done)

    def close(self) -> None:
        """Delete the graphs, and stop following steps and voting. Safe to call twice.

        All ranks call it at the same point.
        """
        with self.undo, ExitStack() as ending:
            ending.callback(self.steps.close)
            # disable() closed the session already, maybe after the process groups were destroyed.
            if self.session is not None and self.session.phase is Phase.REPLAYING:
                self.delete_cuda_graphs()


def help_own_loops() -> Callable[[], None]:
    """Turn ``TECudaGraphHelper`` of a model under Megatron-FSDP into ours; returns the undo.

    Creating such a helper raises ConfigurationError or HookError as ``model_rules.check_model``
    does. Raises UpstreamChangedError when the helper is missing or takes other arguments.
    """
    kind, old = _HELPER.find(), _INIT.find()
    signature = inspect.signature(old)
    # See Note [How long a helper votes].
    helpers: list[LoopHelper] = []

    @wraps(old)
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        if type(self) is not kind:
            old(self, *args, **kwargs)
            return
        given = signature.bind(self, *args, **kwargs).arguments
        model = given["model"][0]
        fsdp = find_megatron_fsdp(model)
        if fsdp is None:
            if recomputes_layers(given["config"]):
                raise ConfigurationError([_RECOMPUTES])
            old(self, *args, **kwargs)
            return
        optimizers = given.get("optimizers") or [None]
        check_model(model, optimizers[-1], LoopHelper.given, LoopHelper.make_backend().name)
        for earlier in [helper for helper in helpers if helper.of_model(fsdp)]:
            earlier.close()
        self.__class__ = LoopHelper
        LoopHelper.__init__(self, *args, **kwargs)
        helpers.append(self)
        self.undo.callback(partial(helpers.remove, self))

    undo = set_attribute(kind, "__init__", init)

    def stop() -> None:
        undo()
        for helper in list(helpers):
            helper.close()

    return stop


def settings_for_own_loops(settings: Mapping[str, Any]) -> Callable[[], None]:
    """Apply the flags' settings to helpers created from now on; returns the undo."""
    return all_of(set_attribute(LoopHelper, name, value) for name, value in settings.items())
