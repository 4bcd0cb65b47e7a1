"""Main gradients and weights from tables."""

from typing import Any
from weakref import ref

import pytest
import torch

from megatron_cg.fastpath.optimizer_step import install_main_gradients, install_main_weights
from megatron_cg.tape.training_plan import CpuModelConfig
from tests.unit.fastpath.test_idle_pool import Allocator
from tests.unit.ranks import on_ranks


class Scratch:
    """Memory that a replay overwrites."""

    def __init__(self) -> None:
        self.pieces = 0
        self.given: list[ref[torch.Tensor]] = []
        self.borrowed_bytes = 1

    def report_held(self) -> None:
        self.borrowed_bytes = 0

    def alive(self) -> list[torch.Tensor]:
        return [tensor for one in self.given if (tensor := one()) is not None]

    def empty(self, _caller: Any, like: list[Any], dtype: torch.dtype) -> list[torch.Tensor]:
        # Copies of gradients that are scaled after their reduction have the same memory.
        assert not self.alive()
        made = [torch.full(one.shape, torch.nan, dtype=dtype) for one in like]
        self.pieces, self.given = self.pieces + len(like), [ref(tensor) for tensor in made]
        return made


@pytest.mark.parametrize("training", [True, False])
def test_copies_that_somebody_still_holds_are_moved_before_a_training_pass(
    training: bool, dense_model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    scratch: Any = Scratch()
    fsdp: Any = dense_model.module.train(training)
    store = fsdp.param_and_grad_buffer
    store.update_main_grads()  # Megatron-FSDP makes its DTensors.
    fsdp.forward = forward = lambda: [tensor.fill_(torch.nan) for tensor in scratch.alive()]
    undo = install_main_gradients(fsdp, scratch)
    for group in store.parameter_groups:
        group.main_grad_buffer.data.fill_(3)
    for _ in range(2):
        store.update_main_grads()
    assert len(scratch.alive()) > 5
    fsdp.forward()
    held = [gradient._local_tensor for gradient in store.dist_main_grad.values()]
    # An evaluation replays nothing, so nothing is moved for it.
    assert all((tensor.eq(3) if training else tensor.isnan()).all() for tensor in held)
    # Whatever else is held in that memory is lost, and said to be.
    assert scratch.borrowed_bytes != training
    undo()
    assert vars(fsdp)["forward"] is forward
    monkeypatch.setattr("megatron_cg.fastpath.optimizer_step.SMALL", 0)
    with Allocator(1 << 40).installed(monkeypatch) as pool:
        install_main_gradients(fsdp, pool)
        store.update_main_grads()
        fsdp.forward()
        assert pool.borrowed_bytes  # What was moved is not reported as held.


OPTIONS: dict[str, dict[str, Any]] = {
    "cast": {},
    "experts": {"experts": 8},
    "in place": {"bf16": False},
    "ZeRO-1": {"fsdp_options": {"data_parallel_sharding_strategy": "optim"}},
    "no shards": {"fsdp_options": {"data_parallel_sharding_strategy": "no_shard"}},
}


def attached(store: Any, decoupled: bool) -> dict[str, Any]:
    """What the optimizer is given after gradients are reduced, and again after they are scaled.

    Buffers are other tensors by then.
    """
    store.use_decoupled_grad = decoupled
    store.update_main_grads()
    for group in store.parameter_groups:
        left = group.main_grad_buffer.data
        group.main_grad_buffer.data = left.clone()
        left.zero_()
    generator = torch.Generator().manual_seed(3)
    for group in store.parameter_groups:
        data = group.main_grad_buffer.data
        data.copy_(torch.randn(data.shape, generator=generator))
    store.update_main_grads()
    store.scale_gradients(0.3)
    found: dict[str, Any] = {}
    for name, parameter in store.optimizer_named_parameters:
        gradient = getattr(parameter, "decoupled_grad" if decoupled else "grad")
        found[name] = gradient
        if gradient is not None:
            local = gradient._local_tensor
            found[name] = (str(local.dtype), tuple(gradient.shape), local.tolist())
    return found


def installed(store: Any) -> list[Any]:
    """Model weights after each copy from main weights, also into and from other buffers."""
    found = []
    groups = [g for g in store.parameter_groups if g.main_weight_buffer and g.model_weight_buffer]
    for number, moved in enumerate(("", "", "model_weight_buffer", "main_weight_buffer", "")):
        for group in groups:
            buffer = getattr(group, moved, None)
            if buffer is not None:
                left, buffer.data = buffer.data, buffer.data.clone()
                left.zero_()
            group.main_weight_buffer.data.normal_(generator=torch.Generator().manual_seed(number))
        store.copy_main_weights_to_model_weights()
        made = [group.model_weight_buffer.data.view(torch.uint8) for group in groups]
        found.append([one.tolist() for one in made])
    return found


def compare_attached() -> dict[str, Any]:
    from megatron.core import parallel_state

    from megatron_cg.tape.train import build

    runs: dict[str, Any] = {}
    for name, options in OPTIONS.items():
        for decoupled in (False, True):
            fsdp: Any = build(CpuModelConfig(layers=1, hidden_size=16, **options)).module
            store = fsdp.param_and_grad_buffer
            megatrons, weights = attached(store, decoupled), installed(store)
            empty = sum(gradient is None for gradient in megatrons.values())
            found: dict[str, Any] = {"number": len(megatrons), "empty": empty}
            found |= {"pieces": [], "equal": [], "restored": []}
            # Once with DTensors that Megatron-FSDP has made before, once without.
            for _ in range(2):
                scratch: Any = Scratch()
                undo = [install_main_gradients(fsdp, scratch)]
                if name != "no shards":
                    undo.append(install_main_weights(fsdp))
                same = attached(store, decoupled) == megatrons and installed(store) == weights
                found["equal"].append(same)
                found["pieces"].append(scratch.pieces)
                for one in undo:
                    one()
                left = [vars(p).get("decoupled_grad") for _, p in store.optimizer_named_parameters]
                found["restored"].append(decoupled or left == [None] * len(left))
                store.dist_main_grad.clear()
            runs[f"{name}, {decoupled}"] = found
            parallel_state.destroy_model_parallel()
    return runs


def test_attached_gradients_are_those_of_megatron_fsdp() -> None:
    empty_shards = 0
    for runs in on_ranks(compare_attached):
        for name, run in runs.items():
            assert run["equal"] == run["restored"] == [True, True] and run["number"] > 5, name
            empty_shards += run["empty"]
            cast = "in place" not in name and "True" not in name
            copied = run["number"] - run["empty"] if cast else 0
            # Three calls; the first one of the second time is Megatron-FSDP's own.
            assert run["pieces"] == [3 * copied, 2 * copied], name
    assert empty_shards > 0
