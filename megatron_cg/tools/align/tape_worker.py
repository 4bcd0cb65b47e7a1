"""One run on the CPU: ``python -m megatron_cg.tools.align.tape_worker PLAN DIRECTORY``.

PLAN is JSON.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

# If Transformer Engine is installed, Megatron would build its layers from kernels that a CPU lacks.
# None makes its import fail (docs.python.org, "The module cache"). This line must precede any
# import of Megatron.
sys.modules["transformer_engine"] = None  # type: ignore[assignment]


def main(text: str, directory: str) -> None:
    """Train according to the plan, in processes connected by gloo; each writes its record.

    The processes are forked from this one, which imports Megatron for all of them. That saves 5 s
    of CPU time per process. An import starts no thread of torch or gloo.
    """
    import megatron_cg.tools.cpu.train  # noqa: F401
    from megatron_cg.tools.cpu import launch
    from megatron_cg.tools.cpu.training_plan import CpuModelConfig, TrainingPlan
    from megatron_cg.upstream.patch import set_attribute, undone_after

    plan: dict[str, Any] = json.loads(text)
    shape = plan["shape"]
    # Megatron refuses dropless experts in a graph, also in the config of a run without graphs.
    torch_gemm = plan.get("grouped_gemm", "te") == "torch"
    device_counts = torch_gemm and plan["graphs"]
    scopes = shape["scopes"] if device_counts or not torch_gemm else ["attn"]
    model = CpuModelConfig(
        layers=shape["layers"],
        hidden_size=shape["hidden"],
        ffn_hidden_size=shape["ffn"],
        heads=shape["heads"],
        vocabulary=shape["vocab"],
        sequence_length=shape["seq"],
        experts=shape["experts"],
        topk=shape["topk"],
        grouped=torch_gemm,
        bf16=plan.get("bf16", True),
        graph_modules=tuple(scopes),
    )
    training = TrainingPlan(
        model=model,
        steps=plan["steps"],
        warmup_steps=plan["warmup_steps"],
        graphs=plan["graphs"],
        tokens=Path(plan["tokens"]),
        device_counts=device_counts,
    )
    with undone_after(set_attribute(launch, "START", "fork")):
        launch.run_plans([(training, Path(directory))], plan["processes"])


if __name__ == "__main__":
    main(*sys.argv[1:])
