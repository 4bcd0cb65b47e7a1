"""The extensions: which folders are optional, and the few places where one plugs into the core.

The core imports no extension. It asks here for what one brings, and works without it where the
folder was deleted. To add one: CONTRIBUTING.md.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_cg.errors import MegatronCGError

if TYPE_CHECKING:
    import torch
    from torch import nn

    from megatron_cg.arguments.rule import Rule
    from megatron_cg.backends.base import Backend
    from megatron_cg.experts.install import ModelExperts
    from megatron_cg.fastpath.install_parts import FastPath
    from megatron_cg.fsdp.sharding import Sharding
    from megatron_cg.integrations.megatron.megatron_unit import ObservedInputs
    from megatron_cg.replay.guard import Addresses
    from megatron_cg.replay.guarded_graph import ReplayFunction
    from megatron_cg.replay.unit import Unit
    from megatron_cg.units.code_observer import CodeObserver

    Undo = Callable[[], None]

EXTENSIONS: Mapping[str, Mapping[str, tuple[object, ...]]] = {
    "recompute": {"recompute_granularity": ("full",)},
    "experts": {
        "cg_grouped_gemm": ("cublas", "torch"),
        "cg_moe_rows": (),
        "cg_moe_stash": (),
        "cg_moe_exchange": ("peer",),
    },
    "fastpath": {},
    "fully_shard": {"megatron_fsdp_version": (2,)},
    "units": {},
    "clients": {},
    "compiled": {},
    "native": {"cg_backend": ("native",)},
    "tape": {"cg_backend": ("tape",)},
    "tools": {"cg_record": ()},
}
"""By folder, the settings that need it (fields of GraphArguments, or of RunArguments for graphs),
each with the values that do; empty: every value but None."""
_PACKAGE = __name__.rpartition(".")[0]


def not_installed() -> tuple[str, ...]:
    """The extensions whose folders are not there. Imports nothing of them."""
    return tuple(name for name in EXTENSIONS if not is_installed(name))


def is_installed(name: str) -> bool:
    full = f"{_PACKAGE}.{name}"
    return full in sys.modules or find_spec(full) is not None


class ExtensionMissingError(MegatronCGError, ImportError):
    """What was called needs an extension that is not installed."""


@contextmanager
def needed_by(what: str) -> Iterator[None]:
    """Turn the error of an import of an extension that is not installed into one that says so."""
    try:
        yield
    except ModuleNotFoundError as error:
        package, _, name = (error.name or "").partition(".")
        if package != _PACKAGE or name not in not_installed():
            raise
        raise ExtensionMissingError(
            f"{what} needs the extension {package}/{name}, which is not installed: install the "
            "whole package again with pip."
        ) from None


def command_line() -> int:
    """The command ``megatron-cg``, if it is installed."""
    try:
        return _needed("tools.cli.main", "megatron-cg").main()
    except ExtensionMissingError as error:
        sys.exit(str(error))


def _load(module: str) -> Any:
    """A module of an extension, or None if that is not installed."""
    name = module.partition(".")[0]
    return import_module(f"{_PACKAGE}.{module}") if is_installed(name) else None


def _needed(module: str, what: str) -> Any:
    """A module of an extension that ``what`` needs. Raises ExtensionMissingError."""
    with needed_by(what):
        return import_module(f"{_PACKAGE}.{module}")


def rules() -> Iterator[Rule]:
    """What runs that use an extension must not have, from its ``rules.py``. Imports no torch."""
    for name in EXTENSIONS:
        if Path(__file__).with_name(name).joinpath("rules.py").is_file():
            yield from import_module(f"{_PACKAGE}.{name}.rules").RULES


def experts_of(model: nn.Module) -> ModelExperts | None:
    """What the dropless experts of ``model`` were built with; None if it has none."""
    found = _load("experts.install")
    return None if found is None else found.experts_of(model)


def lacks_device_counts() -> str:
    """Why TE's grouped GEMM cannot read row counts on the device, in words; empty if it can."""
    found = _load("experts.rules")
    return found.lacks_device_counts() if found else "megatron_cg/experts is not installed"


def use_device_counts(
    gemm: str, *, rows: float | None, stash: float | None, by_peers: bool
) -> Undo:
    """Let models built from now on have dropless experts; see ``experts/install.py``."""
    install = _needed("experts.install", "one kernel for all experts")
    bound = install.RowBound(rows, stash) if rows or stash else None
    return install.use_device_counts(bound, by_peers=by_peers, gemm=gemm)


def install_fast_path(
    sharding: Sharding,
    backend: Backend,
    optimizers: Sequence[Any],
    graphed: Iterable[nn.Module],
    replays: Sequence[ReplayFunction],
) -> FastPath | None:
    """Install what is applicable to ``sharding``; None if nothing is, or it is not installed."""
    found = _load("fastpath.install_parts")
    return found and found.install_for(sharding, backend, optimizers, graphed, replays)


def observe_code(
    unit: Unit, samples: Mapping[str, torch.Tensor], addresses: Addresses
) -> CodeObserver:
    """What observes the code of a unit. Raises CaptureError if ``units`` is not installed."""
    found = _load("units.code_observer")
    if found is None:
        raise unit.refused(
            "has a module of a class that this package does not know, and what its code reads "
            "cannot be observed, since the extension megatron_cg/units is not installed",
            "Install the whole package again with pip, or leave the unit out of the graphs.",
        )
    return found.CodeObserver(unit, samples, addresses)


def sharding_by_v2(model: nn.Module) -> Sharding:
    """The sharding of a model by Megatron-FSDP v2. Raises ExtensionMissingError."""
    what = "a model under Megatron-FSDP v2"
    return _needed("fully_shard.megatron_fsdp_v2", what).MegatronFsdpV2(model)


def sharding_by_fsdp2(model: nn.Module) -> Sharding:
    """The sharding of a model by torch's FSDP2. Raises ExtensionMissingError."""
    return _needed("fully_shard.fsdp2", "a model under FSDP2").FullyShard(model)


def allow_graphs_under_v2() -> Undo:
    """Let Megatron-FSDP v2 wrap models that ask for graphs of layers; nothing if not installed."""
    found = _load("fully_shard.models")
    return found.allow_graphs() if found is not None else lambda: None


def allow_full_recompute() -> Undo:
    """Let configs have full recompute and graphs. Raises ExtensionMissingError."""
    what = "recompute_granularity full with graphs"
    return _needed("recompute.layers", what).allow_full_recompute()


def recompute_in_layers(model: nn.Module, inputs: ObservedInputs) -> Undo:
    """Move checkpoints of full recompute into layers; nothing if not installed."""
    found = _load("recompute.layers")
    return found.recompute_in_layers(model, inputs) if found is not None else lambda: None


def bridge() -> Any:
    """Megatron-Bridge's configurations (``clients/bridge.py``), or None if not installed."""
    return _load("clients.bridge")


def backend(name: str) -> Backend:
    """The backend ``"native"`` or ``"tape"``. Raises ExtensionMissingError."""
    module = _needed(f"{name}.{name}_backend", f"the backend {name}")
    return getattr(module, f"{name.title()}Backend")()


def install_recorder(folder: str, loop: str) -> Undo:
    """Record the run of this process, in ``loop`` ``"megatron"`` or ``"bridge"``."""
    return _needed("tools.record.record", "a record of the run").install_recorder(folder, loop)
