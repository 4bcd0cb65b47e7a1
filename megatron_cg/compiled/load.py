"""Load compiled code on every rank, or on none.

All ranks go through the same stages, and vote after each: the artifact is checked, then decoded,
then compared with eager for one step. A rank that fails at a stage still votes, so no rank waits in
a collective of the comparison for one that has refused. A rank that fails inside the comparison may
leave others in a collective. They still vote, and all ranks raise (``beside.py``).
"""

from __future__ import annotations

import io
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from enum import IntEnum
from itertools import islice
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist

from megatron_cg.compiled import one_step, store
from megatron_cg.compiled.beside import Outcome, beside_other_ranks
from megatron_cg.compiled.fingerprint import (
    autocast_of,
    capability_of,
    differences,
    fingerprint,
    short,
    tensor_kind,
)
from megatron_cg.compiled.graph_checks import PREFIX
from megatron_cg.compiled.output_code import Rank, loading_for
from megatron_cg.compiled.region import Region
from megatron_cg.compiled.sources import changed_sources
from megatron_cg.consensus.decision import AgreementError, Kind, Level, Vote, digest, ranks_text
from megatron_cg.consensus.exchange import Agreement
from megatron_cg.consensus.process_exit import (
    exit_without_waiting,
    exit_without_waiting_unless_it_goes_on,
)
from megatron_cg.errors import ArtifactRefusedError, MegatronCGError, ReplayMismatchError
from megatron_cg.hooks.hook_records import HookKind, describe, module_hooks
from megatron_cg.upstream.patch import Undo, all_of, set_attribute
from megatron_cg.upstream.symbols import Symbol

logger = logging.getLogger(__name__)

_LOAD = Symbol(
    "torch",
    "torch.compiler:load_compiled_function",
    "decodes a compiled function from a file",
    parameters=("file",),
)
RELIES_ON = (_LOAD,)

OnRefusal = Literal["error", "eager"]


class _Stage(IntEnum):
    """What a vote follows; its serial number."""

    CHECKED = 1
    DECODED = 2
    COMPARED = 3


class Precompiled:
    """Compiled code on this rank; call it with a module and its arguments.

    One artifact serves all modules of the same kind and shapes, such as all layers of a model.
    """

    def __init__(
        self, function: Callable[..., Any], region: Region, manifest: store.Manifest
    ) -> None:
        self._function, self._name = function, manifest.name
        self.manifest = manifest
        self._training = region.module.training
        self._arguments = _kinds(region)
        self._module = _module_kinds(region.module)
        self._device_type = region.device().type
        self._autocast = autocast_of(self._device_type)
        named = region.module.named_parameters()
        self._frozen = tuple(name for name, one in named if not one.requires_grad)

    def __call__(self, module: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
        """Run the compiled forward pass; its outputs have the compiled backward pass.

        Raises ReplayMismatchError if an argument, autocast or a frozen parameter is not as it was
        traced: code without guards would compute something wrong.
        """
        found = _kinds(Region(module, args, kwargs))
        if found != self._arguments:
            raise ReplayMismatchError(
                f"{self._name} was compiled for other arguments: "
                f"{short(differences(self._arguments, found))}. Call it with these shapes, or save "
                "an artifact for them"
            )
        autocast = autocast_of(self._device_type)
        if autocast != self._autocast:
            raise ReplayMismatchError(
                f"{self._name} was compiled with autocast {self._autocast} and is called with "
                f"{autocast}. Save an artifact under the autocast of the run"
            )
        for name in self._frozen:
            if module.get_parameter(name).requires_grad:
                raise ReplayMismatchError(
                    f"{name} needed no gradient when {self._name} was compiled, so that code gives "
                    "it none. Save an artifact with it trainable, or undo attach"
                )
        return self._function(module, *args, **kwargs)

    def attach(self, modules: Iterable[torch.nn.Module]) -> Undo:
        """Let these modules' forward passes run the compiled code; returns the undo.

        In the other mode than the traced one (``eval()`` for code of ``train()``), a module's own
        forward runs. Hooks of the modules themselves run as before. A call raises
        ReplayMismatchError if a module inside has got a hook since, which would never run, or was
        replaced, as a wrapper of the model may do.

        Raises:
            ReplayMismatchError: a module has other parameters or buffers, or a module inside it has
                a hook, which would never run; none is changed then.
        """
        modules = list(modules)
        for module in modules:
            found = _module_kinds(module)
            if found != self._module:
                raise ReplayMismatchError(
                    f"{self._name} was compiled for another {type(module).__name__}: "
                    f"{short(differences(self._module, found))}. Leave this module out"
                )
            _refuse_inner_hooks(self._name, module)
        return all_of(
            set_attribute(module, "forward", self._forward_of(module)) for module in modules
        )

    def _forward_of(self, module: torch.nn.Module) -> Callable[..., Any]:
        own, attached = module.forward, tuple(module.modules())

        def forward(*args: Any, **kwargs: Any) -> Any:
            if module.training is not self._training:
                return own(*args, **kwargs)
            try:
                _refuse_inner_hooks(self._name, module)
                if tuple(module.modules()) != attached:
                    raise ReplayMismatchError(
                        f"a module inside this {type(module).__name__} was replaced after attach, "
                        f"and {self._name} would never run the new one: replace it before attach, "
                        "or leave this module out"
                    )
                return self(module, *args, **kwargs)
            except ReplayMismatchError:
                exit_without_waiting_unless_it_goes_on()
                raise

        return forward


def load(
    directory: Path | str,
    name: str,
    region: Region,
    votes: Agreement,
    *,
    on_refusal: OnRefusal = "error",
    manifest_sha256: str | None = None,
    also: Sequence[torch.nn.Module] = (),
) -> Precompiled | None:
    """Load an artifact on all ranks, or on none. All ranks call this together.

    Nothing is decoded before the owner of the files (or ``manifest_sha256``), the checksum, the
    fingerprint and the sources were checked on all ranks; see Note [What is trusted].

    Args:
        directory: where ``save`` wrote to.
        name: of the artifact.
        region: the module on this rank's device, with real weights, real arguments of the shapes
            to come, and the process groups of the rank by role.
        votes: of all ranks of the default process group.
        on_refusal: ``error`` raises on all ranks; ``eager`` returns None on all ranks.
        manifest_sha256: what ``save`` returned; the folder's owner does not matter then.
        also: other modules that are to run the code. Each is compared with eager too.

    Raises:
        ArtifactRefusedError: a rank refused, and ``on_refusal`` is ``error``.
        AgreementError: a rank is gone or does something else, or failed in the comparison while
            others wait for it in a collective. This process must end.
    """
    regions = (region, *(replace(region, module=module) for module in also))
    loader = _Loader(Path(directory), name, regions, manifest_sha256)
    stages: tuple[tuple[_Stage, Callable[[], None]], ...] = (
        (_Stage.CHECKED, loader.check),
        (_Stage.DECODED, loader.decode),
        (_Stage.COMPARED, loader.compare),
    )
    for stage, run in stages:
        meets_others = stage is _Stage.COMPARED and region.groups and dist.is_initialized()
        own = beside_other_ranks(run) if meets_others else Outcome(_refusal(run))
        refusal = _decided(stage, own, votes, f"{on_refusal} {loader.held}")
        if refusal is None:
            continue
        if on_refusal == "error":
            raise refusal from own.error
        logger.warning("megatron_cg: %s runs eagerly on all ranks: %s", name, refusal)
        return None
    return loader.done()


class _Loader:
    """What one rank does at each stage."""

    def __init__(
        self, directory: Path, name: str, regions: Sequence[Region], manifest_sha256: str | None
    ) -> None:
        self._directory, self._name, self._manifest_sha256 = directory, name, manifest_sha256
        self._region, self._regions = regions[0], regions
        self._stored: store.Stored | None = None
        self._compiled: Any = None

    @property
    def held(self) -> str:
        """Which artifact this rank has read; all ranks must hold the same."""
        return "" if self._stored is None else self._stored.manifest_sha256

    def check(self) -> None:
        stored = store.read(self._directory, self._name, self._manifest_sha256)
        device = self._region.device()
        found = fingerprint(self._region, capability_of(device))
        different = differences(stored.manifest.fingerprint, found)
        different += changed_sources(stored.manifest.sources)
        for region in self._regions[1:]:
            kinds = _module_kinds(region.module)
            different += differences(_module_kinds(self._region.module), kinds)
        if different:
            raise ArtifactRefusedError(
                f"{self._name} was made for something else: {short(different)}. Save again for "
                "this configuration"
            )
        missing = set(stored.manifest.roles) - set(self._region.groups)
        if missing:
            raise ArtifactRefusedError(
                f"{self._name} has collectives on {', '.join(sorted(missing))}, and the region "
                "names no such group: add it to Region.groups"
            )
        self._stored = stored

    def decode(self) -> None:
        assert self._stored is not None
        rank = Rank(self._region.device(), _group_names(self._region))
        with loading_for(rank):
            self._compiled = _LOAD.find()(io.BytesIO(self._stored.data))
        # All guards were left out; the fingerprint and the check of each call replace them.
        self._compiled.disable_guard_check()

    def compare(self) -> None:
        # All of them, whatever is found: other ranks are in the same collectives.
        found = [one_step.first_difference(one, self._compiled) for one in self._regions]
        for place, different in enumerate(found):
            if different is None:
                continue
            of_which = f" (module {place} of {len(found)})" if len(found) > 1 else ""
            raise ArtifactRefusedError(
                f"{self._name} does not compute what eager computes{of_which}: {different}. Save "
                "again; if that does not help, please report it with this line"
            )

    def done(self) -> Precompiled:
        assert self._stored is not None
        return Precompiled(self._compiled, self._region, self._stored.manifest)


def _refusal(run: Callable[[], None]) -> Exception | None:
    """What kept this rank from a stage. It must vote, so nothing may escape."""
    try:
        run()
    except Exception as error:
        return error
    return None


def _decided(
    stage: _Stage, outcome: Outcome, votes: Agreement, held: str
) -> ArtifactRefusedError | None:
    """The refusal of all ranks, or None if all go on."""
    own = outcome.error
    level = Level.KEEP if own is None else Level.GIVE_UP
    vote = Vote(level, size=int(outcome.waits), graphs=digest([held]))
    decision = votes.agree(Kind.PRECOMPILED, vote, serial=stage)
    if decision.largest:
        exit_without_waiting()
        raise AgreementError(
            f"{ranks_text(decision.asked)} failed while compiled code was compared with eager, for "
            "the reason in the log there, and other ranks wait for it in a collective of the "
            "region. So this run ends on all ranks. To train without compiled code, do not load it"
        ) from own
    if own is not None:
        if isinstance(own, MegatronCGError):
            return ArtifactRefusedError(str(own))
        return ArtifactRefusedError(
            f"the artifact could not be {stage.name.lower()}: {type(own).__name__}: {own}"
        )
    if decision.asked:
        return ArtifactRefusedError(
            f"{ranks_text(decision.asked)} refused the artifact, for the reason in its own log, so "
            "no rank uses it"
        )
    if decision.minority:
        return ArtifactRefusedError(
            f"{ranks_text(decision.minority)} and the other ranks read different artifacts, or "
            "were called with a different on_refusal: give all ranks the same folder"
        )
    return None


def _refuse_inner_hooks(name: str, module: torch.nn.Module) -> None:
    inside = islice(module.modules(), 1, None)
    if not any(getattr(inner, kind.value) for inner in inside for kind in HookKind):
        return
    for path, inner in islice(module.named_modules(), 1, None):
        for hook in module_hooks(inner):
            raise ReplayMismatchError(
                f"{path} has the hook {describe(hook.fn)}, which {name} would never run: register "
                "it on the module that is attached, or leave this module out. If Megatron-FSDP put "
                "it there, name the class of the attached module in fsdp_unit_modules"
            )


def _group_names(region: Region) -> dict[str, str]:
    return {f"{PREFIX}{role}": group.group_name for role, group in region.groups.items()}


def _kinds(region: Region) -> Mapping[str, str]:
    """What a call must have in common with the traced one."""
    return {
        name: tensor_kind(value) if isinstance(value, torch.Tensor) else repr(value)
        for name, value in region.arguments()
    }


def _module_kinds(module: torch.nn.Module) -> dict[str, str]:
    return {name: tensor_kind(value) for name, value in Region(module, ()).tensors()}
