"""Finds the modules that the user named, and every reason why one of them cannot be graphed.

Relied on: megatron-fsdp 0.6.1 and megatron-core 0.19.2, class ``MegatronFSDP``: ``module``,
``fsdp_unit_modules``, ``ddp_config`` with ``fsdp_double_buffer`` and
``fsdp_db_use_persist_buf_on_alloc_fail``. Of TE 2.20.2's modules: ``fuse_wgrad_accumulation``.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from fnmatch import fnmatchcase
from typing import Any

from torch import nn

from megatron_cg.arguments.rules_environment import expandable_segments
from megatron_cg.arguments.schema import VARIABLES, Environment, GraphArguments, RunArguments
from megatron_cg.errors import ConfigurationError, Violation
from megatron_cg.integrations.standalone.observe import Seen, overlaps

UnitName = str | nn.Module | type[nn.Module]


def find_units(fsdp: Any, wanted: Iterable[UnitName], backend: str) -> dict[str, nn.Module]:
    """The modules below ``fsdp.module`` that ``wanted`` selects, by name.

    A string is a name as in ``named_modules()`` of the model that was passed to
    ``fully_shard_model``. In it ``*`` matches any one part between dots.

    Raises ConfigurationError with every reason why one of them cannot be captured.
    """
    names = {module: name for name, module in fsdp.module.named_modules()}
    found: dict[str, nn.Module] = {}
    broken: list[Violation] = []
    for item in wanted:
        matches = [module for module in names if _means(item, names[module], module)]
        if not matches:
            broken.append(_no_such_unit(item, names.values()))
        found.update((names[module], module) for module in matches)
    broken += _model_violations(fsdp, backend)
    for name, module in found.items():
        broken += _unit_violations(fsdp, name, module, found)
    if broken:
        raise ConfigurationError(broken)
    return found


def check_seen(found: Mapping[str, nn.Module], seen: Mapping[str, Seen]) -> None:
    """Raise ConfigurationError if the observed calls of a unit cannot be captured."""
    broken = [
        Violation(
            "unit-not-called",
            f"unit {name}",
            "it was not called with model.train() and gradients on in the step before capture",
            "take it out of units",
        )
        for name in found
        if name not in seen
    ]
    broken += [
        Violation(
            "unit-arguments",
            f"unit {name}: {problem}",
            "a graph takes tensors; other arguments must be None, numbers, strings or dtypes",
            "pass the tensors themselves, the first by position, or take the unit out of units",
        )
        for name, call in seen.items()
        for problem in [*call.form.problems(), *_overlapping(call)]
    ]
    if len({call.autocast for call in seen.values()}) > 1:
        dtypes = ", ".join(f"{name} {call.autocast or 'off'}" for name, call in seen.items())
        broken.append(
            Violation(
                "unit-autocast",
                f"units run under different torch.autocast: {dtypes}",
                "all units are captured together, under one",
                "put the whole forward pass under one autocast, or leave some units out",
            )
        )
    if broken:
        raise ConfigurationError(broken)


def _means(item: UnitName, name: str, module: nn.Module) -> bool:
    if isinstance(item, str):
        parts, pattern = name.split("."), item.split(".")
        return len(parts) == len(pattern) and all(map(fnmatchcase, parts, pattern))
    return module is item if isinstance(item, nn.Module) else isinstance(module, item)


def _no_such_unit(item: UnitName, names: Iterable[str]) -> Violation:
    known = [name for name in names if name]
    shown = ", ".join(known[:8]) + (f" and {len(known) - 8} more" if len(known) > 8 else "")
    label = item if isinstance(item, str) else getattr(item, "__name__", type(item).__name__)
    return Violation(
        "no-such-unit",
        f"units names {label}",
        f"the model has no such module; it has {shown}",
        "give names as in model.module.named_modules(), the modules themselves, or their class",
    )


def _model_violations(fsdp: Any, backend: str) -> Iterator[Violation]:
    for name, reason in (
        ("fsdp_double_buffer", "unsharded parameters are allocated anew in each step, and move"),
        (
            "fsdp_db_use_persist_buf_on_alloc_fail",
            "a unit that does not fit the double buffers falls back to a buffer that moves",
        ),
    ):
        if not getattr(fsdp.ddp_config, name):
            yield Violation(
                name.replace("_", "-"),
                f"fully_shard_model was called without {name}=True",
                f"{reason}, and a replayed graph reads memory that was freed",
                f"fully_shard_model(..., {name}=True)",
            )
    variables = {name: os.environ[name] for name in VARIABLES if name in os.environ}
    environment = Environment(variables=variables, backend=backend)
    yield from expandable_segments(RunArguments(), GraphArguments(), environment)


def _unit_violations(
    fsdp: Any, name: str, module: nn.Module, found: Mapping[str, nn.Module]
) -> Iterator[Violation]:
    kinds = tuple(fsdp.fsdp_unit_modules)
    if not isinstance(module, kinds):
        yield Violation(
            "no-fsdp-unit",
            f"unit {name} is a {type(module).__name__}",
            "Megatron-FSDP gathers parameters of whole FSDP units, and this is none",
            f"fully_shard_model(..., fsdp_unit_modules=[{type(module).__name__}]), or name the "
            "FSDP unit around it",
        )
    inside = [other for other in found if other.startswith(f"{name}.")]
    inside += [
        f"{name}.{child}"
        for child, below in module.named_modules()
        if below is not module and isinstance(below, kinds)
    ]
    if inside:
        yield Violation(
            "nested-units",
            f"unit {name} contains {inside[0]}",
            "an FSDP unit inside another is gathered by the outer one, and has no graph of its own",
            "name one of the two, and give fsdp_unit_modules one of their classes",
        )
    for child, below in module.named_modules():
        if getattr(below, "fuse_wgrad_accumulation", False):
            yield Violation(
                "gradient-accumulation-fusion",
                f"{name}.{child} was made with fuse_wgrad_accumulation=True",
                "Transformer Engine then tells Megatron-FSDP in Python that a gradient is already "
                "in its buffer; a replay runs no Python",
                "fuse_wgrad_accumulation=False",
            )


def _overlapping(call: Seen) -> list[str]:
    labels = [*call.form.names, *call.kwargs]
    tensors = [*call.args, *call.kwargs.values()]
    return [
        f"argument {label} is an expanded tensor of shape {tuple(tensor.shape)}; "
        "a graph's input needs memory of its own: pass .contiguous()"
        for label, tensor in zip(labels, tensors, strict=True)
        if overlaps(tensor)
    ]
