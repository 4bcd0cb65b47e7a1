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

COMPILED: dict[str, Any] = {
    "cuda_graph_modules": (),
    "num_experts": None,
    "attention_dropout": 0.0,
    "hidden_dropout": 0.0,
    "transformer_impl": "local",
    "fused_operations": (),
}
"""A run whose layers may run code that was compiled elsewhere."""
_DIR = {"cg_backend": "native", "cg_precompile_dir": "compiled"}
PRECOMPILE = (
    Case(
        "pack-sequences-compiled",
        COMPILED,
        "--cg-pack-sequences with --cg-precompile-dir",
        "compiled for whole sequences",
        "drop --cg-precompile-dir",
        graph={**_DIR, "cg_pack_sequences": 8},
    ),
    *(
        Case(rule, {**COMPILED, **change}, found, reason, remedy, graph=_DIR)
        for rule, change, found, reason, remedy in (
            (
                "precompile-local",
                {"transformer_impl": "transformer_engine"},
                "--transformer-impl transformer_engine",
                "forbid that their code is traced",
                "type --transformer-impl local",
            ),
            (
                "precompile-whole-layers",
                {"cuda_graph_modules": ("attn", "mlp")},
                "--cuda-graph-modules with",
                "the code of a whole layer",
                "drop --cuda-graph-modules",
            ),
            (
                "precompile-dense",
                {
                    "num_experts": 8,
                    "moe_expert_capacity_factor": 1.0,
                    "moe_pad_expert_input_to_capacity": True,
                },
                "--num-experts 8",
                "read their numbers of tokens on the host",
                "in your own loop",
            ),
            (
                "precompile-one-kind",
                {"mtp_num_layers": 1},
                "several kinds",
                "the code of all layers",
                "drop --cg-precompile-dir",
            ),
            (
                "precompile-dropout",
                {"hidden_dropout": 0.1},
                "--attention-dropout 0.0 --hidden-dropout 0.1",
                "random states are not part",
                "type --attention-dropout 0 --hidden-dropout 0",
            ),
            (
                "precompile-recompute",
                {"recompute_granularity": "selective"},
                "--recompute-granularity selective",
                "keep random states",
                "--recompute-granularity full",
            ),
            (
                "precompile-meta-weights",
                {"init_model_with_meta_device": True},
                "--init-model-with-meta-device with",
                "have no values yet",
                "drop --init-model-with-meta-device",
            ),
            (
                "precompile-fusions",
                {"fused_operations": ("--no-rope-fusion",)},
                "without --no-rope-fusion",
                "round elsewhere",
                "add --no-rope-fusion to this run",
            ),
        )
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
