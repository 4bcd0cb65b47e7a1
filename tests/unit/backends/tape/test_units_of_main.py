"""ZeRO-1 and ZeRO-2 with the hooks that Megatron-FSDP's main branch gives them.

NVIDIA/Megatron-LM#6357 makes the layers FSDP units under ZeRO-1 and ZeRO-2 as well, and gives a
unit the hook that reshards it only under ZeRO-3. The release's own model is built with such units
here, and the hook is taken off. Not of that change: when ZeRO-1 reduces its gradients.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from megatron_cg.tools.align.compare import compare, read_run
from megatron_cg.tools.cpu.launch import run_processes
from megatron_cg.tools.cpu.training_plan import CpuModelConfig, TrainingPlan

STRATEGIES = ("optim", "optim_grads")


def as_main(wrap: Any, *args: Any, **kwargs: Any) -> Any:
    """A model under Megatron-FSDP with its layers as units, none of which has a reshard hook."""
    from megatron.core.transformer.transformer_layer import TransformerLayer

    from megatron_cg.fsdp import FsdpRole, classify
    from megatron_cg.hooks import module_hooks
    from megatron_cg.tools.cpu.cpu_model import transformer_layers

    model = wrap(*args, fsdp_unit_modules=[TransformerLayer], **kwargs)
    for layer in transformer_layers(model):
        (reshard,) = (r for r in module_hooks(layer) if classify(r) is FsdpRole.RESHARD)
        del layer._forward_hooks[reshard.hook_id]
        roles = {classify(record) for record in module_hooks(layer)}
        assert roles == {FsdpRole.UNSHARD, FsdpRole.WRAPS_PRE_BACKWARD}
    return model


def train_all(root: Path) -> None:
    from megatron_cg.tools.cpu import cpu_model as model
    from megatron_cg.tools.cpu.voting import train
    from megatron_cg.upstream.patch import set_attribute

    wrap = vars(model)["FullyShardedDataParallel"]
    set_attribute(model, "FullyShardedDataParallel", partial(as_main, wrap))
    for strategy in STRATEGIES:
        shape = CpuModelConfig(
            experts=4,
            graph_modules=("attn", "moe_router"),
            fsdp_options={"data_parallel_sharding_strategy": strategy},
        )
        plan = TrainingPlan(shape, microbatches=2)
        train(plan, root / strategy / "eager")
        train(replace(plan, graphs=True), root / strategy / "graphs")


@pytest.fixture(scope="module")
def records(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("main")
    run_processes(partial(train_all, root))
    return root


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_units_without_a_reshard_hook_train_bit_for_bit_as_eager(
    records: Path, strategy: str
) -> None:
    eager, graphs = (read_run(records / strategy / name) for name in ("eager", "graphs"))
    result = compare(eager, graphs)
    assert result.status == "identical", result.reason
    assert result.graphs["captured"] == 2 * CpuModelConfig().layers
    assert result.graphs["replayed"] > 0 and result.graphs["eager"] == 0
