"""Restores all that was changed, or ends the run: an error of one restore does not skip the others.

A capture, a verification and a repeated step change what training reads. Training must not continue
without one tensor of it, whatever ``--cg-on-failure`` says.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any, Self

import torch

from megatron_cg.errors import NotRestoredError


class Restores(ExitStack):
    """A stack of what restores something; all errors together become one NotRestoredError."""

    def __init__(self) -> None:
        super().__init__()
        self._errors: list[tuple[Exception, Sequence[str]]] = []

    def restore(self, what: str, function: Callable[..., Any], *args: Any) -> None:
        """Add a callback; ``what`` says in the error what it restores."""
        self._add(lambda *_raised: function(*args), what)

    def callback[**P, T](
        self, function: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs
    ) -> Callable[P, T]:
        self._add(lambda *_raised: function(*args, **kwargs))
        return function

    def enter_context[T](self, manager: AbstractContextManager[T]) -> T:
        made = manager.__enter__()
        self._add(manager.__exit__)
        return made

    def _add(self, leave: Callable[..., Any], *what: str) -> None:
        errors = self._errors

        def run(*raised: Any) -> None:
            try:
                leave(*raised)
            except Exception as error:
                if error is not raised[1]:
                    text = ": ".join([*what, type(error).__name__, str(error)])
                    errors.append((error, getattr(error, "failed", (text,))))

        self.push(run)

    def pop_all(self) -> Self:
        made = super().pop_all()
        made._errors = self._errors
        return made

    def __exit__(self, *raised: Any) -> None:
        super().__exit__(*raised)
        errors = self._errors[:]
        self._errors.clear()
        if errors:
            failed = [text for _, texts in errors for text in texts]
            raise NotRestoredError([*failed, *getattr(raised[1], "failed", ())]) from errors[0][0]


def device_generator() -> list[torch.Generator]:
    if not torch.cuda.is_available():
        return []
    return [torch.cuda.default_generators[torch.cuda.current_device()]]


@contextmanager
def values_kept(tensors: Iterable[tuple[str, torch.Tensor]]) -> Iterator[None]:
    """Restore the values of named tensors on exit, also of one that was given other memory."""
    with Restores() as stack:
        for what, tensor in {id(tensor): (what, tensor) for what, tensor in tensors}.values():
            stack.restore(what, put_back, tensor, tensor.data, tensor.detach().clone())
        yield


def put_back(tensor: torch.Tensor, memory: torch.Tensor, values: torch.Tensor) -> None:
    """Write ``values`` into ``tensor``, whose ``data`` was ``memory`` when it had them."""
    if (tensor.shape, tensor.dtype) != (memory.shape, memory.dtype):
        tensor.data = memory
    write_back(tensor, values)


def write_back_all(saved: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> None:
    """Write what passes have overwritten back, all of it: memory, and what it held before."""
    with Restores() as stack:
        for memory, before in saved:
            stack.restore("memory that a pass wrote to", write_back, memory, before)


def write_back(tensor: torch.Tensor, values: torch.Tensor) -> None:
    """Write values that ``tensor`` had before into its memory."""
    # By ``data``, which no backward pass that is to come takes for a change.
    into = tensor.data
    if type(into) is torch.Tensor and into.layout is torch.strided and not into.is_nested:
        if into.numel() and not into.untyped_storage().nbytes():
            raise RuntimeError("its memory was freed")  # ``copy_`` would end the process.
        # Nor does it take expanded memory, whose equal elements are one.
        once = tuple(slice(1) if stride == 0 else slice(None) for stride in into.stride())
        into, values = into[once], values[once]
    with torch.inference_mode() if into.is_inference() else torch.no_grad():
        into.copy_(values)
