"""Which experts' GEMMs have other bits in one kernel for all than in Transformer Engine's default.

    python -m benchmarks.gemm_bits --out gemm-bits.jsonl

For pairs of hidden and expert size, both linear layers, BF16 and FP8, one line for each kernel and
each room: the numbers of rows for which results (``y``), gradients of rows (``dx``) and of weights
(``dw``) of an expert differ. ``room`` is how many times as many rows the buffer has as are counted,
as in a graph: kernels may be chosen by it. One Hopper GPU; ``cublas`` needs cuBLASLt 13.8.1.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch

from megatron_cg.experts.grouped_gemm import GroupedGemm

SIZES = (
    *((2048, 768), (4096, 14336), (2048, 1408), (4096, 1536), (7168, 2048), (2880, 2880)),
    *((5120, 8192), (2048, 1024), (1024, 512), (4096, 1408), (512, 256), (3072, 3072)),
)
"""Hidden and expert size: of Qwen3-30B-A3B, Mixtral, DeepSeek-V2-Lite and so on."""
MULTIPLES = {"bf16": 1, "tensorwise": 16, "blockwise": 128}
ROOMS = (1, 2, 8)
SEEDS = 4
_LARGE, _ROWS = 40_000_000, 40_000
_SETTINGS = (None,) * 24
"""Those of Transformer Engine's layer, none of them used."""
_Kernel = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
_Results = tuple[torch.Tensor, torch.Tensor, Sequence[torch.Tensor]]


def rows_of(experts: int, seed: int, multiple: int) -> list[int]:
    """Rows of each expert: few of most, and many of some."""
    drawn = torch.Generator().manual_seed(seed)
    most = torch.tensor(16_384.0 if seed < SEEDS // 2 else 2_048.0)
    counts = torch.exp(torch.rand(experts, generator=drawn) * torch.log(most)).long()
    counts = (counts + multiple - 1) // multiple * multiple
    while int(counts.sum()) > _ROWS:
        counts[int(counts.argmax())] = multiple
    return [int(count) for count in counts]


def differing(one: _Results, other: _Results, counts: Sequence[int]) -> dict[str, list[int]]:
    """The numbers of rows of the experts whose bits differ, by result."""
    found: dict[str, list[int]] = {"y": [], "dx": [], "dw": []}
    total = sum(counts)
    parts = [
        (x[:total] != y[:total]).any(1).split(list(counts))
        for x, y in zip(one[:2], other[:2], strict=True)
    ]
    for expert, count in enumerate(counts):
        for name, part in zip(("y", "dx"), parts, strict=True):
            if bool(part[expert].any()):
                found[name].append(count)
        if not torch.equal(one[2][expert], other[2][expert]):
            found["dw"].append(count)
    return found


def compared(size: tuple[int, int], layer: str, mode: str) -> Iterator[dict[str, Any]]:
    """One line for each kernel and room of a linear layer."""
    import transformer_engine.pytorch as te
    from transformer_engine.common import recipe

    hidden, ffn = size
    into, out = (hidden, 2 * ffn) if layer == "fc1" else (ffn, hidden)
    experts = 16 if into * out > _LARGE else 32
    kinds = {"tensorwise": recipe.Float8CurrentScaling, "blockwise": recipe.Float8BlockScaling}
    quantized = kinds[mode]() if mode in kinds else None
    made = te.GroupedLinear(
        experts, into, out, bias=False, params_dtype=torch.bfloat16, device="cuda"
    )
    weights = list(made.parameters())

    def by_te(rows: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
        made.use_grouped_tensor = counts.is_cuda
        with te.autocast(enabled=True, recipe=quantized) if quantized else nullcontext():
            return made(rows, counts)  # type: ignore[no-any-return]

    def by_torch(rows: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
        apply: Any = GroupedGemm.apply
        return apply(rows, counts, _SETTINGS, None, None, *weights)[0]  # type: ignore[no-any-return]

    def results(run: _Kernel, x: torch.Tensor, dy: torch.Tensor, counts: torch.Tensor) -> _Results:
        rows = x.clone().requires_grad_()
        y = run(rows, counts)
        dx, *dw = torch.autograd.grad(y, [rows, *weights], dy)
        return y.detach(), dx, dw

    kernels = {"cublas": by_te} | ({"torch": by_torch} if mode == "bf16" else {})
    found: dict[tuple[str, int], dict[str, list[int]]] = {}
    for seed in range(SEEDS):
        counts = rows_of(experts, seed, MULTIPLES[mode])
        total, on_host = sum(counts), torch.tensor(counts)
        x = torch.randn(total * max(ROOMS), into, device="cuda", dtype=torch.bfloat16)
        dy = torch.randn(total * max(ROOMS), out, device="cuda", dtype=torch.bfloat16)
        default = results(by_te, x[:total], dy[:total], on_host)
        for name, run in kernels.items():
            for room in ROOMS:
                other = results(run, x[: total * room], dy[: total * room], on_host.cuda())
                for result, rows in differing(default, other, counts).items():
                    found.setdefault((name, room), {}).setdefault(result, []).extend(rows)
    for (name, room), by_result in found.items():
        line = {"hidden": hidden, "ffn": ffn, "layer": layer, "mode": mode, "kernel": name}
        yield {**line, "room": room, **{name: sorted(set(r)) for name, r in by_result.items()}}


def main() -> None:
    """Compare all, and write a line as soon as it is known."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    with parser.parse_args().out.open("w", encoding="utf-8") as file:
        for size in SIZES:
            for layer in ("fc1", "fc2"):
                for mode in MULTIPLES:
                    for line in compared(size, layer, mode):
                        print(json.dumps(line), file=file, flush=True)


if __name__ == "__main__":
    main()
