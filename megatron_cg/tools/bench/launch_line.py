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
    """Variables that are set before the command."""

    def words(self, *, graphs: bool) -> list[str]:
        """The command line; ``graphs`` starts the script by this package's launcher."""
        return [*self.launcher, *(_LAUNCHER if graphs else ()), self.script, *self.flags]

    def has(self, flag: str) -> bool:
        """Whether the flag is given."""
        return any(_name(word) == flag for word in self.flags)

    def value(self, flag: str) -> str:
        """The last value of a flag; empty if it has none or is not given."""
        found = ""
        for index, word in enumerate(self.flags):
            name, equals, text = word.partition("=")
            if name == flag:
                after = self.flags[index + 1 : index + 2]
                found = text if equals else next(iter(after), "")
        return found


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
    """The launch line in ``words``. Raises BenchError if it cannot be measured.

    A line without ``--use-megatron-fsdp`` is refused: the run under DDP is made from the one under
    Megatron-FSDP.
    """
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
    line = LaunchLine(
        tuple(before) or (sys.executable,), words[at], tuple(words[at + 1 :]), environment
    )
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
    """The shipped script with a preset's model, on this machine's GPUs.

    Args:
        preset: the model.
        data: what it is trained on.
        nproc: GPUs. An even number of them shares the experts in pairs.
        microbatches: of a step, each of the preset's ``micro-batch-size`` sequences.
        steps: of the run.
        extra: further flags, which come last.
    """
    launcher = (sys.executable, "-m", "torch.distributed.run", "--standalone")
    batch = int(str(preset.flags["micro-batch-size"])) * microbatches * nproc
    flags = [*preset.arguments(), *_OF_PRESETS]
    flags += data.flags(data.prefix.parent / "cache")
    flags += ["--train-iters", str(steps), "--global-batch-size", str(batch)]
    if "num-experts" in preset.flags and nproc % 2 == 0:
        flags += ["--expert-model-parallel-size", "2"]
    return LaunchLine(
        (*launcher, "--nproc-per-node", str(nproc)),
        str(example_script()),
        (*flags, *extra),
        _preset_environment(),
    )


def _preset_environment() -> dict[str, str]:
    """Variables of a preset's runs; a user's line has the user's own."""
    path = [str(PACKAGE.parent), os.environ.get("PYTHONPATH", "")]
    # Megatron-FSDP refuses 1, which many containers set; 8 is CUDA's default.
    made = {"PYTHONPATH": ":".join(filter(None, path)), "CUDA_DEVICE_MAX_CONNECTIONS": "8"}
    cudnn = torch_cudnn()
    # TE would else take the system's cuDNN, and an older one costs fused attention.
    if cudnn is not None and "CUDNN_HOME" not in os.environ:
        made["CUDNN_HOME"] = str(cudnn)
    return made
