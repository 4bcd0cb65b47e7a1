"""The measured models: a preset, enlarged for scaling runs. Pure."""

from __future__ import annotations

import re
from dataclasses import replace

from megatron_cg.tools.align.presets import Flag, Preset
from megatron_cg.tools.bench import BenchError

SHAPES = ("qwen3-moe", "deepseek-v3", "llama", "mamba-hybrid")
_FREQUENCY = re.compile(r"^\(\[0\]\*(\d+)\+\[1\]\*(\d+)\)$")
_PATTERN = "hybrid-layer-pattern"


def is_moe(preset: Preset) -> bool:
    """Whether the preset has experts."""
    return "num-experts" in preset.flags


def is_hybrid(preset: Preset) -> bool:
    """Whether the preset has Mamba layers, which need the package mamba-ssm."""
    return _PATTERN in preset.flags


def default_scopes(preset: Preset) -> tuple[str, ...]:
    """All scopes of the preset's layers that partial graphs can capture."""
    if is_hybrid(preset):
        return ("mamba", "attn")
    return ("attn", "moe_router", "moe_preprocess") if is_moe(preset) else ("attn", "mlp")


def layer_count(preset: Preset) -> int:
    """The number of layers; for a hybrid model, the letters of its pattern."""
    if is_hybrid(preset):
        return len(str(preset.flags[_PATTERN]))
    return int(str(preset.flags["num-layers"]))


def with_layers(preset: Preset, layers: int) -> Preset:
    """The preset with that many layers of the same kinds.

    A hybrid's pattern is repeated and cut at its beginning, because its end contains all kinds of
    layers. The number of dense layers at the beginning of an MoE model stays the same. Raises
    BenchError if the preset's layers follow another rule.
    """
    flags: dict[str, Flag] = dict(preset.flags)
    if is_hybrid(preset):
        pattern = str(flags[_PATTERN])
        flags[_PATTERN] = (pattern * -(-layers // len(pattern)))[-layers:]
        return replace(preset, flags=flags)
    flags["num-layers"] = layers
    frequency = flags.get("moe-layer-freq")
    if frequency is not None:
        found = _FREQUENCY.match(str(frequency))
        if found is None or layers <= int(found[1]):
            raise BenchError(
                f"preset {preset.name} cannot have {layers} layers: its moe-layer-freq is "
                f"{frequency!r}, and only ([0]*N+[1]*M) with N below the number of layers is known."
            )
        dense = int(found[1])
        flags["moe-layer-freq"] = f"([0]*{dense}+[1]*{layers - dense})"
    return replace(preset, flags=flags)
