"""What is compiled, and the fingerprint of what it was compiled for.

A fingerprint is a flat mapping of names to texts: versions, the device, the mode, each field of the
region's configuration, shapes and dtypes of all tensors, sizes of all groups. Rank numbers,
addresses and names of groups are not in it, so it is the same on all ranks. Plain values that the
code read are compared by ``plain_state.py``; what neither names, the comparison with eager finds.
"""

import dataclasses
import platform
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._pytree import tree_leaves

from megatron_cg.compiled.plain_state import import_name
from megatron_cg.errors import PrecompileError
from megatron_cg.upstream.symbols import Symbol, installed_version
from megatron_cg.version import __version__

PREFIX = "mcg::"
"""Begins the name of a role in saved code: ``mcg::tp``."""

Capability = tuple[int, int] | None
"""The compute capability of the GPUs; None for the CPU."""

_GROUPS = {
    role: Symbol(f"megatron.core.parallel_state:get_{name}_group", f"the group {role}")
    for role, name in (
        ("tp", "tensor_model_parallel"),
        ("cp", "context_parallel"),
        ("ep", "expert_model_parallel"),
        ("etp", "expert_tensor_parallel"),
        ("tp-ep", "expert_tensor_and_model_parallel"),
    )
}
RELIES_ON = tuple(_GROUPS.values())

_PACKAGES = ("megatron-core", "megatron-fsdp")
"""Not transformer-engine: its modules cannot be traced, and the machine that compiles may lack
it."""


@dataclass(frozen=True)
class Region:
    """A module to be compiled, or to run compiled code.

    For ``save``, weights and tensors are on the meta device and ``groups`` are fake. For ``load``,
    they are those of the rank.
    """

    module: torch.nn.Module
    args: tuple[Any, ...]
    """Positional arguments of one call. Shapes, strides and dtypes are fixed by them."""
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    groups: Mapping[str, dist.ProcessGroup] = field(default_factory=dict)
    """The process groups of the module's collectives by role, such as ``tp`` or ``ep``."""
    config: Any = None
    """What the module was built from: a dataclass, such as Megatron's TransformerConfig, or a
    mapping. All its fields are part of the fingerprint."""

    def device(self) -> torch.device:
        """The device of all parameters, buffers and arguments.

        Raises PrecompileError if there are several, or no tensor at all.
        """
        devices = {tensor.device for _name, tensor in self.tensors()}
        if len(devices) != 1:
            names = ", ".join(sorted(map(str, devices))) or "no tensors"
            raise PrecompileError(
                f"{type(self.module).__name__} has its tensors on {names}: move the module and its "
                "arguments to one device"
            )
        return devices.pop()

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        for name, parameter in self.module.named_parameters():
            yield f"parameter.{name}", parameter
        for name, buffer in self.module.named_buffers():
            yield f"buffer.{name}", buffer
        for name, value in self.arguments():
            if isinstance(value, torch.Tensor):
                yield name, value

    def arguments(self) -> list[tuple[str, Any]]:
        """All leaves of the arguments, with names that say where they stand."""
        return [
            (f"argument.{name}.{index}" if index else f"argument.{name}", leaf)
            for name, value in (*enumerate(self.args), *sorted(self.kwargs.items()))
            for index, leaf in enumerate(tree_leaves(value, is_leaf=lambda leaf: leaf is None))
        ]


def megatron_groups() -> dict[str, dist.ProcessGroup]:
    """Megatron's groups that a layer's collectives use on this rank, for ``Region.groups``.

    Data-parallel groups are not among them, so an artifact serves runs of any data-parallel size.
    Megatron's ``initialize_model_parallel`` must have been called.
    """
    return {role: symbol.find()() for role, symbol in _GROUPS.items()}


def fingerprint(region: Region, capability: Capability) -> dict[str, str]:
    """The fingerprint of a region in this process, for GPUs of ``capability``, or None for CPUs."""
    device, kind = "cpu" if capability is None else "cuda", type(region.module)
    entries = {
        "version.python": ".".join(platform.python_version_tuple()[:2]),
        "version.megatron_cg": __version__,
        "version.torch": torch.__version__,  # With the suffix of its build, as torch compares it.
        "device": device if capability is None else "cuda {}.{}".format(*capability),
        "module": f"{import_name(kind.__module__)}.{kind.__qualname__}",
        "module.training": str(region.module.training),
        "deterministic": str(torch.are_deterministic_algorithms_enabled()),
        "default dtype": str(torch.get_default_dtype()),
    }
    entries |= {f"version.{name}": installed_version(name) or "none" for name in _PACKAGES}
    entries |= {f"group.{role}": str(group.size()) for role, group in region.groups.items()}
    fields = vars(region.config) if dataclasses.is_dataclass(region.config) else region.config
    entries |= {f"config.{name}": _text(value) for name, value in dict(fields or {}).items()}
    entries |= module_kinds(region.module) | call_kinds(region, device)
    return dict(sorted(entries.items()))


def module_kinds(module: torch.nn.Module) -> dict[str, str]:
    """What modules must have in common to run the same code."""
    return {name: _tensor_kind(value) for name, value in Region(module, ()).tensors()}


def call_kinds(region: Region, device_type: str) -> dict[str, str]:
    """What a call must have in common with the traced one."""
    enabled = torch.is_autocast_enabled(device_type)
    kinds = {"autocast": str(torch.get_autocast_dtype(device_type)) if enabled else "off"}
    for name, value in region.arguments():
        kinds[name] = _tensor_kind(value) if isinstance(value, torch.Tensor) else _text(value)
    return kinds


def differences(saved: Mapping[str, str], now: Mapping[str, str]) -> str:
    lines = [
        f"{name} was {saved.get(name, 'absent')} and is {now.get(name, 'absent')}"
        for name in sorted({*saved, *now})
        if saved.get(name) != now.get(name)
    ]
    more = [f"and {len(lines) - 5} more"] if len(lines) > 5 else []
    return "; ".join(lines[:5] + more)


def _tensor_kind(tensor: torch.Tensor) -> str:
    grad = ", requires_grad" if tensor.requires_grad else ""
    return f"{tensor.dtype} {tuple(tensor.shape)} strides {tensor.stride()}{grad}"


def _text(value: Any) -> str:
    """Without addresses and the order of sets, which differ between processes."""
    if isinstance(value, set | frozenset):
        value = sorted(value, key=repr)
    return re.sub(r" at 0x[0-9a-f]+", "", repr(value))
