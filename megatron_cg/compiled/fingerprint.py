"""What an artifact was made for, derived from the configuration's own fields.

A fingerprint is a flat mapping of names to texts: versions, the device, numerics flags, every field
of the region's configuration, shapes and dtypes of all tensors, sizes of all groups. A field that
Megatron adds in a release becomes part of it without a change here. Rank numbers, addresses and
names of groups are not in it, so it is the same on all ranks.
"""

from __future__ import annotations

import dataclasses
import enum
import platform
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from megatron_cg.compiled.region import Region
from megatron_cg.upstream.symbols import installed_version
from megatron_cg.version import __version__

PACKAGES = ("megatron-core", "megatron-fsdp")
"""Not transformer-engine: its modules cannot be traced, so no artifact holds code of it, and the
machine that compiles may lack it."""

Capability = tuple[int, int] | None
"""The compute capability of the GPUs; None for the CPU."""

_NUMERICS: Mapping[str, Callable[[], object]] = {
    "deterministic": torch.are_deterministic_algorithms_enabled,
    "matmul precision": torch.get_float32_matmul_precision,
    "cuDNN TF32": lambda: torch.backends.cudnn.allow_tf32,
    "cuDNN deterministic": lambda: torch.backends.cudnn.deterministic,
    "BF16 reduced-precision reduction": lambda: (
        torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction
    ),
    "FP16 reduced-precision reduction": lambda: (
        torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction
    ),
    "default dtype": torch.get_default_dtype,
    "flash attention": torch.backends.cuda.flash_sdp_enabled,
    "memory-efficient attention": torch.backends.cuda.mem_efficient_sdp_enabled,
    "math attention": torch.backends.cuda.math_sdp_enabled,
    "cuDNN attention": torch.backends.cuda.cudnn_sdp_enabled,
}
"""Settings of the process that change the bits of a result, or which kernel is traced."""


def fingerprint(region: Region, capability: Capability) -> dict[str, str]:
    """The fingerprint of a region, as it is in this process.

    Args:
        region: the region, on the meta device or on a rank.
        capability: of the GPUs that the code is for, or None for the CPU.
    """
    found = {
        "version.python": ".".join(platform.python_version_tuple()[:2]),
        "version.megatron_cg": __version__,
        "version.torch": torch.__version__,  # With the suffix of its build, as torch compares it.
        "device": "cpu" if capability is None else "cuda {}.{}".format(*capability),
        "module": _named(type(region.module)),
        "module.training": str(region.module.training),
    }
    found |= {"numerics.autocast": autocast_of("cpu" if capability is None else "cuda")}
    found |= {f"version.{name}": installed_version(name) or "none" for name in PACKAGES}
    found |= {f"numerics.{name}": str(read()) for name, read in _NUMERICS.items()}
    found |= {f"group.{role}": str(group.size()) for role, group in region.groups.items()}
    found |= dict(_fields("config", region.config))
    found |= {name: tensor_kind(value) for name, value in region.tensors()}
    found |= {
        name: _value(value)
        for name, value in region.arguments()
        if not isinstance(value, torch.Tensor)
    }
    return dict(sorted(found.items()))


def differences(saved: Mapping[str, str], found: Mapping[str, str]) -> list[str]:
    """Each entry that differs, in words; empty if the fingerprints are equal."""
    return [
        f"{name} was {saved.get(name, 'absent')} and is {found.get(name, 'absent')}"
        for name in sorted({*saved, *found})
        if saved.get(name) != found.get(name)
    ]


def short(lines: Sequence[str], limit: int = 5) -> str:
    """The first lines, and how many more there are."""
    more = f"; and {len(lines) - limit} more" if len(lines) > limit else ""
    return "; ".join(lines[:limit]) + more


def capability_of(device: torch.device) -> Capability:
    """The compute capability of a CUDA device; None for another device."""
    return torch.cuda.get_device_capability(device) if device.type == "cuda" else None


def autocast_of(device_type: str) -> str:
    """The autocast of a kind of device, which is part of what is traced."""
    enabled = torch.is_autocast_enabled(device_type)
    return str(torch.get_autocast_dtype(device_type)) if enabled else "off"


def tensor_kind(tensor: torch.Tensor) -> str:
    """What must be equal of an argument in each call: shape, strides, dtype, autograd."""
    grad = ", requires_grad" if tensor.requires_grad else ""
    return f"{tensor.dtype} {tuple(tensor.shape)} strides {tensor.stride()}{grad}"


def _fields(name: str, value: Any) -> Iterator[tuple[str, str]]:
    """Each field of a configuration, and of those inside it."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        inside = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    elif isinstance(value, Mapping):
        inside = {str(key): item for key, item in value.items()}
    else:
        yield name, _value(value)
        return
    for key, item in inside.items():
        yield from _fields(f"{name}.{key}", item)


def _value(value: Any) -> str:
    if isinstance(value, enum.Enum | bool | int | float | str | None | torch.dtype):
        return str(value)
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_value, value))}]"
    if isinstance(value, set | frozenset):
        return f"[{', '.join(sorted(map(_value, value)))}]"
    return _named(getattr(value, "func", value))


def _named(value: Any) -> str:
    """A function or class by its name, another object by its class: never an address."""
    named = value if hasattr(value, "__qualname__") else type(value)
    return f"{named.__module__}.{named.__qualname__}"
