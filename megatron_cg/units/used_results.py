"""Results of units that may not be used in each way, and what shows that they were."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from weakref import ref

import torch

from megatron_cg.capture.observer import version_of
from megatron_cg.replay.borders import in_backward_pass, laid_out, local, same_placements, spec_of
from megatron_cg.upstream.patch import Undo

Note = Callable[[torch.Tensor | None], None]
READ = (
    "a result that it also uses itself, whose gradient is read or hooked outside",
    "read the gradient of a view that the loss uses instead (y = y.view_as(y) outside of the unit)",
)
WRITTEN = (
    "a result that is a view of a tensor that it also uses itself, or of a part of one, and that "
    "is written outside",
    "write into a copy (y = y.clone() outside of the unit)",
)


@dataclass(frozen=True)
class Noted:
    """A result of a unit, and what notes its gradient."""

    tensor: torch.Tensor
    note: Note
    from_outside: Note | None = None
    """If the unit uses it itself: what notes the gradient from uses outside alone."""


class ReadOnly:
    """A result or an argument of a replay that nobody may write into."""

    found = WRITTEN

    def __init__(self, tensor: torch.Tensor, *, shares: bool) -> None:
        self.shares = shares
        """Whether an argument or another result has its memory, until the step is over."""
        # They count the writes of the tensor, which may be gone before the backward pass, and have
        # no memory. A write into a DTensor is one into it alone, or into its local tensor alone.
        self._aliases: list[Any] = [tensor.detach()]
        if spec_of(tensor) is not None:
            own: Any = tensor._local_tensor  # type: ignore[attr-defined]
            self._aliases[0]._local_tensor = own.new_empty(0)
            self._aliases.append(own.detach())
        self._aliases[-1].data = self._aliases[-1].new_empty(0)
        self.begin()

    def begin(self) -> None:
        """Writes count from now on."""
        self._versions = [*map(version_of, self._aliases)]

    def is_found(self) -> bool:
        """Whether it was written into."""
        return [*map(version_of, self._aliases)] != self._versions


class UsedResult:
    """A result that a unit uses itself, whose gradient may be read outside."""

    found, shares = READ, False

    def __init__(self, tensor: torch.Tensor) -> None:
        # No node: whether one lives says whether a pass still waits for its backward.
        self._tensor = ref(tensor)
        tensor.register_hook(lambda _: None).remove()
        self._hooks: Mapping[int, Any] = tensor._backward_hooks  # type: ignore[assignment]
        """Those of its value now; torch gives a tensor that autograd writes to new ones."""
        self._own = set(self._hooks)

    def is_found(self) -> bool:
        """Whether the gradient is read or hooked outside."""
        tensor = self._tensor()
        is_same = tensor is not None and tensor._backward_hooks is self._hooks
        if is_same and tensor.retains_grad:  # type: ignore[union-attr]
            return True
        # FSDP2 has hooks on all that its modules return, and reads no gradient there.
        hooks = [hook for key, hook in self._hooks.items() if key not in self._own]
        return any("torch.distributed" not in str(hook) for hook in hooks)


class ObservedResult(UsedResult):
    """And its gradient from uses outside, in the steps before capture."""

    def __init__(self, unit: str, tensor: torch.Tensor, note: Note, last: int) -> None:
        super().__init__(tensor)
        self.unit, self._note, self._last = unit, note, last
        self._sum: tuple[torch.Tensor, Any] | None = None
        """Like the gradient so far, without memory, and its spec."""

    @property
    def is_alive(self) -> bool:
        return self._tensor() is not None

    def observe(self, edge: tuple[Any, int], users: Iterable[Any]) -> Iterator[Undo]:
        """Add up what uses outside of the unit pass on, until this is undone."""
        if not in_backward_pass():
            self._sum = None  # A pass may have ended before it came to this result.
        for node in {node for node in users if node._sequence_nr() >= self._last}:
            numbers = [i for i, one in enumerate(node.next_functions) if one == edge]

            def add(gradients: Sequence[Any], _: Any, numbers: Sequence[int] = numbers) -> None:
                for number in numbers:
                    self.add(gradients[number])

            yield node.register_hook(add).remove

    def add(self, gradient: torch.Tensor | None) -> None:
        """Add a gradient in the order of autograd, as far as its layout goes."""
        if gradient is None:
            return
        own, spec = local(gradient), spec_of(gradient)
        like = torch.empty_strided(own.shape, own.stride(), dtype=own.dtype, device="meta")
        if self._sum is not None and same_placements(spec, self._sum[1]):
            like = self._sum[0] + like
        elif self._sum is not None:  # Autograd converts one of them: it varies.
            self.end()
        self._sum = like, spec

    def end(self, _: object = None) -> None:
        """The sum is complete."""
        made = None if self._sum is None else laid_out(*self._sum)
        self._sum = None
        self._note(made)
