"""What ``megatron-cg precompile`` compiles of a Megatron run: a layer of its model.

The flags are those of the run. They are read as a plan reads them, by Megatron's own parser and
with all rules, and the model is built by the builder that the run uses.
"""

from __future__ import annotations

import contextlib
import io
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from megatron_cg.errors import ConfigurationError, MegatronCGError
from megatron_cg.precompile.region import Region
from megatron_cg.tools.cpu.fakes import no_context, replaced
from megatron_cg.tools.plan.fake_machine import simulated_gpus
from megatron_cg.tools.plan.request import read_request
from megatron_cg.tools.plan.settings import WITHOUT_TE, read_settings
from megatron_cg.upstream.patch import undone_after


@dataclass(frozen=True)
class CompiledRun:
    """A run whose layers are to be compiled."""

    args: Any
    """Megatron's namespace, validated."""
    folder: Path
    """The value of ``--cg-precompile-dir``."""
    notes: tuple[str, ...]

    def build(self) -> Region:
        """The layer of the rank that the default process group says, on the meta device."""
        from megatron.core import parallel_state
        from megatron.core.tensor_parallel.random import CudaRNGStatesTracker

        parallel_state.initialize_model_parallel(
            self.args.tensor_model_parallel_size, create_gloo_process_groups=False
        )
        with (
            torch.device("meta"),
            # Weights get no values, so nothing is drawn from states that are not there.
            replaced(CudaRNGStatesTracker, "fork", no_context),
            _full_recompute_allowed(),
        ):
            return layers_of(self.args)[0]


def read_run(target: str | None, extra: Sequence[str], world_size: int | None) -> CompiledRun:
    """The run of a script or preset and its flags, as ``read_request`` takes them.

    Raises:
        ConfigurationError: the flags break a rule of this package, with every one.
        MegatronCGError: the flags cannot be read, Megatron refuses them, or they do not have
            ``--cg-precompile-dir``.
    """
    scopes = None if target is None or target.endswith(".py") else ()
    request = read_request(target, extra, scopes=scopes, nproc=world_size)
    deterministic = torch.are_deterministic_algorithms_enabled()
    try:
        with simulated_gpus(request.environment), _full_recompute_allowed():
            settings = read_settings(replace(request, started_without=None))
    finally:
        torch.use_deterministic_algorithms(deterministic)
    wrong = settings.usage or settings.megatron
    if settings.broken:
        raise ConfigurationError(settings.broken)
    if wrong is not None:
        raise MegatronCGError(f"these flags start no run: {wrong}")
    if settings.graph.cg_precompile_dir is None:
        raise MegatronCGError(
            "the flags do not say where the artifact goes: add --cg-precompile-dir DIR, here and "
            "to the run"
        )
    folder = Path(settings.graph.cg_precompile_dir)
    notes = tuple(note for note in settings.notes if note != WITHOUT_TE)
    return CompiledRun(settings.args, folder, notes)


def _full_recompute_allowed() -> contextlib.AbstractContextManager[None]:
    """As in the run, whose layers recompute themselves in their graphs."""
    from megatron_cg.integrations.megatron.full_recompute import allow_full_recompute

    return undone_after(allow_full_recompute())


def layers_of(args: Any) -> list[Region]:
    """The layers of this rank's model, which is built as ``megatron.training`` builds it.

    Megatron's process groups are initialised.
    """
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.transformer.module import Float16Module
    from megatron.training.argument_utils import gpt_config_from_args

    from megatron_cg.integrations.megatron.layer_code import LayerCall, layer_regions

    with contextlib.redirect_stdout(io.StringIO()):
        made = gpt_config_from_args(args)
        groups = ProcessGroupCollection.use_mpu_process_groups()
        model = made.get_builder_cls()(made).build_model(groups)
    if args.bf16:
        model = Float16Module(made.transformer, model)
    return layer_regions(model.train(), LayerCall.of(args))
