"""The tape as a backend for Megatron's capture helper on the CPU."""

from __future__ import annotations

from typing import Any

from megatron_cg.backends.tape.tape_backend import TapeBackend


class OneMask(TapeBackend):
    """The tape, with the one mask for the whole batch that the CPU model passes."""

    def capture(self, callables: Any, sample_args: Any, **options: Any) -> Any:
        for kwargs in options["sample_kwargs"]:
            if "attention_mask" in kwargs:
                kwargs["attention_mask"] = kwargs["attention_mask"][:1].clone()
        return super().capture(callables, sample_args, **options)
