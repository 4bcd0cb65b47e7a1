"""What CUDA refuses in a capture is reported with module, line, statement and what to type."""

import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from megatron_cg.backends.calls import place_of
from megatron_cg.capture.guarded_capture import refusal
from megatron_cg.errors import CaptureError, HookError
from megatron_cg.replay.unit import Unit
from megatron_cg.tape.tape_backend import TapeBackend, recording
from megatron_cg.tape.training_plan import CpuModelConfig
from tests.unit.backends.blocks import in_backward
from tests.unit.trainers import layers_of, trainer_of

UNSUPPORTED = (
    "CUDA error: operation not permitted when stream is capturing\n"
    "Compile with `TORCH_USE_CUDA_DSA` to enable device-side assertions.\n"
)
INVALIDATED = "CUDA error: operation failed due to a previous error during capture\n"


def as_item(_tensor: torch.Tensor) -> None:
    refuse()


def as_draw(_tensor: torch.Tensor) -> None:
    draw()


def raise_lookup(_tensor: torch.Tensor) -> None:
    lookup()


def really_read(tensor: torch.Tensor) -> None:
    tensor.sum().item()


def of_torch(name: str, kind: type[Exception], text: str) -> Callable[[], None]:
    """A function that raises while capturing, in a file of torch's, as its C++ has no frame."""
    source = (
        f"def {name}():\n    if cuda.is_current_stream_capturing():\n        raise kind({text!r})\n"
    )
    made: Any = {"cuda": torch.cuda, "kind": kind}
    exec(compile(source, f"{Path(torch.__file__).parent}/{name}.py", "exec"), made)
    function: Callable[[], None] = made[name]
    return function


refuse = of_torch("refuse", torch.AcceleratorError, UNSUPPORTED)
NOT_REGISTERED = "Attempt to increase offset for a CUDA generator not in capture mode."
draw = of_torch("draw", RuntimeError, NOT_REGISTERED)
lookup = of_torch("lookup", LookupError, "no such key")


class Reads(nn.Module):
    """Wraps another module and reads what that one returns."""

    def __init__(self, inner: nn.Module, read: Callable[[torch.Tensor], None], way: str) -> None:
        super().__init__()
        self.inner, self.read, self.way = inner, read, way

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        out = self.inner(*args, **kwargs)
        if self.way == "forward":
            self.read(out)
        elif self.way == "handled":
            try:
                raise KeyError("a way that is not there")
            except KeyError:
                self.read(out)
        elif self.way == "backward":
            out = in_backward(out, self.read)
        return out


@pytest.fixture
def as_cuda_ends_captures(monkeypatch: pytest.MonkeyPatch) -> None:
    """A capture that was invalidated raises once more when it ends, as ``torch.cuda.graph``."""

    @contextmanager
    def ending(*args: Any) -> Iterator[Any]:
        with recording(*args) as made:
            try:
                yield made
            except (torch.AcceleratorError, LookupError):
                raise torch.AcceleratorError(INVALIDATED)  # noqa: B904 - as an end in __exit__

    monkeypatch.setattr("megatron_cg.tape.tape_backend.recording", ending)


def failing_capture(
    way: str, read: Callable[[torch.Tensor], None], kind: Any = CaptureError
) -> BaseException:
    """What a capture ends with whose second layer reads in its attention."""
    with trainer_of(CpuModelConfig(layers=2, graph_modules=("attn", "mlp"))) as trainer:
        attention: Any = layers_of(trainer)[1].self_attention
        attention.core_attention = Reads(attention.core_attention, read, way)
        with pytest.raises(kind) as caught:
            trainer.capture(TapeBackend())
    return caught.value  # type: ignore[no-any-return]


def at(function: Callable[..., Any]) -> str:
    """A function's second line, which is the one that reads, as messages name it."""
    return f"{__file__}:{function.__code__.co_firstlineno + 1} in {function.__name__}: "


INSIDE = "self_attention.core_attention (Reads)"
FORWARD = f"CUDA cannot capture the forward pass of layer 1, in {INSIDE}, {at(as_item)}`refuse()`"
DRAWS = f"CUDA cannot capture the forward pass of layer 1, in {INSIDE}, {at(as_draw)}`draw()`"
BACKWARD = f"CUDA cannot capture the backward pass of layer 1, in {at(as_item)}`refuse()` (Accel"
ALONE = "Leave the scope that holds the Reads out of --cuda-graph-modules attn mlp; or, for this"
OTHER = f"Capture of the forward pass of layer 1, in {INSIDE}, {at(raise_lookup)}"
ON_TAPE = (
    "aten._local_scalar_dense.default in {0} (captured as {1} of layer 1 (TransformerLayer)) at"
)
WAITS = f"{at(really_read)}`tensor.sum().item()` waits"


@pytest.mark.parametrize(
    ("way", "read", "begin", "words"),
    [
        ("forward", as_item, FORWARD, ALONE),
        ("handled", as_item, FORWARD, "(AcceleratorError: CUDA error: operation not permitted"),
        ("forward", as_draw, DRAWS, "a torch.Generator that the graph does not know. Keep it"),
        ("backward", as_item, BACKWARD, "Leave the scope out of --cuda-graph-modules attn mlp"),
        ("forward", raise_lookup, OTHER, "(LookupError: no such key)"),
        ("forward", really_read, ON_TAPE.format(INSIDE, "forward"), WAITS),
        ("backward", really_read, ON_TAPE.format("the backward pass", "backward"), WAITS),
    ],
    ids="forward handled draws backward another_error tape tape_backward".split(),
)
def test_module_line_and_what_to_type_are_named(
    way: str, read: Any, begin: str, words: str, one_rank: None, as_cuda_ends_captures: None
) -> None:
    error = failing_capture(way, read)
    text = str(error)
    assert text.startswith(begin) and words in text
    assert "previous error" not in text and "TORCH_USE_CUDA_DSA" not in text
    assert error.__cause__ is not None or read is really_read
    assert ("A graph holds kernels" in text) is (read is as_item)


def test_missing_advice_hides_no_error(one_rank: None, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_given: Any) -> None:
        raise AttributeError("of Megatron's code")

    monkeypatch.setattr("megatron_cg.capture.guarded_capture.refusal", broken)
    error = failing_capture("forward", as_item, torch.AcceleratorError)
    assert "not permitted when stream is capturing" in str(error)


def test_a_pass_that_autograd_runs_alone_has_no_line() -> None:
    root = nn.Linear(2, 2)
    loss = root(torch.ones(2)).sum()
    loss.backward()
    with pytest.raises(RuntimeError) as caught:
        loss.backward()
    frames = list(traceback.walk_tb(caught.value.__traceback__))
    place = place_of(reversed(frames), root)
    assert place is not None and (place.module, place.source) == (None, "")
    unit = Unit("layer 7", root, ())
    torn = torch.AcceleratorError(INVALIDATED)
    text = str(refusal(torn, unit, in_backward=True))
    assert text.startswith("CUDA cannot capture the backward pass of layer 7 (AcceleratorError: ")


def test_other_errors_are_left_as_they_are() -> None:
    unit = Unit("layer 0", nn.Linear(2, 2), ())
    of_the_model = type("OfTheModel", (RuntimeError,), {})("capture")
    for error in (RuntimeError("no"), LookupError("capture"), HookError("capture"), of_the_model):
        assert refusal(error, unit, in_backward=False) is None
