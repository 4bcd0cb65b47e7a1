"""The settings that the configurations of a table share. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field

from megatron_cg.tools.align.presets import Preset
from megatron_cg.tools.bench.measure.windows import Windows
from megatron_cg.tools.bench.runs.shapes import default_scopes, layer_count, with_layers

DEFAULT, CUTLASS = "default", "cutlass"


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
