"""A module's parameters and submodules in Megatron-FSDP's terms, worked out once.

Note [Shown one parameter a bucket]
    Megatron-FSDP takes lists of parameters where it means their buckets: it gathers, waits for and
    releases every bucket of a list once, and skips it for each further parameter. So it is shown
    one parameter of each bucket, and every FP8 one, whose caches it also looks after. What it does
    with a bucket stays its own.

Note [Shown one module for all]
    Before a backward pass, and before that of each unit, it notes the state of training in every
    module, each found anew and set through ``nn.Module.__setattr__``. It is shown one that passes
    the state on to all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from torch import nn

STATE = "_training_state"


class KnownParameters(list[nn.Parameter]):
    """Parameters as Megatron-FSDP lists them, with those that stand for all.

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
        """What a module of these parameters would be asked for."""
        return iter(self.shown)


class ParameterLists:
    """Megatron-FSDP's own list for each module and direction, remembered.

    Modules hold their raw parameters whenever it is asked, since its hooks run in forward and
    backward passes only, and these hold until the model is wrapped anew.
    """

    def __init__(
        self,
        listed: Callable[[nn.Module, str], list[nn.Parameter]],
        bucket_of: Callable[[nn.Parameter], int],
        is_float8: Callable[[nn.Parameter], bool],
    ) -> None:
        self._listed, self._bucket_of, self._is_float8 = listed, bucket_of, is_float8
        self._known: dict[tuple[nn.Module, str], KnownParameters] = {}

    def __call__(self, module: nn.Module, direction: str) -> KnownParameters:
        """The list for ``direction``, ``"forward"`` or ``"backward"``."""
        known = self._known.get((module, direction))
        if known is None:
            known = KnownParameters(
                self._listed(module, direction), self._bucket_of, self._is_float8
            )
            self._known[module, direction] = known
        return known


class KnownModules:
    """Modules that are given their state of training together; see Note [Shown one module for all].

    Args:
        unit: the module that they are below, itself among them.
    """

    def __init__(self, unit: nn.Module) -> None:
        self.unit = unit
        self._own = [vars(module) for module in unit.modules()]

    def modules(self) -> Iterator[Any]:
        """What ``unit`` would be asked for."""
        yield self

    def _pass_on(self, state: Any) -> None:
        for own in self._own:
            own[STATE] = state

    _training_state = property(None, _pass_on)
