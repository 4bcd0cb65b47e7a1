"""The two runs of a Megatron pretraining script on GPUs, each under torchrun."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path

from megatron_cg.tools.align import command
from megatron_cg.tools.align.compare import Outcome
from megatron_cg.tools.align.processes import (
    NO_DROPLESS,
    LaunchError,
    Options,
    Run,
    check_start,
    run_and_compare,
)
from megatron_cg.tools.align.token_data import TokenStream

_WITH_EXPERTS_IN_GRAPHS = ("--cg-grouped-gemm", "--moe-expert-capacity-factor")
PACKAGE = Path(__file__).resolve().parents[2]


def example_script() -> Path:
    """The shipped ``pretrain_gpt.py``; ``megatron_cg/examples`` is a link in a checkout."""
    script = PACKAGE / "examples" / "pretrain_gpt.py"
    if not script.is_file():
        raise LaunchError(f"there is no {script}; name a pretraining script with --script.")
    return script


def check_gpus(plan: command.Plan, options: Options) -> None:
    """Raise LaunchError, before anything is created, if runs cannot be made or compared here."""
    if not plan.script.is_file():
        raise LaunchError(f"--script {plan.script}: there is no such file.")
    gpus = gpu_count()
    if gpus < plan.nproc:
        smaller = "a smaller --nproc, or " if gpus else ""
        raise LaunchError(
            f"--nproc {plan.nproc} needs as many GPUs, and {gpus} can be seen: give {smaller}"
            "--backend tape to compare on the CPU."
        )
    flags = {word.partition("=")[0] for word in (*plan.model, *plan.extra, *plan.graph_extra)}
    if "moe" in plan.scopes and flags.isdisjoint(_WITH_EXPERTS_IN_GRAPHS):
        raise LaunchError(NO_DROPLESS)
    check_start(options, plan.nproc)


def align_on_gpus(plan: command.Plan, data: TokenStream, options: Options) -> Outcome:
    """Train eagerly, train with graphs, compare; see :func:`check_gpus`."""
    runs = [
        make_run(
            plan,
            data,
            options.directory,
            name,
            mutation=options.mutation if name == "graphs" else None,
        )
        for name in options.names
    ]
    return run_and_compare(runs, options)


def make_run(
    plan: command.Plan,
    data: TokenStream,
    directory: Path,
    name: str,
    *,
    mutation: str | None = None,
) -> Run:
    """The run ``name``, ``eager`` or ``graphs``, in a folder of that name; not started yet."""
    directory /= name
    words = command.arguments(
        plan,
        graphs=name == "graphs",
        data=data.flags(directory / "cache"),
        record=directory / "record",
    )
    env = command.environment(
        os.environ, root=PACKAGE.parent, cudnn=torch_cudnn(), mutation=mutation
    )
    return Run(name, words, env, directory)


def gpu_count() -> int:
    """The number of GPUs visible to this process."""
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
