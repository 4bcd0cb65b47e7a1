"""The two runs of a Megatron pretraining script on GPUs, each under torchrun."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path

from megatron_cg.tools.align import command
from megatron_cg.tools.align.outcome import Outcome
from megatron_cg.tools.align.processes import (
    LaunchError,
    Options,
    Run,
    check_start,
    run_and_compare,
)
from megatron_cg.tools.align.token_data import TokenStream

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
    _device_shares(plan.nproc, 1)
    check_start(options, plan.nproc)


def align_on_gpus(plan: command.Plan, data: TokenStream, options: Options) -> Outcome:
    """Train eagerly, train with graphs, compare.

    Raises LaunchError before it starts anything: there are too few GPUs, the script is missing, or
    records of an earlier run exist.
    """
    check_gpus(plan, options)
    names = options.names
    shares = _device_shares(plan.nproc, len(names) if options.parallel else 1)
    runs = [
        make_run(
            plan,
            data,
            options.directory,
            name,
            mutation=options.mutation if name == "graphs" else None,
            devices=shares[index % len(shares)],
        )
        for index, name in enumerate(names)
    ]
    return run_and_compare(runs, options)


def make_run(
    plan: command.Plan,
    data: TokenStream,
    directory: Path,
    name: str,
    *,
    mutation: str | None = None,
    devices: str | None = None,
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
        os.environ,
        root=PACKAGE.parent,
        cudnn=torch_cudnn(),
        mutation=mutation,
        devices=devices,
    )
    return Run(name, words, env, directory)


def _device_shares(nproc: int, shares: int) -> list[str | None]:
    """CUDA_VISIBLE_DEVICES for each run; all runs share the GPUs if there are too few."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    devices = visible.split(",") if visible else [str(index) for index in range(gpu_count())]
    if len(devices) < nproc:
        smaller = "a smaller --nproc, or " if devices else ""
        raise LaunchError(
            f"--nproc {nproc} needs as many GPUs, and {len(devices)} can be seen: give {smaller}"
            "--backend tape to compare on the CPU."
        )
    if shares < 2 or len(devices) < shares * nproc:
        return [visible]
    return [",".join(devices[n * nproc : (n + 1) * nproc]) for n in range(shares)]


def gpu_count() -> int:
    """The number of GPUs visible to this process."""
    import torch

    return torch.cuda.device_count()


def torch_cudnn() -> Path | None:
    """The folder of torch's cuDNN, if that is a separate package."""
    try:
        found = importlib.util.find_spec("nvidia.cudnn")
    except ModuleNotFoundError:
        return None
    places = list(found.submodule_search_locations or []) if found else []
    return Path(places[0]) if places else None
