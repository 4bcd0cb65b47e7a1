"""The launch line of a Megatron script: read from a command line, or made from a preset."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from megatron_cg.tools.align.command import BASE_FLAGS
from megatron_cg.tools.align.presets import Preset
from megatron_cg.tools.align.run import PACKAGE, example_script, torch_cudnn
from megatron_cg.tools.align.token_data import TokenStream
from megatron_cg.tools.bench import BenchError

_ASSIGNMENT = re.compile(r"([A-Za-z_][A-Za-z0-9_]*)=(.*)", re.DOTALL)
_LAUNCHER = ("-m", "megatron_cg")
_OF_PRESETS = (
    *(flag for flag in BASE_FLAGS if flag != "--deterministic-mode"),
    "--manual-gc",
    # The check makes DDP wait for the GPU at every bucket, and does not look at sharded gradients.
    "--no-check-for-nan-in-loss-and-grad",
)


@dataclass(frozen=True)
class LaunchLine:
    """``VARIABLE=value ... launcher ... script.py --flags``, without ``-m megatron_cg``."""

    launcher: tuple[str, ...]
    """The words before the script, such as ``torchrun --nproc-per-node 8``."""
    script: str
    flags: tuple[str, ...]
    environment: Mapping[str, str] = field(default_factory=dict)

    def words(self, *, graphs: bool) -> list[str]:
        """The command line; ``graphs`` starts the script by this package's launcher."""
        return [*self.launcher, *(_LAUNCHER if graphs else ()), self.script, *self.flags]

    def has(self, flag: str) -> bool:
        """Whether the flag is given."""
        return any(_name(word) == flag for word in self.flags)

    def value(self, flag: str) -> str:
        """The last values of a flag; empty if it has none or is not given."""
        words, _ = split_flags(self.flags, flag.__eq__)
        return " ".join(words).rpartition(flag)[2].replace("=", " ").strip()


def split_flags(
    flags: Sequence[str], wanted: Callable[[str], bool]
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The flags whose name is wanted, with their values, and all other words."""
    kept: list[str] = []
    rest: list[str] = []
    chosen = rest
    for word in flags:
        if word.startswith("--"):
            chosen = kept if wanted(_name(word)) else rest
        chosen.append(word)
    return tuple(kept), tuple(rest)


def _name(word: str) -> str:
    return word.partition("=")[0]


def read_line(words: Sequence[str]) -> LaunchLine:
    """The launch line in ``words``. Raises BenchError if it is none, or without Megatron-FSDP."""
    at = next((index for index, word in enumerate(words) if word.endswith(".py")), None)
    if at is None:
        raise BenchError(
            "after -- no word ends with .py: give the whole launch line of a Megatron script, "
            "torchrun ... pretrain_gpt.py ..., or --preset NAME."
        )
    before = list(words[:at])
    environment = {}
    while before and (before[0] == "env" or _ASSIGNMENT.fullmatch(before[0])):
        if assignment := _ASSIGNMENT.fullmatch(before.pop(0)):
            environment[assignment[1]] = assignment[2]
    if tuple(before[-2:]) == _LAUNCHER:
        del before[-2:]
    launcher = tuple(before) or (sys.executable,)
    line = LaunchLine(launcher, words[at], tuple(words[at + 1 :]), environment)
    if not line.has("--use-megatron-fsdp"):
        raise BenchError(
            "the line has no --use-megatron-fsdp, under which this package makes graphs: add "
            "--use-megatron-fsdp --data-parallel-sharding-strategy optim_grads_params "
            "--ckpt-format fsdp_dtensor. The run under DDP is made from it."
        )
    return line


def preset_line(
    preset: Preset,
    data: TokenStream,
    *,
    nproc: int,
    microbatches: int,
    steps: int,
    extra: Sequence[str] = (),
) -> LaunchLine:
    """The shipped script with a preset's model and ``extra`` flags, on this machine's GPUs.

    An even number of GPUs shares the experts in pairs.
    """
    launcher: tuple[str, ...] = (sys.executable, "-m", "torch.distributed.run", "--standalone")
    batch = int(str(preset.flags["micro-batch-size"])) * microbatches * nproc
    flags = [*preset.arguments(), *_OF_PRESETS]
    flags += data.flags(data.prefix.parent / "cache")
    flags += ["--train-iters", str(steps), "--global-batch-size", str(batch)]
    if "num-experts" in preset.flags and nproc % 2 == 0:
        flags += ["--expert-model-parallel-size", "2"]
    path = [str(PACKAGE.parent), os.environ.get("PYTHONPATH", "")]
    # Megatron-FSDP refuses 1, which many containers set; 8 is CUDA's default.
    env = {"PYTHONPATH": ":".join(filter(None, path)), "CUDA_DEVICE_MAX_CONNECTIONS": "8"}
    # TE would else take the system's cuDNN, and an older one costs fused attention.
    if (cudnn := torch_cudnn()) is not None:
        env["CUDNN_HOME"] = os.environ.get("CUDNN_HOME", str(cudnn))
    launcher = (*launcher, "--nproc-per-node", str(nproc))
    return LaunchLine(launcher, str(example_script()), (*flags, *extra), env)
