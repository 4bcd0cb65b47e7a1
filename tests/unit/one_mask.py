"""Backends for Megatron's capture helper on the CPU: tapes, and the double of ``torch.cuda``."""

from typing import Any

from megatron_cg.backends.base import CaptureRequest
from megatron_cg.tape.tape_backend import TapeBackend
from tests.unit.backends.cuda_double import OnCpu


class OneMask(TapeBackend):
    """The tape, with the one mask for the whole batch that the CPU model passes."""

    def capture(self, request: CaptureRequest) -> Any:
        return super().capture(_with_one_mask(request))


class OneMaskOnCuda(OnCpu):
    def capture(self, request: CaptureRequest) -> Any:
        return super().capture(_with_one_mask(request))


def _with_one_mask(request: CaptureRequest) -> CaptureRequest:
    for kwargs in request.kwargs:
        if "attention_mask" in kwargs:
            kwargs["attention_mask"] = kwargs["attention_mask"][:1].clone()
    return request
