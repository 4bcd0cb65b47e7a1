"""The order of capture-time hooks, and how a failed rank runs the remaining ones.

Source of the order: ``_make_graphed_callables`` of transformer-engine 2.20.2 (``graph.py``). It
runs all forward passes and then all backward passes in reverse, ``num_warmup_iters`` times to warm
up, and once more to capture. The captured code does not affect this order.

Note [A failed rank runs the rest]
    Megatron-FSDP's hooks issue all-gathers. If one rank fails, the others run all their hooks and
    vote only after that. They wait forever unless the failed rank joins each of their all-gathers,
    which depend on hooks alone. So the failed rank runs all remaining hooks in the same order,
    without the modules' work, and then votes. With tensor or context parallelism inside the
    captured region, the other ranks of such a group wait in their modules' collectives, and the
    vote ends by its timeout.

Note [A hook that raised]
    If a hook raised, it is unknown whether it issued its collectives. Running it again could issue
    them twice. So this rank is permanently out of step, and raises OutOfStepError.

Note [Around a pass]
    ``begun`` is called after the hooks that come before a pass, and ``ended`` before those that
    follow it. So neither sees what hooks do. A failed rank that runs only the remaining hooks has
    no passes, and calls neither.
"""

from collections.abc import Callable, Sequence
from functools import partial

from torch import nn

from megatron_cg.errors import WITHOUT_GRAPHS, CaptureError, UpstreamChangedError, say
from megatron_cg.fsdp.roles import CAPTURE_TIME_KEYS, CaptureTimeHooks
from megatron_cg.upstream.symbols import changed

_AFTER_A_PASS = ("forward_hooks", "backward_hooks")
_OF_FORWARD, _OF_BACKWARD = CAPTURE_TIME_KEYS[:2], CAPTURE_TIME_KEYS[2:]

AroundPass = Callable[[int, bool, bool], None]
"""Takes the index of the callable, whether the pass is a forward one, and whether it warms up."""


class OutOfStepError(CaptureError):
    """A rank can no longer issue the same collectives as the others, and must not continue."""


class HookOrder:
    """Every call of a capture-time hook from the first warmup to the last backward capture.

    Pass ``wrapped`` to the backend instead of the hooks. Each call is then checked against the
    expected order. ``begun`` and ``ended`` are called around each pass; see Note [Around a pass].
    """

    def __init__(
        self,
        callables: Sequence[nn.Module],
        hooks: Sequence[CaptureTimeHooks],
        warmups: int,
        *,
        begun: AroundPass = lambda _layer, _forward, _warmup: None,
        ended: AroundPass = lambda _layer, _forward, _warmup: None,
    ) -> None:
        layers = range(len(callables))
        forward = [(layer, key) for layer in layers for key in _OF_FORWARD]
        backward = [(layer, key) for layer in reversed(layers) for key in _OF_BACKWARD]
        self._entries = [*forward, *backward] * (warmups + 1)
        self.warmup_passes = 2 * len(layers) * warmups
        self._position = 0
        self._raised = ""
        self._callables, self._hooks = tuple(callables), tuple(hooks)
        self._begun, self._ended = begun, ended
        # One function per key, even without hooks, so that every call is checked.
        self.wrapped: list[CaptureTimeHooks] = [
            {key: {0: partial(self._called, layer, key)} for key in CAPTURE_TIME_KEYS}
            for layer in layers
        ]

    @property
    def finished(self) -> bool:
        return self._position == len(self._entries)

    @property
    def under_way(self) -> tuple[int, bool] | None:
        """The callable that runs a pass now, and whether it is a backward; None between passes."""
        if self.finished or self._position == 0:
            return None
        layer, key = self._entries[self._position]
        return (layer, key == "backward_hooks") if key in _AFTER_A_PASS else None

    def check_finished(self) -> None:
        if not self.finished:
            raise self._other_order("nothing")

    def run_rest(self) -> None:
        """Run all hooks that have not run yet; see Note [A failed rank runs the rest].

        Raises OutOfStepError if a hook raises now or raised during capture.
        """
        cause: Exception | None = None
        try:
            while not self.finished and not self._raised:
                layer, key = self._entries[self._position]
                self._run(layer, key, self._callables[layer])
        except Exception as error:
            cause = error
        if self._raised:
            layer, key = self._entries[self._position]
            raise OutOfStepError(
                f"one of the {key} of callable {layer} ({type(self._callables[layer]).__name__}) "
                f"raised {self._raised}. So this rank may have left out collectives that the other "
                "ranks wait for, and training cannot go on. " + say(WITHOUT_GRAPHS)
            ) from cause

    def _called(self, layer: int, key: str, module: nn.Module) -> None:
        if self.finished or self._entries[self._position] != (layer, key):
            raise self._other_order(f"{key} of callable {layer}")
        is_forward, is_warmup = key in _OF_FORWARD, self._position < 2 * self.warmup_passes
        if key in _AFTER_A_PASS:
            self._ended(layer, is_forward, is_warmup)
        self._run(layer, key, module)
        if key not in _AFTER_A_PASS:
            self._begun(layer, is_forward, is_warmup)

    def _run(self, layer: int, key: str, module: nn.Module) -> None:
        try:
            for hook in self._hooks[layer].get(key, {}).values():
                hook(module)
        except BaseException as error:
            self._raised = f"{type(error).__name__}: {error}"
            raise
        self._position += 1

    def _other_order(self, actual: str) -> UpstreamChangedError:
        layer, key = self._entries[self._position] if not self.finished else (0, "")
        expected = f"{key} of callable {layer}" if key else "no more hooks"
        return changed(
            "transformer-engine",
            "transformer_engine.pytorch.graph:_make_graphed_callables",
            f"at call {self._position + 1} of capture-time hooks, of {len(self._entries)}: "
            f"{expected}, where {actual} came",
        )
