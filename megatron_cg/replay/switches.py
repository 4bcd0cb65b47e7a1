"""Switches of torch that operations read when they choose kernels; a graph holds those of capture.

Most take a microsecond to read and are set once, so they are compared as a step begins. Those of
SDPA are set around passes too (``sdpa_kernel``): units that call it have a row for them.
"""

from collections.abc import Sequence

import torch

from megatron_cg.replay.guard import Mismatch

SDPA = [f"{name}_sdp_enabled" for name in ("flash", "mem_efficient", "math", "cudnn", "fa3")]
_OTHERS = [
    *(f"cublas_allow_{name}_reduced_precision_reduction" for name in ("fp16", "bf16")),
    *(f"cudnn_{name}" for name in ("enabled", "benchmark", "deterministic", "allow_tf32")),
    *("cublas_allow_tf32", "cublas_allow_fp16_accumulation", "float32_matmul_precision"),
    *("sdp_priority_order", "math_sdp_allow_fp16_bf16_reduction", "mkldnn_enabled"),
    *("blas_preferred_backend", "linalg_preferred_backend"),
]
CAUSE = "The graph holds the kernels of capture. Set it before the capture, and around whole steps."


class Switches:
    """Those of these names that this release of torch has, as a row of one object."""

    def __init__(self, names: Sequence[str] = _OTHERS) -> None:
        found = ((name, getattr(torch._C, f"_get_{name}", None)) for name in names)
        self._read = {name: read for name, read in found if read is not None}
        self._seen: dict[str, str] = {}
        self._first: str | None = None

    def get(self, _key: str = "") -> str:
        """Their values in words: one object for each choice, as a row wants it."""
        now = str([read() for read in self._read.values()])
        text = self._seen.get(now)
        if text is None:
            values = (read() for read in self._read.values())
            text = self._seen[now] = "; ".join(map("{}={}".format, self._read, values))
        return text

    def broken(self) -> Mismatch | None:
        """A change since the first call."""
        now = self.get()
        self._first = self._first or now
        if now == self._first:
            return None
        before, after = self._first.split("; "), now.split("; ")
        changed = next(pair for pair in zip(before, after, strict=True) if len(set(pair)) == 2)
        return Mismatch("switches", "a switch of torch", *changed, CAUSE)
