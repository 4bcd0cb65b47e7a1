"""Builds the command line and environment of one run. Pure."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from megatron_cg.tools.align.command import (
    BASE_FLAGS,
    DETERMINISTIC_ENVIRONMENT,
    by_run,
    environment,
)
from megatron_cg.tools.align.presets import Preset
from megatron_cg.tools.bench.measure.windows import VARIABLE, Windows
from megatron_cg.tools.bench.runs.configurations import KNOWN
from megatron_cg.tools.bench.runs.shapes import default_scopes, is_moe, layer_count, with_layers

METRICS = "metrics"
"""The folder of the ranks' metrics, inside the run's folder."""
DEFAULT, CUTLASS = "default", "cutlass"
SCRIPT = Path(__file__).resolve().parents[1] / "measure" / "measured.py"
CUTLASS_VARIABLE = "NVTE_USE_CUTLASS_GROUPED_GEMM"
"""transformer-engine 2.20.2: grouped GEMMs of experts use CUTLASS on Hopper, else cuBLAS."""
_FSDP_ONLY = frozenset(
    {
        *("--use-megatron-fsdp", "--data-parallel-sharding-strategy", "optim_grads_params"),
        *("--ckpt-format", "fsdp_dtensor"),
    }
)
"""Words of BASE_FLAGS that DDP does not use."""


@dataclass(frozen=True)
class Settings:
    """The settings shared by the configurations of a table."""

    preset: Preset
    nproc: int
    microbatches: int = 2
    layers: int | None = None
    """The preset's if None."""
    scopes: tuple[str, ...] | None = None
    """If None, all that fit the shape; an empty one means the whole layer."""
    grouped_gemm: str = DEFAULT
    windows: Windows = field(default_factory=Windows)
    check_for_nan: bool = False
    rope_fusion: bool = False
    extra: tuple[str, ...] = ()
    """Megatron's flags; they come last."""

    @property
    def model(self) -> Preset:
        """The preset with the requested number of layers."""
        return with_layers(self.preset, self.layers) if self.layers else self.preset

    @property
    def layer_count(self) -> int:
        """The number of layers."""
        return self.layers or layer_count(self.preset)

    @property
    def chosen_scopes(self) -> tuple[str, ...]:
        """The scopes that partial graphs capture."""
        return default_scopes(self.preset) if self.scopes is None else self.scopes

    def as_dict(self) -> dict[str, object]:
        """For JSON."""
        return {
            "preset": self.preset.name,
            "nproc": self.nproc,
            "microbatches": self.microbatches,
            "layers": self.layer_count,
            "scopes": list(self.chosen_scopes),
            "grouped_gemm": self.grouped_gemm,
            "check_for_nan": self.check_for_nan,
            "rope_fusion": self.rope_fusion,
            "extra": list(self.extra),
        }


def script_words(settings: Settings, configuration: str, data: Sequence[str]) -> list[str]:
    """The script's own arguments, all of them Megatron's or this package's.

    As in a production run, ``--deterministic-mode`` is not among them. The check for NaN is off by
    default: it makes DDP wait for the GPU at each bucket, but does not check Megatron-FSDP's
    sharded gradients.
    """
    one, preset = KNOWN[configuration], settings.preset
    left_out = {"--deterministic-mode"} | (set() if one.fsdp else _FSDP_ONLY)
    left_out |= {"--no-rope-fusion"} if settings.rope_fusion else set()
    words = [*settings.model.arguments(), *(word for word in BASE_FLAGS if word not in left_out)]
    # So large that no step includes the time of a log line.
    words += ["--manual-gc", "--log-interval", "1000"]
    words += [] if settings.check_for_nan else ["--no-check-for-nan-in-loss-and-grad"]
    words += [*data, "--train-iters", str(settings.windows.steps)]
    batch = int(str(preset.flags["micro-batch-size"])) * settings.microbatches * settings.nproc
    words += ["--global-batch-size", str(batch)]
    if is_moe(preset) and settings.nproc % 2 == 0:  # Pairs of GPUs share a model's experts.
        words += ["--expert-model-parallel-size", "2"]
    words += one.words(settings.chosen_scopes, settings.windows.warmup)
    both, of_graphs = by_run(settings.extra)
    return [*words, *both, *(of_graphs if one.fsdp and one.graphs == "partial" else ())]


def command(settings: Settings, configuration: str, data: Sequence[str]) -> list[str]:
    """The whole command line."""
    words = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    words += ["--nproc-per-node", str(settings.nproc), "-m", "megatron_cg", str(SCRIPT)]
    return [*words, *script_words(settings, configuration, data)]


def run_environment(
    settings: Settings,
    inherited: Mapping[str, str],
    *,
    root: Path,
    cudnn: Path | None,
    metrics: Path,
) -> dict[str, str]:
    """The environment of a run that writes its metrics to ``metrics``.

    The variables of determinism are as the user set them.
    """
    env = environment(inherited, root=root, cudnn=cudnn)
    for name in (*DETERMINISTIC_ENVIRONMENT, CUTLASS_VARIABLE):
        env.pop(name, None)
    env |= {name: inherited[name] for name in DETERMINISTIC_ENVIRONMENT.keys() & inherited.keys()}
    if settings.grouped_gemm == CUTLASS:
        env[CUTLASS_VARIABLE] = "1"
    return env | {VARIABLE: settings.windows.variable(str(metrics))}
