"""Plans the runs of an invocation, and their order. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from megatron_cg.nearest import did_you_mean
from megatron_cg.tools.align.presets import Preset
from megatron_cg.tools.bench import BenchError
from megatron_cg.tools.bench.runs.commands import CUTLASS, DEFAULT, Settings
from megatron_cg.tools.bench.runs.configurations import (
    CONFIGURATIONS,
    EAGER,
    GRAPHS,
    KNOWN,
)
from megatron_cg.tools.bench.runs.shapes import is_moe
from megatron_cg.tools.bench.runs.store import slug

DIMENSIONS = ("layers", "microbatches", "nproc")
"""What a scaling run can vary; settings and keys have these names."""
START_SECONDS = 25.0
"""Estimated seconds before the first step: imports, process groups, data, kernels."""
_LAYER_SECONDS = {True: 0.05, False: 0.015}
"""Estimated share of one layer in an eager step with two microbatches: MoE, or dense."""
_TRACE_SECONDS = 9.0
"""Seconds to write and read both traces: with host events, and the smaller device-only one."""
_SYMBOLS_SECONDS = 120.0
"""Seconds before the first sample of a sampling profile with native frames."""


@dataclass(frozen=True)
class PlannedRun:
    """One run: a configuration at one point."""

    settings: Settings
    configuration: str
    dimension: str | None = None
    """The dimension that a scaling run varies."""
    round: int = 1
    """The number of the round of this table, from 1."""

    @property
    def key(self) -> dict[str, Any]:
        """Identifies this run; a later run with the same key replaces it."""
        settings = self.settings
        return {
            "shape": settings.preset.name,
            "contender": self.configuration,
            "grouped_gemm": settings.grouped_gemm,
            "nproc": settings.nproc,
            "microbatches": settings.microbatches,
            "layers": settings.layer_count,
            "dimension": self.dimension,
            "round": self.round,
        }

    @property
    def name(self) -> str:
        """The key as a file's name."""
        return slug(self.key)

    def seconds(self) -> float:
        """The estimated run time."""
        settings, windows = self.settings, self.settings.windows
        layers = settings.layer_count
        step = layers * _LAYER_SECONDS[is_moe(settings.preset)] * settings.microbatches / 2
        whole = START_SECONDS + layers * 0.5 + windows.steps * step
        whole += _SYMBOLS_SECONDS if windows.sampled and windows.native else 0.0
        return whole + (_TRACE_SECONDS if windows.profiled else 0.0)


def schedule(
    base: Iterable[Settings],
    choice: str,
    only: Sequence[str] | None,
    scale: tuple[str, Sequence[int]] | None = None,
    rounds: int = 1,
) -> list[PlannedRun]:
    """The runs, ordered by table and round.

    Every other round is in reverse order. Then a steady drift over time affects the first and the
    last configuration equally.

    Args:
        base: one for each shape.
        choice: ``default``, ``cutlass`` or ``both``.
        only: the configurations; all if None, and two for a scaling run.
        scale: the dimension of a scaling run, and its values.
        rounds: how often each configuration is run; all but the first run are only timed.

    Raises BenchError if no run is left.
    """
    sizes: list[dict[str, Any]] = [{}]
    if scale:
        sizes = [{scale[0]: value} for value in scale[1]]
    runs = []
    for settings in base:
        names = configurations_for(settings.preset, only, scaling=scale is not None)
        for gemm in _grouped_gemms(settings.preset, choice):
            for size in sizes:
                point = replace(settings, grouped_gemm=gemm, **size)
                runs += _table(point, names, scale[0] if scale else None, rounds)
    if not runs:
        raise BenchError("no configuration is left for these shapes: give others with --only.")
    return runs


def _table(
    point: Settings, names: Sequence[str], dimension: str | None, rounds: int
) -> list[PlannedRun]:
    only_timed = replace(point, windows=point.windows.only_timed())
    return [
        PlannedRun(point if number == 1 else only_timed, name, dimension, number)
        for number in range(1, rounds + 1)
        for name in (names if number % 2 else reversed(names))
    ]


def _grouped_gemms(preset: Preset, choice: str) -> list[str]:
    """The grouped-GEMM choices to run; a model without experts has none."""
    if not is_moe(preset):
        return [DEFAULT]
    return [DEFAULT, CUTLASS] if choice == "both" else [choice]


def configurations_for(preset: Preset, only: Sequence[str] | None, *, scaling: bool) -> list[str]:
    """The configurations of one shape, in the order of ``KNOWN``.

    Raises BenchError for an unknown name.
    """
    unknown = [name for name in only or () if name not in KNOWN]
    if unknown:
        raise BenchError(
            f"--only {','.join(unknown)}: there is no such configuration"
            f"{did_you_mean(unknown[0], KNOWN)}; there are "
            f"{', '.join(CONFIGURATIONS)}."
        )
    wanted = only or ([EAGER, GRAPHS] if scaling else list(CONFIGURATIONS))
    return [name for name, one in KNOWN.items() if name in wanted and one.suits(moe=is_moe(preset))]


def parse_scale(text: str) -> tuple[str, list[int]]:
    """The dimension and the values of ``layers=4,8,16``. Raises BenchError for anything else."""
    name, _, listed = text.partition("=")
    values = listed.split(",")
    if name not in DIMENSIONS or not all(v.isdecimal() and int(v) > 0 for v in values):
        raise BenchError(
            f"--scale {text}: write {', '.join(DIMENSIONS)} with whole numbers above 0, as in "
            "--scale layers=4,8,16."
        )
    return name, [int(value) for value in values]
