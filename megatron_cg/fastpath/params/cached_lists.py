"""Cached lists of a module's parameters and submodules, for Megatron-FSDP.

Note [Shown one parameter a bucket]
    Megatron-FSDP takes lists of parameters where it means their buckets. It gathers, waits for and
    releases each bucket once, and skips all further parameters of the bucket. So it gets only one
    parameter per bucket here, and every FP8 parameter, because it also manages the FP8 caches.
    What it does with a bucket does not change.

Note [Shown one module for all]
    Before a backward pass, and before that of each unit, Megatron-FSDP sets the training state of
    every module. It searches for the modules each time and sets the state through
    ``nn.Module.__setattr__``. Here it gets one object that passes the state on to all modules.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from torch import nn

STATE = "_training_state"


class CachedParameters(list[nn.Parameter]):
    """Parameters as Megatron-FSDP lists them, and the subset that represents their buckets.

    Args:
        parameters: the list.
        bucket_of: a parameter's bucket.
        is_float8: whether a parameter is FP8.
    """

    def __init__(
        self,
        parameters: list[nn.Parameter],
        bucket_of: Callable[[nn.Parameter], int],
        is_float8: Callable[[nn.Parameter], bool],
    ) -> None:
        super().__init__(parameters)
        seen: set[int] = set()
        self.shown: list[nn.Parameter] = []
        """See Note [Shown one parameter a bucket]."""
        self.others: list[nn.Parameter] = []
        self.marked = False
        """Whether ``others`` have Megatron-FSDP's marks of unsharded parameters."""
        for parameter in parameters:
            bucket = bucket_of(parameter)
            stands_for_all = bucket not in seen or is_float8(parameter)
            seen.add(bucket)
            (self.shown if stands_for_all else self.others).append(parameter)

    def parameters(self, recurse: bool = True) -> Iterator[nn.Parameter]:
        """Yield ``shown``; Megatron-FSDP calls this as it calls ``nn.Module.parameters``."""
        return iter(self.shown)


class ParameterLists:
    """A cache of Megatron-FSDP's own list for each module and direction.

    Megatron-FSDP's hooks run only in forward and backward passes, when modules hold their raw
    parameters. So a list stays valid until the model is wrapped again.
    """

    def __init__(
        self,
        listed: Callable[[nn.Module, str], list[nn.Parameter]],
        bucket_of: Callable[[nn.Parameter], int],
        is_float8: Callable[[nn.Parameter], bool],
    ) -> None:
        self._listed, self._bucket_of, self._is_float8 = listed, bucket_of, is_float8
        self._cached: dict[tuple[nn.Module, str], CachedParameters] = {}

    def __call__(self, module: nn.Module, direction: str) -> CachedParameters:
        """The list for ``direction``, ``"forward"`` or ``"backward"``."""
        cached = self._cached.get((module, direction))
        if cached is None:
            cached = CachedParameters(
                self._listed(module, direction), self._bucket_of, self._is_float8
            )
            self._cached[module, direction] = cached
        return cached


class CachedModules:
    """Modules whose training state is set together; see Note [Shown one module for all].

    Args:
        unit: the root of the modules; it is one of them.
    """

    def __init__(self, unit: nn.Module) -> None:
        self.unit = unit
        self._own = [vars(module) for module in unit.modules()]

    def modules(self) -> Iterator[Any]:
        """Yield this object; Megatron-FSDP calls this as it calls ``nn.Module.modules``."""
        yield self

    def _pass_on(self, state: Any) -> None:
        for own in self._own:
            own[STATE] = state

    _training_state = property(None, _pass_on)
