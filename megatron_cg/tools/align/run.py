"""The two runs of a Megatron pretraining script on GPUs: their command lines and environments."""

import importlib.util
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path

from megatron_cg.arguments.schema import VERIFY_STEPS, GraphArguments, flag_of
from megatron_cg.arguments.validation import ANY_RUN
from megatron_cg.tools.align.processes import LaunchError, Run
from megatron_cg.tools.align.token_data import data_flags

EAGER, GRAPHS = "eager", "graphs"
TAPE_NOTICE = "CPU tape: a recording of ATen operations replaces the CUDA graph"
PACKAGE = Path(__file__).resolve().parents[2]

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
"""The flags of both runs, whatever the model.

The generator of ``--te-rng-tracker`` draws other numbers than the default one, so the eager run
needs the flag too.
"""

FLAGS_OF_V1 = ("--use-distributed-optimizer",)
"""Those of them that Megatron-FSDP v2 refuses."""

GRAPH_FLAGS = ("--fsdp-double-buffer", "--fsdp-db-use-persist-buf-on-alloc-fail")

DETERMINISTIC_ENVIRONMENT = {
    "NVTE_ALLOW_NONDETERMINISTIC_ALGO": "0",
    "NCCL_ALGO": "Ring",
    "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
    "MAMBA_DETERMINISTIC": "1",
    "TORCHINDUCTOR_FX_GRAPH_CACHE": "0",
    "TORCHINDUCTOR_AUTOGRAD_CACHE": "0",
}
"""Variables without which even two eager runs can differ.

The first three megatron-core 0.19.2 requires for --deterministic-mode (training/determinism.py).
The fourth is for mamba-ssm (2.3.2, utils/determinism.py): its Triton kernels choose their block
sizes at import, before --deterministic-mode is known, and otherwise by timing.

The last two are for code compiled for any number of rows, as Megatron's activation of experts.
Inductor chooses how a kernel sums from the number of rows that it is compiled with (torch 2.11,
``_persistent_reduction_configs``: 8 warps below 1,024 rows of 1,024 elements, else 1). Torch's
caches on disk do not know that number, so a later run would take the kernel of another rank.
"""

ABOUT_GRAPHS = frozenset(
    flag_of(field.name) for field in fields(GraphArguments) if field.name not in ANY_RUN
)
"""Flags of this package for the graph run alone; a run without graphs refuses them."""


@dataclass(frozen=True)
class Plan:
    """What both runs share; ``model`` and ``extra`` are Megatron's flags.

    ``extra`` comes last, because argparse uses the last of two equal flags.
    """

    script: Path
    nproc: int
    model: tuple[str, ...]
    steps: int
    scopes: tuple[str, ...] = ("attn",)
    warmup_steps: int = 3
    fsdp_version: int = 1
    bf16: bool = True
    """False means no ``--bf16``, so fp32."""
    graph_extra: tuple[str, ...] = ()
    """Flags for the graph run, most of them this package's."""
    extra: tuple[str, ...] = ()
    """Megatron's flags for both runs; ``{run}`` in them becomes ``eager`` or ``graphs``."""


def arguments(plan: Plan, *, graphs: bool, data: Sequence[str], record: Path) -> list[str]:
    words = [sys.executable, "-P", "-m", "torch.distributed.run"]
    words += ["--standalone", "--nproc-per-node", str(plan.nproc)]
    base = [flag for flag in BASE_FLAGS if plan.bf16 or flag != "--bf16"]
    if plan.fsdp_version != 1:
        base = [flag for flag in base if flag not in FLAGS_OF_V1]
        base += ["--megatron-fsdp-version", str(plan.fsdp_version)]
    words += ["-m", "megatron_cg", str(plan.script), *plan.model, *base, *data]
    words += ["--train-iters", str(plan.steps)]
    words += graph_flags(plan) if graphs else ["--cuda-graph-impl", "none"]
    extra = [word.replace("{run}", GRAPHS if graphs else EAGER) for word in plan.extra]
    return [*words, *extra, "--cg-record", str(record)]


def by_run(words: Sequence[str]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """What the user gave for the script: the words of both runs, and those of the graph run alone.

    The latter are those of :data:`ABOUT_GRAPHS`, with their values.
    """
    both: list[str] = []
    of_graphs: list[str] = []
    chosen = both
    for word in words:
        if word.startswith("--"):
            chosen = of_graphs if word.partition("=")[0] in ABOUT_GRAPHS else both
        chosen.append(word)
    return tuple(both), tuple(of_graphs)


def graph_flags(plan: Plan) -> list[str]:
    words = ["--cuda-graph-impl", "transformer_engine"]
    if plan.scopes:
        words += ["--cuda-graph-modules", *plan.scopes]
    words += ["--cuda-graph-warmup-steps", str(plan.warmup_steps)]
    words += ["--cg-verify-steps", str(VERIFY_STEPS)]
    return [*words, *(GRAPH_FLAGS if plan.fsdp_version == 1 else ()), *plan.graph_extra]


def environment(inherited: Mapping[str, str], *, root: Path, cudnn: Path | None) -> dict[str, str]:
    """The environment of one run.

    ``root`` goes on PYTHONPATH, so this package is found from any working directory. ``cudnn`` is
    torch's own cuDNN. TE opens ``libcudnn.so`` by that bare name; if it finds an older one, it
    silently falls back from fused to unfused attention. CUDA_DEVICE_MAX_CONNECTIONS is removed:
    Megatron-FSDP refuses the value 1.
    """
    env = {**inherited, **DETERMINISTIC_ENVIRONMENT, "PYTHONUNBUFFERED": "1"}
    env.pop("CUDA_DEVICE_MAX_CONNECTIONS", None)
    env["PYTHONPATH"] = ":".join(filter(None, [str(root), inherited.get("PYTHONPATH", "")]))
    if cudnn is not None:
        env.setdefault("CUDNN_HOME", str(cudnn))
    return env


def example_script() -> Path:
    """The shipped ``pretrain_gpt.py``; ``megatron_cg/examples`` is a link in a checkout."""
    script = PACKAGE / "examples" / "pretrain_gpt.py"
    if not script.is_file():
        raise LaunchError(f"there is no {script}; name a pretraining script with --script.")
    return script


def check_gpus(plan: Plan) -> None:
    if not plan.script.is_file():
        raise LaunchError(f"--script {plan.script}: there is no such file.")
    gpus = gpu_count()
    if gpus < plan.nproc:
        smaller = "a smaller --nproc, or " if gpus else ""
        raise LaunchError(
            f"--nproc {plan.nproc} needs as many GPUs, and {gpus} can be seen: give {smaller}"
            "--backend tape to compare on the CPU."
        )


def make_run(plan: Plan, data: Path, directory: Path, name: str) -> Run:
    """The run ``name``, ``eager`` or ``graphs``, in a folder of that name; not started yet."""
    directory /= name
    words = arguments(
        plan,
        graphs=name == GRAPHS,
        data=data_flags(data, directory / "cache"),
        record=directory / "record",
    )
    env = environment(os.environ, root=PACKAGE.parent, cudnn=torch_cudnn())
    return Run(name, words, env, directory)


def gpu_count() -> int:
    import torch

    return torch.cuda.device_count()


def torch_cudnn() -> Path | None:
    """The folder of torch's cuDNN, if that is a separate package."""
    try:
        spec = importlib.util.find_spec("nvidia.cudnn")
    except ModuleNotFoundError:
        return None
    places = list(spec.submodule_search_locations or []) if spec else []
    return Path(places[0]) if places else None
