"""The command lines and environments of an eager run and of a run with graphs. Pure."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

BASE_FLAGS = (
    *("--use-megatron-fsdp", "--data-parallel-sharding-strategy", "optim_grads_params"),
    *("--ckpt-format", "fsdp_dtensor", "--use-distributed-optimizer"),
    *("--overlap-grad-reduce", "--overlap-param-gather", "--no-gradient-accumulation-fusion"),
    *("--transformer-impl", "transformer_engine", "--bf16", "--no-rope-fusion"),
    *("--lr", "1e-4", "--min-lr", "1e-5", "--lr-decay-style", "constant", "--clip-grad", "1.0"),
    *("--eval-iters", "0", "--eval-interval", "1000", "--log-interval", "1", "--seed", "1234"),
    "--no-create-attention-mask-in-dataloader",
    *("--te-rng-tracker", "--deterministic-mode"),
)
"""What both runs have in common, whatever the model.

The generator of ``--te-rng-tracker`` draws other numbers than the default one, so the eager run
needs it as well.
"""

GRAPH_FLAGS = ("--fsdp-double-buffer", "--fsdp-db-use-persist-buf-on-alloc-fail")

DETERMINISTIC_ENVIRONMENT = {
    "NVTE_ALLOW_NONDETERMINISTIC_ALGO": "0",
    "NCCL_ALGO": "Ring",
    "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
    "MAMBA_DETERMINISTIC": "1",
}
"""What megatron-core 0.19.2 asks for with --deterministic-mode (training/determinism.py).

And mamba-ssm (2.3.2, utils/determinism.py): its Triton kernels choose their block sizes when they
are imported, before --deterministic-mode is known, and otherwise by timing, so that even two eager
runs can differ.
"""

MUTATION_VARIABLE = "MEGATRON_CG_MUTATE"


@dataclass(frozen=True)
class Plan:
    """What both runs share; ``model`` and ``extra`` are Megatron's flags.

    ``extra`` comes last, and of two equal flags argparse takes the last.
    """

    script: Path
    nproc: int
    model: tuple[str, ...]
    steps: int
    scopes: tuple[str, ...] = ("attn",)
    warmup_steps: int = 3
    bf16: bool = True
    """False: without ``--bf16``, so in fp32."""
    graph_extra: tuple[str, ...] = ()
    """This package's flags for the graph run."""
    extra: tuple[str, ...] = ()
    """Megatron's flags for both runs, ``{run}`` in them replaced by ``eager`` or ``graphs``."""


def arguments(plan: Plan, *, graphs: bool, data: Sequence[str], record: Path) -> list[str]:
    """The whole command line of one run."""
    words = [sys.executable, "-m", "torch.distributed.run"]
    # A rendezvous of its own on a port that it holds from the start: runs side by side never meet.
    words += ["--standalone", "--nproc-per-node", str(plan.nproc)]
    base = [flag for flag in BASE_FLAGS if plan.bf16 or flag != "--bf16"]
    words += ["-m", "megatron_cg", str(plan.script), *plan.model, *base, *data]
    words += ["--train-iters", str(plan.steps)]
    words += graph_flags(plan) if graphs else ["--cuda-graph-impl", "none"]
    name = "graphs" if graphs else "eager"
    extra = [word.replace("{run}", name) for word in plan.extra]
    return [*words, *extra, "--cg-record", str(record)]


def graph_flags(plan: Plan) -> list[str]:
    """Megatron's own flags that turn partial graphs on; no scope is the whole layer."""
    words = ["--cuda-graph-impl", "transformer_engine"]
    if plan.scopes:
        words += ["--cuda-graph-modules", *plan.scopes]
    words += ["--cuda-graph-warmup-steps", str(plan.warmup_steps), *GRAPH_FLAGS]
    return [*words, *plan.graph_extra]


def environment(
    inherited: Mapping[str, str],
    *,
    root: Path,
    cudnn: Path | None,
    mutation: str | None = None,
    devices: str | None = None,
) -> dict[str, str]:
    """The environment of one run.

    ``root`` goes on PYTHONPATH, so that this package is found from wherever the run is started.
    ``cudnn`` is torch's own cuDNN: TE opens ``libcudnn.so`` by that bare name and, where an older
    one is installed, falls back from fused to unfused attention without a word.
    CUDA_DEVICE_MAX_CONNECTIONS is dropped: Megatron-FSDP refuses the value 1.
    """
    env = {**inherited, **DETERMINISTIC_ENVIRONMENT, "PYTHONUNBUFFERED": "1"}
    env.pop("CUDA_DEVICE_MAX_CONNECTIONS", None)
    env.pop(MUTATION_VARIABLE, None)
    env["PYTHONPATH"] = ":".join(filter(None, [str(root), inherited.get("PYTHONPATH", "")]))
    if cudnn is not None:
        env.setdefault("CUDNN_HOME", str(cudnn))
    if mutation is not None:
        env[MUTATION_VARIABLE] = mutation
    if devices is not None:
        env["CUDA_VISIBLE_DEVICES"] = devices
    return env
