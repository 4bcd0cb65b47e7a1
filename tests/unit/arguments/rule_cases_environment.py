"""Cases of the rules of backends and of the environment."""

from __future__ import annotations

from typing import Any

from tests.unit.arguments.rule_case import Case

NATIVE: dict[str, Any] = {"cg_backend": "native"}
BACKEND = (
    *(
        Case(
            "native-backend-fp8",
            {name: value},
            f"--{name}-format {value} with --cg-backend native",
            "do not update the scales",
            "--cg-backend te",
            graph=NATIVE,
        )
        for name, value in (("fp8", "hybrid"), ("fp4", "e2m1"))
    ),
    Case(
        "expandable-segments",
        {},
        "PYTORCH_ALLOC_CONF=expandable_segments:True",
        "illegal memory access",
        "export NCCL_GRAPH_REGISTER=0",
        graph=NATIVE,
        variables={"PYTORCH_ALLOC_CONF": "expandable_segments:True"},
    ),
)

ENVIRONMENT = (
    Case(
        "transformer-engine-version",
        {},
        "transformer-engine 2.18.0",
        "capture_time_hooks",
        "'transformer-engine[pytorch]>=2.19'",
        versions={"transformer-engine": "2.18.0"},
    ),
    Case(
        "transformer-engine-version",
        {},
        "not installed",
        "2.19 or newer",
        "'transformer-engine[pytorch]>=2.19'",
        versions={"transformer-engine": None},
    ),
    Case(
        "megatron-core-version",
        {},
        "megatron-core 0.18.2",
        "parameters move",
        "'megatron-core>=0.19'",
        versions={"megatron-core": "0.18.2"},
    ),
    Case(
        "expandable-segments",
        {},
        "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True",
        "illegal memory access",
        "export NCCL_GRAPH_REGISTER=0",
        variables={"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"},
    ),
    Case(
        "expandable-segments",
        {},
        "PYTORCH_ALLOC_CONF=",
        "illegal memory access",
        "out of PYTORCH_ALLOC_CONF",
        variables={
            "PYTORCH_ALLOC_CONF": "max_split_size_mb:64,expandable_segments: True",
            "NCCL_GRAPH_REGISTER": "1",
        },
    ),
    Case(
        "max-connections",
        {},
        "CUDA_DEVICE_MAX_CONNECTIONS=1",
        "one hardware queue",
        "unset CUDA_DEVICE_MAX_CONNECTIONS",
        variables={"CUDA_DEVICE_MAX_CONNECTIONS": "1"},
    ),
)
