"""What a pass changes of Python's state, at any depth, is restored: random states and changes."""

import copy
import random
import sys
from collections import UserDict, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
from importlib.util import module_from_spec, spec_from_file_location
from itertools import repeat
from operator import attrgetter
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any
from weakref import WeakSet

import numpy
import pytest
import torch
from megatron.core.transformer.transformer_layer import TransformerLayer
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.attention.flex_attention import BlockMask
from torch.utils import _pytree as pytree

from megatron_cg.backends.base import CaptureRequest
from megatron_cg.errors import CaptureError, NotRestoredError
from megatron_cg.replay.plain import KNOWN, LIBRARIES, is_known, same_value
from megatron_cg.replay.plain import contents as contents_of
from megatron_cg.tape.tape_backend import TapeBackend
from megatron_cg.units.held import leaves_held
from megatron_cg.units.python_state import PythonState
from tests.unit.units import plain
from tests.unit.units.plain import Training, Unit, assert_as_eager, refused, train, units

OTHERS = plain.REPLAYED - plain.UNITS
CHANGED = {"replayed": OTHERS, "eager": plain.UNITS, "mismatched": plain.UNITS}
"""Counts of units that change before the last step."""


@contextmanager
def observed(value: Any) -> Iterator[PythonState]:
    """What is found in a pass of a module that holds this value."""
    module = Holder()
    module.state = value
    state = PythonState({"": module})
    state.begin()
    yield state
    state.end()


class Plain:
    """An object of no library, such as a configuration."""


class Holder(nn.Module):
    state: Any

    def forward(self) -> None:
        """Names all that is in its state."""
        state: Any = self.state
        if state == 0:  # Never: its code alone counts.
            _ = state.a, state.b, state.c, state.z


def drawn(chance: Random, depth: int) -> Any:
    """A number, None, a container, or an object."""
    kinds = "list", "tuple", "dict", "set", "object", "number"
    kind = chance.choice(kinds) if depth else "number"
    if kind == "number":
        return chance.choice((chance.random(), None))
    several = [drawn(chance, depth - 1) for _ in range(chance.randint(1, 3))]
    if kind == "object":
        made = Plain()
        vars(made).update(zip("abc", several, strict=False))
        return made
    if kind == "set":
        return {chance.randint(0, 9) for _ in several}
    if kind == "dict":
        return dict(zip("abc", several, strict=False))
    return several if kind == "list" else tuple(several)


def parts_of(value: Any) -> list[Any]:
    """All that can be changed in place, by a walk of its own."""
    held = vars(value) if isinstance(value, Plain) else value
    inner: Any = held.values() if isinstance(held, dict) else held
    inner = inner if isinstance(held, dict | list | tuple) else ()
    is_part = isinstance(held, list | dict | set)
    return [held] * is_part + [part for each in inner for part in parts_of(each)]


def change(part: Any, chance: Random) -> None:
    new = chance.random()
    if isinstance(part, set):
        chance.choice((part.clear, lambda: part.add(new)))()
    elif isinstance(part, dict):
        less = partial(part.pop, next(iter(part), None), None)
        chance.choice((part.clear, lambda: part.update(a=new, z=new), less))()
    else:
        chance.choice((part.clear, part.reverse, lambda: part.append(new)))()


def contents(value: Any) -> Any:
    """Its values, without the identity of objects."""
    if isinstance(value, Plain):
        return contents(vars(value))
    if isinstance(value, dict):
        return [(key, contents(each)) for key, each in value.items()]
    return [*map(contents, value)] if isinstance(value, list | tuple) else copy.copy(value)


@pytest.mark.parametrize("named", [False, True])
def test_what_a_pass_changes_is_found_and_restored(named: bool) -> None:
    found = 0
    for seed in range(400):
        chance = Random(seed)
        module = Holder()
        module.state = drawn(chance, 3)
        before, parts = contents(module.state), parts_of(module.state)
        state = PythonState({"": module})
        state.begin()
        if named:
            module()
        for part in chance.sample(parts, k=min(len(parts), 2)):
            change(part, chance)
        if chance.random() < 0.3:
            module.state = chance.random()
        state.end()
        differs = not same_value(contents(module.state), before)
        if named:
            assert any(True for _ in state.changes()) == differs, seed
        state.restorer()()
        assert same_value(contents(module.state), before), seed
        assert [*map(id, parts_of(module.state))] == [*map(id, parts)], seed
        found += differs
    assert found > 100


@pytest.mark.parametrize(
    "name", ["random", "numpy", "own", "of numpy", "old", "of torch", "bound", "partial"]
)
def test_random_states_that_passes_draw_from_are_found_and_restored(name: str) -> None:
    made: dict[str, tuple[Any, Callable[[Any], Any]]] = {
        "random": (random, lambda one: one.random()),
        "numpy": (numpy.random, lambda one: one.rand()),
        "own": (Random(1), lambda one: one.random()),
        "of numpy": (numpy.random.default_rng(1), lambda one: one.random()),
        "old": (numpy.random.RandomState(1), lambda one: one.rand()),
        "of torch": (torch.Generator(), lambda one: torch.rand(1, generator=one)),
        "bound": (Random(1).random, lambda one: one()),
        "partial": (partial(Random(1).uniform, 0, 1), lambda one: one()),
    }
    generator, draw = made[name]
    with observed([{"dice": generator}]) as state:
        pass
    assert not state.put_back_draws() and not [*state.changes()]
    first = draw(generator)
    assert [what.startswith("the random state of ") for what in state.put_back_draws()] == [True]
    assert not state.put_back_draws() and draw(generator) == first


def test_draws_of_other_threads_in_a_verification_are_not_repeated() -> None:
    state = PythonState({"": Holder()})
    with state.kept():
        drawn = random.random(), numpy.random.rand()
    assert (random.random(), numpy.random.rand()) != drawn


class Own(dict[str, int]):
    """A user's own, which may have attributes too."""


class Makes(dict[str, Callable[[], Any]]):
    """Makes what it returns, as ``ACT2FN`` of transformers does."""

    def __getitem__(self, key: str) -> Any:
        return super().__getitem__(key)()


def test_a_dictionary_that_makes_what_it_returns_is_the_same_and_stays_so() -> None:
    with observed(made := Makes(a=Plain)) as state:
        pass
    assert not [*state.changes()] and contents_of(made) == contents_of(made)
    state.restorer()()
    assert made.get("a") is Plain


def test_the_order_of_a_dictionary_and_the_items_of_an_own_one_are_found_and_restored() -> None:
    with observed([ordered := {"a": 1, "b": 2}, own := Own(a=1), weak := WeakSet[type]()]) as state:
        ordered["a"] = ordered.pop("a")
        own["a"] = 2
        weak.add(Own)
    assert [*state.changes()] == ["the order of state[0]", "state[1]['a']", "state[2]"]
    state.restorer()()
    assert [*ordered] == ["a", "b"] and own == {"a": 1} and not weak


def test_what_cannot_be_restored_is_named_and_the_rest_is_restored() -> None:
    context, kept = ContextVar[int]("context"), [1]
    context.set(1)
    with observed([context, kept]) as state:
        context.set(2)
        kept.append(2)
    with pytest.raises(NotRestoredError, match=r"state\[0\]: TypeError"):
        state.restorer()()
    assert kept == [1]


def test_a_graph_draws_from_a_generator_that_is_an_attribute() -> None:
    with observed(generator := torch.Generator()) as state:
        torch.rand(1, generator=generator)
    assert not [*state.changes()]


def test_a_user_may_give_a_file_a_name_of_the_standard_library(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its classes and globals are looked at, as those of any file of a user."""
    file = tmp_path / "profile.py"
    file.write_text("class Settings:\n    power = 1.0\n")
    spec: Any = spec_from_file_location("profile", file)
    made = module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "profile", made)
    spec.loader.exec_module(made)
    assert not is_known(made, LIBRARIES)
    assert not is_known(made.Settings, LIBRARIES)
    assert is_known(Path, LIBRARIES)


@pytest.mark.parametrize("own", [{}, {"forward": TransformerLayer.forward}, {"own": train}])
def test_a_sharded_layer_of_megatron_is_known_if_it_has_no_code_of_its_own(own: Any) -> None:
    kind = type("Sharded", (FSDPModule, TransformerLayer), own)
    assert kind.__module__ == "abc" and is_known(kind, KNOWN | {"torch"}) is not bool(own)


class Does(Unit):
    """Does something with its output, and what it keeps."""

    def __init__(self, what: Callable[[Any, Any], Any], kept: Any) -> None:
        super().__init__()
        self.what, self.kept = what, kept
        vars(self.linear.weight)["calls"] = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = self.what(self, super().forward(x)).sin()
        return made


Kept = SimpleNamespace
HOLDERS: dict[str, tuple[Callable[[Any], Any], Callable[[Any], Any]]] = {
    "itself": (lambda t: t, lambda kept: kept),
    "lists": (lambda t: [[{"a": (t,)}]], lambda kept: kept[0][0]["a"][0]),
    "deque": (lambda t: deque([t]), lambda kept: kept[0]),
    "user's dict": (lambda t: UserDict(a=t), lambda kept: kept["a"]),
    "object": (lambda t: Kept(inner=[Kept(tensor=t)]), lambda kept: kept.inner[0].tensor),
    "partial": (lambda t: partial(torch.mul, t), lambda kept: kept(2.0)),
    "closure": (lambda t: lambda: t, lambda kept: kept()),
}


@pytest.mark.parametrize("name", HOLDERS)
def test_a_tensor_that_code_reads_is_guarded_wherever_it_lies(name: str) -> None:
    make, read = HOLDERS[name]

    def kept(value: float) -> Any:
        return make(torch.full((plain.WIDTH,), value))

    def replace(run: Training) -> None:
        if run.step == plain.STEPS - 1:
            for unit in run.model:
                unit.kept = kept(0.25)

    reads = partial(units, lambda: Does(lambda unit, y: y * read(unit.kept), kept(0.5)))
    assert_as_eager(CHANGED, reads, train, 1, replace)


def sets_in_backward(unit: Any, y: Any) -> torch.Tensor:
    y.grad_fn.register_prehook(lambda gradients: setattr(unit, "norm", gradients[0].norm()))
    made: torch.Tensor = y
    return made


def counts_on_a_weight(unit: Any, y: torch.Tensor) -> torch.Tensor:
    unit.linear.weight.calls += 1
    return y


def sets_computed(unit: Any, y: torch.Tensor) -> torch.Tensor:
    setattr(unit, f"{unit.training}_gain", object())
    return y


def sets_past_setattr(unit: Any, y: torch.Tensor) -> torch.Tensor:
    object.__setattr__(unit, f"{unit.training}_gain", object())
    return y


@dataclass
class Held:
    turns: Any


pytree.register_dataclass(Held)
MASK = BlockMask.from_kv_blocks(
    torch.ones(1, 1, 1, dtype=torch.int32),
    torch.zeros(1, 1, 1, 1, dtype=torch.int32),
    mask_mod=partial(torch.mul, torch.ones(plain.WIDTH)),
)
ITERATOR = "reads attribute kept, an iterator"
REFUSED: dict[str, tuple[str, Callable[[Any, Any], Any], Any]] = {
    "set in backward": ("changes norm in its backward pass", sets_in_backward, None),
    "set under a computed name": ("changes True_gain in its forward pass", sets_computed, None),
    "set past setattr": ("changes True_gain in its forward pass", sets_past_setattr, None),
    "counter of a weight": (
        *("changes attribute linear.weight.calls in its forward", counts_on_a_weight, None),
    ),
    "deep": (
        "reads attribute kept, which leads to more objects",
        lambda unit, y: y * unit.kept[0][0][0][0][0][0][0],
        [[[[[[[1.0]]]]]]],
    ),
    "iterator in a deque": (
        ITERATOR,
        lambda unit, y: y * next(unit.kept["a"][0]),
        UserDict(a=deque([repeat(0.5)])),
    ),
    "deep iterator": (
        ITERATOR,
        lambda unit, y: y * next(unit.kept[0][0][0][0][0][0][0][0][0]),
        [[[[[[[[[repeat(0.5)]]]]]]]]],
    ),
    "iterator in a tree": (
        ITERATOR,
        lambda unit, y: y * next(pytree.tree_leaves(unit.kept)[0]),
        Held(repeat(0.5)),
    ),
    # Nobody would see that it is replaced there.
    "tensor in an object of torch": (
        "where its code gets it from is unknown",
        lambda unit, y: y * unit.kept.mask_mod.args[0],
        MASK,
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_no_row_can_follow_is_refused(name: str) -> None:
    words, what, kept = REFUSED[name]
    refused(CaptureError, words, partial(units, partial(Does, what, kept)))


@dataclass
class Placed:
    height: float = 1.0


def by_place(unit: Any, y: Any) -> Any:
    match unit.kept:
        case Placed(found):
            return y * found


class Inlined(Does):
    """Dynamo inlines the second method in the first one, so nothing calls it."""

    def __init__(self, _what: Any, kept: Placed) -> None:
        super().__init__(lambda unit, y: unit.compiled(y), kept)
        self.compiled = torch.compile(self.first, backend="eager")

    def first(self, y: Any) -> Any:
        return self.second(y)

    def second(self, y: Any) -> Any:
        return y * 2 if self.kept.height > 0.75 else y


def computed(unit: Any, y: Any) -> Any:
    return y * getattr(unit.kept, f"{unit.training}_gain", 1.0)


def past_getattr(unit: Any, y: Any) -> Any:
    return y * object.__getattribute__(unit.kept, f"{unit.training}_gain")


def convolved(unit: Any, y: Any) -> Any:
    return unit.kept(y[:, None])[:, 0]


def loads(_unit: Any, y: Any) -> Any:
    """Reads a global that may not be there, and an attribute of a function."""
    try:
        return y * late  # type: ignore[name-defined]
    except NameError:
        return y * getattr(loads, "gain", 1.0)


height = attrgetter("height")
ELSEWHERE: dict[str, tuple[type[Does], Any, Callable[[], Any], str, Any]] = {
    "by place": (Does, by_place, Placed, "height", 0.5),
    "by a getter": (Does, lambda unit, y: y * height(unit.kept), Placed, "height", 0.5),
    "inlined": (Inlined, by_place, Placed, "height", 0.5),
    "computed": (Does, computed, Plain, "True_gain", 0.5),
    "past getattr": (Does, past_getattr, lambda: SimpleNamespace(True_gain=1.0), "True_gain", 0.5),
    "computed, of a module": (Does, computed, nn.Identity, "True_gain", 0.5),
    "all": (Does, lambda unit, y: y * len(dir(unit.kept)), nn.Identity, "gain", 0.5),
    "of torch": (Does, convolved, partial(nn.Conv1d, 1, 1, 1), "_conv_forward", lambda x, *_: x),
    "a global": (Does, loads, lambda: None, "late", 0.5),
    "of a function": (Does, loads, lambda: loads, "gain", 0.5),
}
"""What is set on what the units keep, and they read without a name or a call."""


@pytest.mark.parametrize("name", ELSEWHERE)
def test_attributes_that_code_reads_without_a_name_or_a_call_have_rows(name: str) -> None:
    kind, what, make, place, value = ELSEWHERE[name]

    def change(run: Training) -> None:
        vars(loads).clear()
        globals().pop("late", None)
        if run.step == plain.STEPS - 1:
            for unit in run.model:
                setattr(unit.kept or sys.modules[__name__], place, value)

    assert_as_eager(CHANGED, partial(units, lambda: kind(what, make())), train, 1, change)


class Config:
    """Hands names on, as the configurations of transformers do."""

    gain, unread = 0.5, 0

    def __getattribute__(self, name: str) -> Any:
        return super().__getattribute__(name)


def test_code_that_hands_names_on_reads_no_others() -> None:
    def change(run: Training) -> None:
        for unit in run.model:
            unit.kept.unread = run.step

    reads = partial(units, lambda: Does(lambda unit, y: y * unit.kept.gain, Config()))
    assert_as_eager({"replayed": plain.REPLAYED, "mismatched": 0}, reads, train, 1, change)


def test_a_container_in_itself_has_its_leaves() -> None:
    nested: list[Any] = ["a", ({"b": [tensor := torch.zeros(1)]},)]
    assert [*map(id, leaves_held(nested))] == [id(nested[0]), id(tensor)]
    nested.append(nested)
    assert tensor in leaves_held(nested)


class OwnCallTape(TapeBackend):
    """As TE, its capture makes an inherited ``__call__`` the class's own until it is put back."""

    def capture(self, request: CaptureRequest) -> Any:
        graphs = super().capture(request)
        for kind in {type(module) for module in request.callables}:
            kind.__call__ = kind.__call__  # type: ignore[method-assign]
        return graphs

    @contextmanager
    def preserved(self, callables: Sequence[nn.Module]) -> Iterator[None]:
        with super().preserved(callables):
            yield
        for kind in {type(module) for module in callables}:
            if vars(kind).get("__call__") is nn.Module.__call__:
                del kind.__call__


class Called(Unit):
    """A class without ``__call__`` of its own."""


@pytest.mark.parametrize("replaces", [False, True])
def test_an_inherited_call_that_capture_makes_own_is_no_change_and_another_one_is(
    replaces: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def change(run: Training) -> None:
        def call(unit: Called, x: torch.Tensor) -> Any:
            return nn.Module.__call__(unit, x)

        if replaces and run.step == plain.STEPS - 1:
            monkeypatch.setattr(Called, "__call__", call)

    changed = plain.UNITS * replaces
    counts = {"replayed": plain.REPLAYED - changed, "mismatched": changed}
    assert_as_eager(counts, partial(units, Called), train, 1, change, backend=OwnCallTape())
