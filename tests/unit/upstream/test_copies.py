"""Copies of graphed layers, as an average of the weights makes them: plain, eager layers."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed import distributed_c10d as c10d

from megatron_cg.backends.tape.tape_backend import TapeBackend
from megatron_cg.hooks.hook_records import FLAG_REGISTRIES, HookKind
from megatron_cg.memory.storage import StorageReference
from megatron_cg.upstream.copies import look_after, look_before
from megatron_cg.upstream.patch import set_attribute
from tests.unit.counted import expect

WAYS: dict[str, Callable[[Any], Any]] = {
    "copy": copy.copy,
    "deepcopy": copy.deepcopy,
    "pickle": lambda value: pickle.loads(pickle.dumps(value)),
    # Reduced to three items, where later protocols have five.
    "pickle by protocol 0": lambda value: pickle.loads(pickle.dumps(value, protocol=0)),
}
KEPT = 0.9
STEPS = 4


class Inner(nn.Linear):
    """With an attribute that every instance has, and one that only some have."""

    def __init__(self) -> None:
        super().__init__(4, 4)
        self.graphs: list[str] = []


def never(*_args: Any, **_kwargs: Any) -> None:
    raise AssertionError("the original's")


def of_the_user(_module: nn.Module, _args: Any) -> None:
    """A hook that is not ours."""


@pytest.mark.parametrize("way", WAYS)
def test_a_copy_has_what_was_there_before_our_changes(way: str) -> None:
    module = Inner()
    own = dict(vars(module))
    undo = [
        set_attribute(module, "forward", lambda x: x),
        set_attribute(module, "forward", never),
        set_attribute(module, "graphs", ["a graph"]),
        look_before(module, never),
        look_after(module, never),
    ]
    theirs = module.register_forward_pre_hook(of_the_user)
    made = WAYS[way](module)
    assert vars(made).keys() == own.keys() and type(made) is Inner
    assert made.graphs == [] and list(made._forward_pre_hooks) == [theirs.id]
    assert not made._forward_hooks and len(module._forward_hooks) == 1
    made._forward_pre_hooks.clear()
    x = torch.ones(2, 4)
    assert torch.equal(made(x), nn.functional.linear(x, module.weight, module.bias))
    assert module.graphs == ["a graph"] and len(module._forward_pre_hooks) == 2
    for one in reversed(undo):
        one()
    theirs.remove()
    assert vars(module).keys() == own.keys()
    assert not module._forward_pre_hooks and not module._forward_hooks
    assert vars(WAYS[way](module)).keys() == own.keys()


class OwnState(Inner):
    """Leaves its hooks out of its state, so that it can be pickled with lambdas on it."""

    def __getstate__(self) -> dict[str, Any]:
        return {key: value for key, value in vars(self).items() if not key.endswith("_hooks")}


@pytest.mark.parametrize("way", WAYS)
def test_a_module_may_have_a_state_without_hooks(way: str) -> None:
    module = OwnState()
    expected = vars(WAYS[way](module)).keys()
    undo = set_attribute(module, "forward", never)
    assert vars(WAYS[way](module)).keys() == expected
    undo()


class Listed(Inner, list[str]):
    """A module that is a list as well."""


@pytest.mark.parametrize("way", WAYS)
def test_a_copy_of_a_module_that_is_a_list_has_its_items(way: str) -> None:
    module = Listed()
    module.extend(["one", "two"])
    undo = set_attribute(module, "forward", never)
    made = WAYS[way](module)
    assert list(made) == ["one", "two"] and "forward" not in vars(made)
    undo()


class OwnCopies(Inner):
    """Makes its copies itself, of all that it has."""

    def __deepcopy__(self, memo: dict[int, Any]) -> OwnCopies:
        made = type(self).__new__(type(self))
        vars(made).update(copy.deepcopy(vars(self), memo))
        return made


class OwnReduce(Inner):
    """Has its state among the arguments of a function, as generated modules have."""

    def __reduce__(self) -> Any:
        return _with_state, (type(self), dict(vars(self)))


def _with_state(kind: type[Inner], state: dict[str, Any]) -> Inner:
    made = kind.__new__(kind)
    vars(made).update(state)
    return made


def generated() -> Any:
    made: Any = torch.fx.symbolic_trace(Inner())
    made.graphs = []
    return made


@pytest.mark.parametrize("make", [OwnCopies, OwnReduce, generated])
def test_a_class_with_a_way_of_its_own_is_refused(make: Callable[[], Any]) -> None:
    module = make()
    own = dict(vars(module))
    undo = set_attribute(module, "forward", never)
    with pytest.raises(TypeError, match=r"copies itself by a method of its own.*after close"):
        copy.deepcopy(nn.Sequential(module))
    undo()
    assert vars(module) == own
    copy.deepcopy(module)


def test_a_copy_inside_another_is_the_copy_of_the_whole() -> None:
    outer = nn.Sequential(Inner(), Inner())
    undo = set_attribute(outer[0], "forward", never)
    clones = {id(p): nn.Parameter(p.detach().clone()) for p in outer.parameters()}
    made = copy.deepcopy(outer, dict(clones))
    assert made[0].weight is clones[id(outer[0].weight)] and "forward" not in vars(made[0])
    assert made(torch.ones(4)).shape == (4,)
    undo()


@pytest.mark.parametrize("way", WAYS)
def test_a_reference_to_memory_is_not_copied(way: str) -> None:
    reference = StorageReference(torch.ones(8).untyped_storage())
    kept = torch.ones(8)
    alive = StorageReference(kept.untyped_storage())
    assert reference.expired() and reference.storage() is None
    found = alive.storage()
    assert not alive.expired() and found is not None and found.data_ptr() == kept.data_ptr()
    for one in (reference, alive):
        with pytest.raises(TypeError, match=r"cannot be copied or pickled\. Copy the module"):
            WAYS[way](one)


@pytest.fixture
def make(one_rank: None) -> Iterator[Callable[[str], Any]]:
    """Makes a trainer of two dense layers, of the scopes given; none is the whole layer.

    An MoE layer cannot be copied, even without graphs: its dispatcher keeps activations.
    """
    from megatron.core import parallel_state

    from megatron_cg.tools.cpu.train import Trainer
    from megatron_cg.tools.cpu.training_plan import CpuModelConfig, TrainingPlan

    made: list[Any] = []

    def trainer(scopes: str) -> Any:
        parallel_state.destroy_model_parallel()
        modules = tuple(scopes.split())
        model = CpuModelConfig(layers=2, graph_modules=modules, bf16=False)
        made.append(Trainer(TrainingPlan(model)))
        return made[-1]

    yield trainer
    for one in made:
        if one.session is not None:
            one.session.close()


def copied(module: nn.Module) -> nn.Module:
    """A copy as for an average: the weights are clones, and process groups are shared."""
    memo: dict[int, Any] = {id(group): group for group in c10d._world.pg_map}
    for parameter in module.parameters():
        distributed: Any = parameter
        memo[id(parameter)] = nn.Parameter(distributed.full_tensor().detach().clone())
    return copy.deepcopy(module, memo)


def without_hooks(module: nn.Module) -> nn.Module:
    """Without Megatron-FSDP's own hooks, which know nothing of a copy's parameters."""
    for one in module.modules():
        for name in (*(kind.value for kind in HookKind), *FLAG_REGISTRIES):
            getattr(one, name).clear()
    return module


def shown(module: nn.Module) -> list[Any]:
    """What each module has, by name: attributes and hooks."""
    return [
        (name, sorted(vars(one)), [len(getattr(one, kind.value)) for kind in HookKind])
        for name, one in module.named_modules()
    ]


def passed(layer: Any) -> list[torch.Tensor]:
    """Output and gradients of one pass through a layer that is no part of a model any more."""
    x = torch.arange(16 * 2 * 32.0).reshape(16, 2, 32).sin().requires_grad_()
    mask = torch.triu(torch.ones(1, 1, 16, 16, dtype=torch.bool), 1)
    output, _ = layer(hidden_states=x, attention_mask=mask)
    layer.zero_grad()
    output.square().sum().backward()
    return [output.detach(), *(p.grad for p in (x, *layer.parameters()) if p.grad is not None)]


def averaged(trainer: Any, *, graphs: bool) -> list[Any]:
    """Steps with an average of the weights beside them; what was trained and what copies do."""
    from megatron_cg.tools.cpu.cpu_model import transformer_layers

    numbers: list[Any] = [trainer.step()]
    layer = transformer_layers(trainer.model)[0]
    average = without_hooks(copied(layer))
    if graphs:
        trainer.capture(TapeBackend())
    for _ in range(STEPS):
        numbers.append(trainer.step())
        now = copied(layer)
        numbers.append(shown(now))
        for old, new in zip(average.parameters(), without_hooks(now).parameters(), strict=True):
            old.data.mul_(KEPT).add_(new.data, alpha=1 - KEPT)
        numbers += [[t.tolist() for t in passed(one)] for one in (now, average)]
        assert type(now.config) is type(trainer.model.config) and now.cuda_graphs == []
    return numbers


@pytest.mark.parametrize("scopes", ["attn", ""], ids=["attn", "whole layer"])
def test_an_average_of_the_weights_is_that_of_an_eager_run(
    make: Callable[[str], Any], scopes: str
) -> None:
    """The copies are the same in every attribute, hook and bit; and the graphs replay on."""
    eager = averaged(make(scopes), graphs=False)
    trainer = make(scopes)
    assert averaged(trainer, graphs=True) == eager
    expect(trainer.session.counters, captured=2, replayed=2 * STEPS, eager=0)


def test_a_whole_model_is_copied_and_trains_on_without_its_graphs(make: Callable[..., Any]) -> None:
    """Also where layers have scopes of their own, and graphs without masks."""
    from megatron_cg.integrations.megatron.scopes import give_scopes
    from megatron_cg.tools.cpu.cpu_model import transformer_layers

    trainer = make("attn mlp")
    trainer.step()
    inner = trainer.model.module.module
    before = shown(inner)
    layer = transformer_layers(trainer.model)[1]
    undo = give_scopes(layer, layer.config.cuda_graph_modules)
    trainer.capture(TapeBackend())
    trainer.step()
    made = copied(inner)
    assert shown(made) == before and shown(inner) != before
    assert type(layer.config).__name__ == "LayerConfig"
    assert type(copy.copy(layer.config)) is type(inner.config)
    first, second = transformer_layers(made)
    assert first.config is second.config is made.config
    trainer.session.close()
    undo()
    assert shown(inner) == before


def test_a_graph_itself_is_not_copied(make: Callable[..., Any]) -> None:
    from megatron_cg.tools.cpu.cpu_model import transformer_layers

    trainer = make("attn")
    trainer.step()
    trainer.capture(TapeBackend())
    (graph,) = transformer_layers(trainer.model)[0].cuda_graphs
    for way in WAYS.values():
        with pytest.raises(TypeError, match=r"the graph of layer 0 cannot be copied or pickled"):
            way(graph)
    trainer.step()
    expect(trainer.session.counters, replayed=2, eager=0)
