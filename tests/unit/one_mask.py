"""Backends for Megatron's capture helper on the CPU: tapes, and the double of ``torch.cuda``."""

from typing import Any

from megatron_cg.tape.tape_backend import TapeBackend
from tests.unit.backends.cuda_double import OnCpu


class OneMask(TapeBackend):
    """The tape, with the one mask for the whole batch that the CPU model passes."""

    def capture(self, callables: Any, sample_args: Any, **options: Any) -> Any:
        return super().capture(callables, sample_args, **_with_one_mask(options))


class OneMaskOnCuda(OnCpu):
    def capture(self, callables: Any, sample_args: Any, **options: Any) -> Any:
        return super().capture(callables, sample_args, **_with_one_mask(options))


def _with_one_mask(options: dict[str, Any]) -> dict[str, Any]:
    for kwargs in options["sample_kwargs"]:
        if "attention_mask" in kwargs:
            kwargs["attention_mask"] = kwargs["attention_mask"][:1].clone()
    return options
