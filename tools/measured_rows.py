"""Write what ``megatron-cg plan`` compares a model with, from the results in ``benchmarks``.

``python -m tools.measured_rows`` writes ``megatron_cg/tools/plan/measured_rows.json``. For each
shape and grouped GEMM it has the newest of the results with most rounds in which Megatron-FSDP was
run side by side eagerly and with graphs, with the same cuBLASLt cache on both sides if there are
such results. With torch's grouped GEMM, graphs hold whole MoE layers.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from megatron_cg.files import write_text
from megatron_cg.tools.align.presets import load_preset
from megatron_cg.tools.bench.results.metrics import Row, tables
from megatron_cg.tools.bench.runs.bench_machine import described
from megatron_cg.tools.bench.runs.configurations import (
    EAGER,
    EXPERTS,
    GRAPHS,
    KNOWN,
    TORCH_EAGER,
)
from megatron_cg.tools.bench.runs.shapes import is_hybrid, is_moe
from megatron_cg.tools.bench.runs.store import OK, Result, read
from megatron_cg.tools.plan.process import make_plans
from megatron_cg.tools.plan.request import read_request
from megatron_cg.tools.plan.worth import ROWS

RESULTS = Path(__file__).parents[1] / "benchmarks" / "results"
_CACHE = "CUBLASLT_HEURISTICS_CACHE_CAPACITY"


def rows(folder: Path = RESULTS) -> list[dict[str, Any]]:
    """The measured rows, without the work of a layer, which only a plan can tell."""
    found: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for path in sorted(folder.glob("*/bench.json")):
        for table in tables(read(path)):
            by_name = {row.name: row for row in table}
            for sides in ((GRAPHS, EAGER), (EXPERTS, TORCH_EAGER)):
                made = _row(path.parent.name, *map(by_name.get, sides))
                if made is not None:
                    found.setdefault((made["shape"], made["grouped_gemm"]), []).append(made)
    return [max(found[key], key=_order) for key in sorted(found)]


def _order(row: Mapping[str, Any]) -> tuple[bool, int, str, int]:
    number = row["results"].rpartition("-")[2]
    return row["same_cache"], row["rounds"], row["began"], int(number)


def _row(results: str, graphs: Row | None, eager: Row | None) -> dict[str, Any] | None:
    ratio = graphs.step_ratio(eager) if graphs and eager else None
    if graphs is None or eager is None or ratio is None or not ratio.side_by_side:
        return None
    result = graphs.result
    key, preset = result["key"], load_preset(result["key"]["shape"])
    if key["dimension"] or any(r["status"] != OK for r in (result, eager.result)):
        return None
    moe, ran = is_moe(preset), KNOWN[key["contender"]]
    grouped_gemm = "torch" if ran.torch_gemm else key["grouped_gemm"]
    step = eager.metrics["step"]
    assert step is not None
    return {
        "results": results,
        "began": str(result["began"])[:10],
        "shape": key["shape"],
        "kind": "hybrid" if is_hybrid(preset) else "MoE" if moe else "dense",
        "dtype": "BF16",
        "grouped_gemm": grouped_gemm,
        "gpus": described(result["machine"] | {"driver": None}),
        "layers": key["layers"],
        "microbatches": key["microbatches"],
        "scopes": list(ran.captured(result["settings"]["scopes"])),
        "eager_ms": round(step, 1),
        "ratio": round(ratio.median, 4),
        "least": round(ratio.least, 4),
        "most": round(ratio.most, 4),
        "rounds": ratio.rounds,
        # Only the default grouped GEMM of experts uses the cache much.
        "same_cache": not moe
        or grouped_gemm != "default"
        or _cache(result) == _cache(eager.result) != "",
    }


def _cache(result: Result) -> str:
    """The size of cuBLASLt's cache, if it was set for the run."""
    return str((result.get("environment") or {}).get(_CACHE, ""))


def with_work(found: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The rows with the work of one layer, from a plan of each shape."""
    listed = list(found)
    shapes = sorted({str(row["shape"]) for row in listed})
    plans = make_plans([read_request(shape, []) for shape in shapes])
    work = {s: p["model"]["work_per_layer"] for s, p in zip(shapes, plans, strict=True)}
    return [{**row, "work_per_layer": work[row["shape"]]} for row in listed]


def main() -> None:
    """Write the file."""
    if not ROWS.exists():
        write_text(ROWS, "[]\n")  # A plan reads it.
    write_text(ROWS, json.dumps(with_work(rows()), indent=1) + "\n")
    print(f"written: {ROWS}")


if __name__ == "__main__":
    main()
