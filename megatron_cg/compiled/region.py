"""What is compiled: a module with its arguments, its process groups and its configuration."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._pytree import tree_leaves

from megatron_cg.errors import PrecompileError


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
            found = ", ".join(sorted(map(str, devices))) or "no tensors"
            raise PrecompileError(
                f"{type(self.module).__name__} has its tensors on {found}: move the module and its "
                "arguments to one device"
            )
        return devices.pop()

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Parameters, buffers and tensors among the arguments, with their names."""
        for name, parameter in self.module.named_parameters():
            yield f"parameter.{name}", parameter
        for name, buffer in self.module.named_buffers():
            yield f"buffer.{name}", buffer
        for name, value in self.arguments():
            if isinstance(value, torch.Tensor):
                yield name, value

    def arguments(self) -> list[tuple[str, Any]]:
        """All leaves of the arguments, with names that say where they stand."""
        by_place = [(f"argument.{place}", value) for place, value in enumerate(self.args)]
        by_name = [(f"argument.{name}", value) for name, value in sorted(self.kwargs.items())]
        return [
            (f"{name}.{index}" if index else name, leaf)
            for name, value in (*by_place, *by_name)
            for index, leaf in enumerate(tree_leaves(value, is_leaf=lambda one: one is None))
        ]


Build = Callable[[], Region]
"""Builds the region of the rank that the default process group says, on the meta device."""
