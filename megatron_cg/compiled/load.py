"""Load compiled code on every rank, or on none.

All ranks vote twice: when each has checked and decoded the artifact, and when each has compared one
step of it with eager. A rank that refuses still votes, so no rank waits in a collective of the
comparison for one that has refused. If the comparison itself fails on a rank, others may wait for
it in a collective of the region, until the time limit of the vote ends the run.
"""

import io
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch.utils._pytree import tree_leaves, tree_map

from megatron_cg.compiled.region import (
    PREFIX,
    PlainState,
    Region,
    call_kinds,
    differences,
    fingerprint,
    module_kinds,
)
from megatron_cg.compiled.save import Manifest, read
from megatron_cg.compiled.trace import loading_for
from megatron_cg.consensus.decision import AgreementError, Kind, Vote, digest, ranks_text
from megatron_cg.consensus.exchange import Agreement
from megatron_cg.consensus.process_exit import arm_fast_exit
from megatron_cg.errors import (
    ArtifactRefusedError,
    MegatronCGError,
    NotRestoredError,
    ReplayMismatchError,
)
from megatron_cg.hooks import describe, module_hooks
from megatron_cg.replay.verify import difference, synthetic_gradient
from megatron_cg.restore import values_kept
from megatron_cg.upstream.patch import Undo, combine_undos, set_attribute
from megatron_cg.upstream.symbols import Symbol

_LOAD = Symbol(
    "torch.compiler:load_compiled_function",
    "decodes a compiled function from a file",
    parameters=("file",),
)
RELIES_ON = (_LOAD,)


class Precompiled:
    """Compiled code on this rank; call it with a module and its arguments.

    One artifact serves all modules of the same kind and shapes, such as all layers of a model.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        region: Region,
        name: str,
        state: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        self._function, self._name = function, name
        self._saved, self._state = state, PlainState(state)
        self._training, self._device_type = region.module.training, region.device().type
        self._call = call_kinds(region, self._device_type)
        self._module = module_kinds(region.module)

    def __call__(self, module: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
        """Run the compiled forward pass; its outputs have the compiled backward pass.

        Raises ReplayMismatchError if an argument, autocast or a value that is a constant of the
        code is not as it was traced: code without guards would compute something wrong.
        """
        self._require_same_state(module)
        call = call_kinds(Region(module, args, kwargs), self._device_type)
        if call != self._call:
            raise ReplayMismatchError(
                f"{self._name} was compiled for other calls: {differences(self._call, call)}. Call "
                "it as it was traced, or save an artifact for this call"
            )
        return self._function(module, *args, **kwargs)

    def _require_same_state(self, module: torch.nn.Module) -> None:
        if not self._state.is_as(self._saved, module):
            raise ReplayMismatchError(
                f"{self._name} was compiled with other values, and has them as constants: "
                f"{differences(self._saved, self._state.texts(module))}. Keep them as they were, "
                "give the module a value that changes as a tensor or a buffer, or leave this "
                "module out"
            )

    def attach(self, modules: Iterable[torch.nn.Module]) -> Undo:
        """Let these modules' forward passes run the compiled code; returns the undo.

        In the other mode than the traced one (``eval()`` for code of ``train()``), a module's own
        forward runs. Hooks of the modules themselves run as before. Raises ReplayMismatchError if a
        module has other parameters, buffers or values; none is changed then. So does a call if a
        module inside has a hook, which would never run, or was replaced.
        """
        modules = list(modules)
        for module in modules:
            if different := differences(self._module, module_kinds(module)):
                raise ReplayMismatchError(
                    f"{self._name} was compiled for another {type(module).__name__}: {different}. "
                    "Leave this module out"
                )
            self._require_same_state(module)
        return combine_undos(
            set_attribute(module, "forward", self._forward_of(module)) for module in modules
        )

    def _forward_of(self, module: torch.nn.Module) -> Callable[..., Any]:
        own, attached = module.forward, tuple(module.modules())

        def forward(*args: Any, **kwargs: Any) -> Any:
            if module.training is not self._training:
                return own(*args, **kwargs)
            try:
                self._require_same_inside(module, attached)
                return self(module, *args, **kwargs)
            except ReplayMismatchError:
                arm_fast_exit()
                raise

        return forward

    def _require_same_inside(
        self, module: torch.nn.Module, attached: tuple[torch.nn.Module, ...]
    ) -> None:
        if tuple(module.modules()) != attached:
            raise ReplayMismatchError(
                f"a module inside this {type(module).__name__} was replaced after attach, and "
                f"{self._name} would never run the new one: replace it before attach, or leave "
                "this module out"
            )
        for inner in attached[1:]:
            for hook in module_hooks(inner):
                raise ReplayMismatchError(
                    f"a {type(inner).__name__} inside has the hook {describe(hook.fn)}, which "
                    f"{self._name} would never run: register it on the module that is attached, or "
                    "leave this module out. If Megatron-FSDP put it there, name the class of the "
                    "attached module in fsdp_unit_modules"
                )


def load(directory: Path | str, name: str, region: Region, votes: Agreement) -> Precompiled:
    """Load an artifact on all ranks, or on none. All ranks call this together.

    ``directory`` is where ``save`` wrote to; see Note [What is trusted] in ``save.py``.
    ``region`` has the module on this rank's device, with real weights, arguments of the shapes to
    come, and the process groups of the rank by role. ``votes`` are those of all ranks.

    Raises:
        ArtifactRefusedError: on all ranks, if any refused. They may go on eagerly.
        NotRestoredError: on all ranks, if a comparison left a buffer changed on any.
        AgreementError: a rank is gone, does something else, or waits in a collective for one that
            failed in the comparison. This process must end.
    """
    held, own = "", None
    compiled: Any = None
    try:
        manifest, code = read(Path(directory, f"{name}.artifact"))
        held = manifest.code_sha256
        compiled = _decoded(name, manifest, code, region)
    except Exception as error:  # This rank must vote, so nothing may escape.
        own = error
    _decide("decoded", 1, own, votes, held)
    try:
        if (different := first_difference(region, compiled)) is not None:
            raise ArtifactRefusedError(
                f"{name} does not compute what eager computes: {different}. Save again; if that "
                "does not help, please report it with this line"
            )
    except Exception as error:
        own = error
    _decide("compared", 2, own, votes, held)
    return Precompiled(compiled, region, name, manifest.state)


def _decoded(name: str, manifest: Manifest, code: bytes, region: Region) -> Any:
    """The code for this rank. Raises ArtifactRefusedError if it is for something else."""
    device = region.device()
    capability = torch.cuda.get_device_capability(device) if device.type == "cuda" else None
    state = PlainState(manifest.state).texts(region.module)
    saved = {**manifest.fingerprint, **manifest.state}
    if different := differences(saved, fingerprint(region, capability) | state):
        kinds = (type(module) for module in region.module.modules())
        own = next((kind.__qualname__ for kind in kinds if kind.__module__ == "__main__"), "")
        # As with pickle: where another script saved, the classes of this one have another name.
        remedy = f"Move {own} from the script that runs to a module that it imports, and save again"
        raise ArtifactRefusedError(
            f"{name} was made for something else: {different}. "
            + (remedy if own else "Save again for this configuration")
        )
    groups = {f"{PREFIX}{role}": group.group_name for role, group in region.groups.items()}
    with loading_for(device, groups):
        compiled = _LOAD.find()(io.BytesIO(code))
    # All guards were left out; the fingerprint, the state and the check of each call replace them.
    compiled.disable_guard_check()
    return compiled


def _decide(done: str, serial: int, own: Exception | None, votes: Agreement, held: str) -> None:
    """Raise the same class of error on all ranks, if any has one."""
    ends = isinstance(own, NotRestoredError)
    vote = Vote(against=own is not None, ends=ends, graphs=digest([held]))
    try:
        decision = votes.agree(Kind.PRECOMPILED, vote, serial=serial)
    except AgreementError as error:
        if own is not None:
            error.add_note(f"{type(own).__name__} while the artifact was {done}: {own}")
        raise
    if isinstance(own, NotRestoredError):
        raise own
    decision.require_restored()
    reason = ""
    if isinstance(own, MegatronCGError):
        reason = str(own)
    elif own is not None:
        reason = f"the artifact could not be {done}: {type(own).__name__}: {own}"
    elif decision.against:
        refused = f"{ranks_text(decision.against)} refused the artifact"
        reason = f"{refused}, for the reason in its own log, so no rank uses it"
    elif decision.minority:
        different = f"{ranks_text(decision.minority)} and the other ranks read different artifacts"
        reason = f"{different}: give all ranks the same folder"
    if reason:
        raise ArtifactRefusedError(reason) from own


def first_difference(region: Region, compiled: Callable[..., Any]) -> str | None:
    """The first output, buffer or gradient that differs between eager and compiled, in words.

    Outputs that are all zero are named as well, since equal zeros say nothing about the code.

    Both passes run on the region's own arguments. Buffers are put back; gradients of parameters
    are not accumulated, and hooks of parameters do not run. All ranks of the region's groups call
    this together, since both passes contain its collectives.
    """
    eager = _pass(region, region.module)
    found = _pass(region, lambda *args, **kwargs: compiled(region.module, *args, **kwargs))
    outputs = [value for name, value in eager if name.startswith("output ")]
    if outputs and not any(one is not None and one.any() for one in outputs):
        return (
            "every output is zero, so the comparison shows nothing: give the region arguments and "
            "weights with realistic values"
        )
    if [name for name, _value in eager] != [name for name, _value in found]:
        return f"{len(eager)} results in eager and {len(found)} in compiled code"
    for (name, one), (_, other) in zip(eager, found, strict=True):
        if (different := difference(one, other)) is not None:
            return f"{name} is {different[0]} in eager and {different[1]} in compiled code"
    return None


def _pass(region: Region, run: Callable[..., Any]) -> list[tuple[str, torch.Tensor | None]]:
    buffers = dict(region.module.named_buffers())
    args, kwargs = tree_map(_detached, (region.args, dict(region.kwargs)))
    inputs = [
        (f"the gradient of {name}", value)
        for name, value in Region(region.module, args, kwargs).tensors()
        if value.requires_grad
    ]
    with values_kept((f"buffer {name}", buffer) for name, buffer in buffers.items()):
        made = [one for one in tree_leaves(run(*args, **kwargs)) if isinstance(one, torch.Tensor)]
        results: list[Any] = [(f"output {n}", one.detach()) for n, one in enumerate(made)]
        results += [(f"buffer {name}", buffer.clone()) for name, buffer in buffers.items()]
        ends = [one for one in made if one.requires_grad]
        if ends and inputs:
            names, leaves = zip(*inputs, strict=True)
            starts = [synthetic_gradient(one) for one in ends]
            gradients = torch.autograd.grad(ends, leaves, starts, allow_unused=True)
            results += list(zip(names, gradients, strict=True))
        return results


def _detached(value: Any) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    return value.detach().clone().requires_grad_(value.requires_grad)
