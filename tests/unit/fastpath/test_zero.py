"""Zeroing gradients by the fast path leaves what Megatron-FSDP's own way leaves."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron_cg.fastpath.optimizer import zero
from megatron_cg.fastpath.optimizer.zero import install_zero
from tests.unit.ranks import on_ranks

SCENARIOS: dict[str, dict[str, Any]] = {
    "cast": {},
    "in place": {"bf16": False},
    "experts": {"experts": 8},
    "ZeRO-1": {"fsdp_options": {"data_parallel_sharding_strategy": "optim"}},
    "no shards": {"fsdp_options": {"data_parallel_sharding_strategy": "no_shard"}},
}


def fill(store: Any, decoupled: bool) -> None:
    """Leave gradients as after a backward pass."""
    for group in store.parameter_groups:
        if group.main_grad_buffer is not None:
            group.main_grad_buffer.data.fill_(1.5)
    store.use_decoupled_grad = decoupled
    store.update_main_grads()


def left(store: Any) -> list[Any]:
    """What is there, in each parameter, Megatron-FSDP's table and the buffers."""
    return [
        *(
            (name, p.grad is None, getattr(p, "decoupled_grad", "absent") is None)
            for name, p in store.optimizer_named_parameters
        ),
        *((name, g._local_tensor is None) for name, g in store.dist_main_grad.items()),
        *(
            (group.main_grad_buffer.data.data_ptr(), group.main_grad_buffer.data.abs().sum().item())
            for group in store.parameter_groups
            if group.main_grad_buffer is not None
        ),
    ]


def compare_all() -> dict[str, Any]:
    found = {}
    for name, options in SCENARIOS.items():
        for keeps in (False, True):
            found[f"{name}, {keeps}"] = compared(options, keeps)
    return found


def compared(options: dict[str, Any], keeps: bool) -> list[Any]:
    """Of each kind of gradients: as filled, as Megatron-FSDP leaves them, and as we do."""
    from megatron.core import parallel_state

    from megatron_cg.tools.cpu.cpu_model import build
    from megatron_cg.tools.cpu.training_plan import CpuModelConfig

    try:
        model: Any = build(CpuModelConfig(layers=1, hidden_size=16, **options))
        fsdp = model.module
        store = fsdp.param_and_grad_buffer
        store.ddp_config.megatron_fsdp_cuda_graph_mode = keeps
        found = []
        for decoupled in (False, True, False):
            states = []
            for ours in (False, True):
                fill(store, decoupled)
                fsdp._replace_param_with_raw_if_needed()  # as before each forward pass
                for parameter in fsdp.raw_param.values():
                    parameter.grad_added_to_main_grad = True
                states += [left(store)] * (not ours)
                undo = install_zero(fsdp, model) if ours else None
                # The adapter has its own copy of the function.
                (fsdp if decoupled else model).zero_grad_buffer()
                states.append(left(store))
                assert not any(p.grad_added_to_main_grad for p in fsdp.raw_param.values())
                if undo is not None:
                    with pytest.MonkeyPatch.context() as patch:
                        # No module is asked for its parameters.
                        patch.setattr(fsdp.module, "parameters", None)
                        model.zero_grad_buffer()
                    undo()
            assert "zero_grad" not in vars(store) and "zero_grad_buffer" not in vars(fsdp)
            assert vars(model)["zero_grad_buffer"].__self__ is fsdp
            found.append(states)
        return found
    finally:
        parallel_state.destroy_model_parallel()


@pytest.fixture(scope="module")
def results() -> list[dict[str, Any]]:
    return on_ranks(compare_all)


@pytest.mark.parametrize("keeps", [False, True])
@pytest.mark.parametrize("name", SCENARIOS)
def test_the_same_is_left(results: list[dict[str, Any]], name: str, keeps: bool) -> None:
    for runs in results:
        for filled, megatrons, ours in runs[f"{name}, {keeps}"]:
            assert ours == megatrons != filled
            assert len(ours) > 15


class Buffer:
    """As one of Megatron-FSDP's."""

    def __init__(self, elements: int, dtype: torch.dtype = torch.float32) -> None:
        self.data = torch.ones(elements, dtype=dtype)


def a_store(*groups: tuple[Buffer | None, Buffer | None], keeps: bool = False) -> Any:
    return SimpleNamespace(
        zero_grad=None,
        ddp_config=SimpleNamespace(megatron_fsdp_cuda_graph_mode=keeps),
        optimizer_named_parameters=[],
        dist_main_grad={},
        parameter_groups=[
            SimpleNamespace(main_grad_buffer=main, hfsdp_helper_gbuf=helper)
            for main, helper in groups
        ],
    )


def a_model(store: Any) -> Any:
    return SimpleNamespace(
        param_and_grad_buffer=store,
        _params_require_handle_grad=set(),
        _root_pre_backward_hook_issued=False,
    )


def test_buffers_of_one_kind_are_zeroed_together_and_large_ones_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    together: list[list[int]] = []
    zeroed = torch._foreach_zero_

    def noted(tensors: list[torch.Tensor]) -> None:
        together.append([tensor.numel() for tensor in tensors])
        zeroed(tensors)

    monkeypatch.setattr(torch, "_foreach_zero_", noted)
    monkeypatch.setattr(zero, "SMALL", 10)
    buffers = [Buffer(3), Buffer(4, torch.bfloat16), Buffer(11), Buffer(10), Buffer(0)]
    helper = Buffer(7)
    # A bucket whose buffer is a part of its helper's, and one that has no gradients at all.
    buffers[3].data = helper.data[2:5]
    store = a_store(*((b, helper if b is buffers[3] else None) for b in buffers), (None, None))
    install_zero(a_model(store))
    store.zero_grad()
    assert together == [[3, 3, 7, 0], [4]]
    assert all((b.data == 0).all() for b in (*buffers, helper))
    # Asked anew in each step: another tensor, and another bucket.
    buffers[0].data = torch.ones(5)
    store.parameter_groups.append(store.parameter_groups[0])
    store.zero_grad()
    assert together[2:] == [[5, 3, 7, 0, 5], [4]] and not buffers[0].data.any()


def test_gradients_that_a_graph_reads_are_left_to_megatron_fsdp() -> None:
    store, calls = a_store((Buffer(3), None)), []
    store.zero_grad = lambda: calls.append("Megatron-FSDP's")
    undo = install_zero(a_model(store))
    store.zero_grad()
    assert not calls
    store.ddp_config.megatron_fsdp_cuda_graph_mode = True
    store.zero_grad()
    assert len(calls) == 1
    del store.ddp_config.megatron_fsdp_cuda_graph_mode
    store.zero_grad()
    assert len(calls) == 2
    undo()
    store.zero_grad()
    assert len(calls) == 3


def wrote(buffer: Buffer, model: Any) -> None:
    buffer.data[1:].view(-1).add_(1)


def reduced(buffer: Buffer, model: Any) -> None:
    # As a collective does, which no tensor counts.
    buffer.data.data.fill_(1)
    model._params_require_handle_grad = set()


def reduced_after_a_failed_pass(buffer: Buffer, model: Any) -> None:
    buffer.data.data.fill_(1)
    model._root_pre_backward_hook_issued = True


def moved(buffer: Buffer, model: Any) -> None:
    buffer.data = torch.ones(3)


@pytest.mark.parametrize("change", [wrote, reduced, reduced_after_a_failed_pass, moved])
def test_buffers_are_zeroed_again_only_after_a_change(
    monkeypatch: pytest.MonkeyPatch, change: Any
) -> None:
    calls: list[int] = []
    zeroed = torch._foreach_zero_

    def noted(tensors: list[torch.Tensor]) -> None:
        calls.append(len(tensors))
        zeroed(tensors)

    monkeypatch.setattr(torch, "_foreach_zero_", noted)
    buffers = [Buffer(3), Buffer(4)]
    store = a_store(*((buffer, None) for buffer in buffers))
    model = a_model(store)
    install_zero(model)
    parameter = SimpleNamespace(grad=None)
    store.optimizer_named_parameters = [("weight", parameter)]
    for _ in range(3):
        parameter.grad = torch.ones(1)
        store.zero_grad()
        assert parameter.grad is None
    assert calls == [2]
    change(buffers[0], model)
    assert buffers[0].data.any()
    store.zero_grad()
    assert calls == [2, 2] and not buffers[0].data.any()
