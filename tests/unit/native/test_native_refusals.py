"""What the native backend refuses by name, and what it asks of Transformer Engine and trackers."""

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import nn

from megatron_cg.backends.base import CaptureRequest, generators_of
from megatron_cg.errors import CaptureError
from megatron_cg.native.native_backend import refuse
from tests.unit.backends.cuda_double import Calling, CudaDouble, OnCpu, capture
from tests.unit.backends.test_te_backend import QuantizationState, fake_te


def test_generators_of_modules_and_trackers_are_registered_before_the_capture(
    cuda: CudaDouble,
) -> None:
    class Drawing(nn.Linear):
        def __init__(self) -> None:
            super().__init__(4, 4)
            self.generator = torch.Generator().manual_seed(3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) + torch.rand(4, generator=self.generator, device=x.device)

    drawing = Drawing()
    module, own = nn.Sequential(drawing), drawing.generator
    before = own.get_state()
    capture(module)
    _, forward, backward = cuda.graphs
    assert own in forward.registered and own in backward.registered
    assert torch.equal(own.get_state(), before)
    assert generators_of([module], "cuda") == []


def having(**attributes: Any) -> nn.Linear:
    module = nn.Linear(4, 4)
    vars(module).update(attributes)
    return module


def quantized() -> nn.Linear:
    """Its buffer keeps its values as TE's quantized tensors do."""
    module = nn.Linear(4, 4)
    module.register_buffer("scaled", torch.ones(2))
    module.scaled._rowwise_data = torch.ones(2)  # type: ignore[union-attr]
    return module


DELAYED = {"need_backward_dw": lambda: True}
FUSED = {"fuse_wgrad_accumulation": True}
CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("module", "found"),
    [
        (having(primary_weights_in_fp8=True), r"0 \(Linear\) has FP8 weights"),
        (quantized(), r"0 \(Linear\) has FP8 weights"),
        (having(**FUSED), r"0 \(Linear\) has fuse_wgrad_accumulation=True.*main_grad"),
        (
            having(gradient_accumulation_fusion=True),
            "gradient_accumulation_fusion=True.*no-gradient-accumulation",
        ),
        (having(**DELAYED), "delay_wgrad_compute=False"),
        (nn.Linear(4, 4, device="meta"), "buffers on meta: move the model to cpu"),
    ],
)
def test_what_a_replay_would_get_wrong_is_refused_by_name(module: nn.Module, found: str) -> None:
    with pytest.raises(CaptureError, match=found):
        refuse(CaptureRequest((nn.Sequential(module),), [(torch.ones(1),)]), CPU)
    refuse(CaptureRequest((nn.Linear(4, 4),), [(torch.ones(1),)], [{"mask": torch.ones(1)}]), CPU)


def test_all_reasons_come_at_once_and_before_anything_runs(cuda: CudaDouble) -> None:
    samples = [(torch.ones(1, device="meta"),), (torch.ones(1),)]
    more = [{"mask": torch.ones(1, device="meta")}, {}]
    with pytest.raises(CaptureError, match="4 reasons") as caught:
        modules = having(**FUSED), having(**DELAYED)
        OnCpu().capture(CaptureRequest(modules, samples, more))
    said = str(caught.value)
    assert "callable 0 (Linear)" in said and "callable 1 (Linear)" in said
    assert said.count("a sample is on meta: move it to cpu") == 2
    assert cuda.graphs == [] and cuda.memory == {}


@pytest.mark.parametrize("fails", [False, True])
def test_modules_of_te_are_told_of_the_capture(
    cuda: CudaDouble, monkeypatch: pytest.MonkeyPatch, fails: bool
) -> None:
    te = fake_te(monkeypatch)
    seen: list[bool] = []

    def look() -> None:
        seen.append(te.capturing)
        if fails:
            raise LookupError

    with pytest.raises(LookupError) if fails else nullcontext():
        capture(Calling(look, 1))
    assert seen == [True] and te.capturing is False
    if not fails:
        assert te.states["te"] in cuda.graphs[1].registered


@pytest.mark.refuses("native-backend-fp8")
def test_fp8_is_refused_at_capture_and_seen_by_the_guard(
    cuda: CudaDouble, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend: Any = OnCpu()
    assert backend.numerics() is None and backend.captured_numerics(0, {}) is None
    fake_te(monkeypatch)
    monkeypatch.setattr(QuantizationState, "recipe", "delayed")
    assert backend.numerics() == "delayed"
    with pytest.raises(CaptureError, match="FP8 is on"):
        capture(nn.Linear(4, 4))


def test_autocast_with_its_cache_is_refused(cuda: CudaDouble) -> None:
    with (
        torch.autocast("cpu", dtype=torch.bfloat16),
        pytest.raises(CaptureError, match="cache_enabled=False"),
    ):
        capture(nn.Linear(4, 4))
    with torch.autocast("cpu", dtype=torch.bfloat16, cache_enabled=False):
        capture(nn.Linear(4, 4))
