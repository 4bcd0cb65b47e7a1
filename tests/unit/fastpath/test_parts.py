"""Parts of the fast path: put in and taken out, and what each asks before it takes a short way."""

from __future__ import annotations

from typing import Any

import pytest
from torch import nn

from megatron_cg.errors import UpstreamChangedError
from megatron_cg.fastpath import install
from megatron_cg.fastpath.part import find_cell, hook_functions
from megatron_cg.tools.cpu.training_plan import CpuModelConfig
from tests.unit.identity import Same
from tests.unit.trainers import trainer_of

CELLS = (
    "_param_list_for_submodule_unshard",
    "release_module_parameters",
    "_process_post_backward_gradients",
)


def state(fsdp: Any) -> list[Any]:
    """Everything that the parts put something instead of, by identity."""
    store = fsdp.param_and_grad_buffer
    owners = [fsdp, store, *(g.model_weight_buffer for g in store.parameter_groups)]
    functions = list(hook_functions(fsdp))
    return [
        *({name: Same(value) for name, value in vars(owner).items()} for owner in owners),
        *(Same(find_cell(functions, name).cell_contents) for name in CELLS),
        *((name, Same(p)) for name, p in fsdp.module.named_parameters()),
    ]


@pytest.fixture(params=[False, True], ids=["raw", "distributed"])
def fsdp(dense_model: Any, request: pytest.FixtureRequest) -> Any:
    """Megatron-FSDP's wrapper with its parameters as in a step, and as between steps."""
    found = dense_model.module
    found._replace_param_with_distributed_if_needed()
    if not request.param:
        found._replace_param_with_raw_if_needed()
    return found


def test_closing_puts_back_all_that_was_replaced(fsdp: Any) -> None:
    before = state(fsdp)
    path = install(fsdp)
    assert state(fsdp) != before
    path.close()
    path.close()
    assert state(fsdp) == before


def test_gradients_wait_no_longer_than_the_backward_pass_of_their_unit(
    one_rank: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else the next graph could overwrite them: Note [How long a gradient may wait]."""
    from megatron_cg.tools.cpu.cpu_model import transformer_layers

    done: list[nn.Module] = []
    with trainer_of(CpuModelConfig(layers=2), microbatches=2) as trainer:
        with monkeypatch.context() as patch:
            path = install(trainer.model.module)
            assert path.bucketing is not None
            patch.setattr(path.bucketing, "unit_is_done", done.append)
            trainer.step()
        path.close()
        backward = [*reversed(transformer_layers(trainer.model))]
        assert [unit for unit in done if unit in backward] == backward * 2


@pytest.mark.parametrize("cell", CELLS)
def test_a_variable_that_is_gone_is_named_and_nothing_stays_changed(
    fsdp: Any, cell: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = state(fsdp)
    for module in ("bucketing", "unshard"):
        monkeypatch.setattr(f"megatron_cg.fastpath.{module}.find_cell", without(cell))
    with pytest.raises(UpstreamChangedError, match=rf"megatron-core 0\.19\.2: .*{cell}"):
        install(fsdp)
    assert state(fsdp) == before


def without(name: str) -> Any:
    def find(functions: Any, wanted: str) -> Any:
        return find_cell([] if wanted == name else functions, wanted)

    return find


def test_float8_weights_are_left_to_megatron_fsdp(
    fsdp: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in ("unshard", "main_weights"):
        monkeypatch.setattr(f"megatron_cg.fastpath.{module}.float8_test", lambda _: lambda _p: True)
    path = install(fsdp)
    assert "FP8" in path.left_out["main-weights"]
    buffers = (g.model_weight_buffer for g in fsdp.param_and_grad_buffer.parameter_groups)
    assert not any("fetch_bucket" in vars(buffer) for buffer in buffers)
    path.close()
