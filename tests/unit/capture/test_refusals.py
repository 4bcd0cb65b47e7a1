"""What CUDA refuses in a capture is reported with module, line, statement and what to type."""

from __future__ import annotations

import traceback
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from megatron_cg.backends.places import _NOT_THE_MODEL, place_of
from megatron_cg.backends.tape.tape_backend import TapeBackend
from megatron_cg.backends.tape.tape_recording import recording
from megatron_cg.capture.refusals import clear_frames, refusal
from megatron_cg.errors import CaptureError, HookError, HostSyncError
from megatron_cg.replay.unit import Unit

UNSUPPORTED = (
    "CUDA error: operation not permitted when stream is capturing\n"
    "Compile with `TORCH_USE_CUDA_DSA` to enable device-side assertions.\n"
)
INVALIDATED = "CUDA error: operation failed due to a previous error during capture\n"


def as_item(_tensor: torch.Tensor) -> None:
    refuse()


def raise_lookup(_tensor: torch.Tensor) -> None:
    lookup()


def really_read(tensor: torch.Tensor) -> None:
    tensor.sum().item()


def of_torch(name: str, raised: str) -> Callable[[], None]:
    """A function that raises while capturing, in a file of torch's, as its C++ has no frame."""
    source = f"def {name}():\n    if cuda.is_current_stream_capturing():\n        raise {raised}\n"
    made: dict[str, Any] = {
        "cuda": torch.cuda,
        "AcceleratorError": torch.AcceleratorError,
        "UNSUPPORTED": UNSUPPORTED,
    }
    exec(compile(source, f"{Path(torch.__file__).parent}/{name}.py", "exec"), made)
    function: Callable[[], None] = made[name]
    return function


refuse = of_torch("refuse", "AcceleratorError(UNSUPPORTED)")
lookup = of_torch("lookup", "LookupError('no such key')")


class InBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, read: Callable[[torch.Tensor], None]) -> Any:
        ctx.read = read
        return tensor.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        ctx.read(gradients[0])
        return gradients[0], None


in_backward: Callable[..., Any] = InBackward.apply


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

    monkeypatch.setattr("megatron_cg.backends.tape.tape_recorder.recording", ending)


def failing_capture(way: str, read: Callable[[torch.Tensor], None], *scopes: str) -> CaptureError:
    """What a capture ends with whose second layer reads in its attention."""
    from megatron_cg.tools.cpu.cpu_model import transformer_layers
    from megatron_cg.tools.cpu.train import Trainer
    from megatron_cg.tools.cpu.training_plan import CpuModelConfig, TrainingPlan

    model = CpuModelConfig(layers=2, graph_modules=scopes)
    trainer: Any = Trainer(TrainingPlan(model=model))
    attention: Any = transformer_layers(trainer.model)[1].self_attention
    attention.core_attention = Reads(attention.core_attention, read, way)
    with pytest.raises(CaptureError) as caught:
        trainer.capture(TapeBackend())
    return caught.value


def at(function: Callable[..., Any]) -> str:
    """A function's second line, which is the one that reads, as messages name it."""
    return f"{__file__}:{function.__code__.co_firstlineno + 1} in {function.__name__}: "


@pytest.mark.parametrize("way", ["forward", "handled"])
def test_module_line_and_scope_are_named(
    way: str, one_rank: None, as_cuda_ends_captures: None
) -> None:
    error = failing_capture(way, as_item, "attn", "mlp")
    text = str(error)
    assert text.startswith(
        "CUDA cannot capture the forward pass of layer 1, in self_attention.core_attention (Reads),"
        f" {at(as_item)}`refuse()` (AcceleratorError: CUDA error: operation not permitted when "
        "stream is capturing). "
    )
    assert "previous error" not in text and "TORCH_USE_CUDA_DSA" not in text
    assert "Type --cuda-graph-modules mlp, without attn; or, for this layer alone" in text
    assert isinstance(error.__cause__, torch.AcceleratorError)


def test_a_backward_pass_is_told_by_its_unit_and_the_line_of_its_function(
    one_rank: None, as_cuda_ends_captures: None
) -> None:
    text = str(failing_capture("backward", as_item, "attn", "mlp"))
    assert text.startswith(
        f"CUDA cannot capture the backward pass of layer 1, in {at(as_item)}`refuse()` (Accel"
    )
    assert "Type --cuda-graph-impl none, without attn and mlp" in text


def test_another_error_in_the_model_is_not_hidden_by_how_the_capture_ends(
    one_rank: None, as_cuda_ends_captures: None
) -> None:
    text = str(failing_capture("forward", raise_lookup, "attn", "mlp"))
    assert f"core_attention (Reads), {at(raise_lookup)}" in text
    assert text.startswith("Capture of the forward pass of layer 1")
    assert "(LookupError: no such key)" in text
    assert "CUDA cannot capture" not in text and "A graph holds kernels" not in text


def test_advice_that_cannot_be_given_does_not_hide_the_error(
    one_rank: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    from megatron_cg.tools.cpu.cpu_model import transformer_layers
    from megatron_cg.tools.cpu.train import Trainer
    from megatron_cg.tools.cpu.training_plan import CpuModelConfig, TrainingPlan

    def broken(*_given: Any) -> None:
        raise AttributeError("of Megatron's code")

    trainer: Any = Trainer(TrainingPlan(model=CpuModelConfig(layers=1, graph_modules=("attn",))))
    attention: Any = transformer_layers(trainer.model)[0].self_attention
    attention.core_attention = Reads(attention.core_attention, as_item, "forward")
    monkeypatch.setattr("megatron_cg.capture.guarded_capture.refusal", broken)
    with pytest.raises(torch.AcceleratorError, match="not permitted when stream is capturing"):
        trainer.capture(TapeBackend())


@pytest.mark.parametrize(
    ("way", "owner"),
    [("forward", "self_attention.core_attention (Reads)"), ("backward", "the backward pass")],
)
def test_the_tape_names_the_same_place(way: str, owner: str, one_rank: None) -> None:
    error = failing_capture(way, really_read, "attn", "mlp")
    assert isinstance(error, HostSyncError)
    captured = f"(captured as {way} of layer 1 (TransformerLayer))"
    place = f" in {owner} {captured} at {at(really_read)}`tensor.sum().item()` waits"
    assert f"aten._local_scalar_dense.default{place}" in str(error)


@pytest.mark.parametrize("on_failure", ["error", "eager"])
def test_a_unit_of_a_plain_model_is_named_too(
    on_failure: Any, one_rank: None, as_cuda_ends_captures: None, caplog: Any
) -> None:
    pytest.importorskip("megatron_fsdp")
    from tests.unit.integrations.standalone.networks import Run

    run = Run()
    block: Any = run.network.layers[1]
    block.dropout = Reads(block.dropout, as_item, "forward")
    with run.with_graphs(on_failure=on_failure):
        run.step()
        if on_failure == "error":
            with pytest.raises(CaptureError) as caught:
                run.step()
            text = str(caught.value)
        else:
            run.step()
            text = caplog.text
    assert f"the forward pass of layers.1, in dropout (Reads), {at(as_item)}" in text
    assert "Leave the unit out of graph_units. Model, hooks, gradients" in text


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


class OfTheModel(RuntimeError):
    """An error of a user's own class."""


def test_other_errors_are_left_as_they_are() -> None:
    unit = Unit("layer 0", nn.Linear(2, 2), ())
    texts = (LookupError("capture"), HookError("capture"), OfTheModel("capture"))
    for error in (RuntimeError("no"), MemoryError(), *texts):
        assert refusal(error, unit, in_backward=False) is None


def test_nothing_is_kept_alive_by_the_frames_of_any_error() -> None:
    kept: list[weakref.ref[torch.Tensor]] = []

    def first() -> None:
        half_made = torch.ones(3)
        kept.append(weakref.ref(half_made))
        raise torch.AcceleratorError(UNSUPPORTED)

    def second() -> None:
        try:
            first()
        finally:
            raise torch.AcceleratorError(INVALIDATED)

    with pytest.raises(torch.AcceleratorError) as caught:
        second()
    assert kept[0]() is not None
    clear_frames(caught.value)
    assert kept[0]() is None


def test_the_folders_whose_code_is_not_the_models_exist() -> None:
    assert all(Path(prefix).is_dir() for prefix in _NOT_THE_MODEL)
