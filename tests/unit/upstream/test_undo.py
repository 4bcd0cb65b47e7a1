"""An undo restores what is still ours, leaves later changes by others, and names both."""

import copy
import gc
import inspect
import pickle
import sys
import weakref
from collections.abc import Callable
from functools import partial, wraps
from itertools import permutations
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

from megatron_cg.backends.driver import StorageReference
from megatron_cg.upstream.patch import (
    add_observer,
    applied,
    cells_of,
    replace_function,
    set_attribute,
    wrap_method,
)

Events = list[str]


def theirs_over(owner: Any, name: str, events: Events) -> Callable[..., Any]:
    """Another package's wrapper, installed in the usual way."""
    beneath = getattr(owner, name)

    @wraps(beneath)
    def theirs(*args: Any, **kwargs: Any) -> Any:
        events.append("theirs")
        return beneath(*args, **kwargs)

    setattr(owner, name, theirs)
    return theirs


def stepping() -> Any:
    return torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1)


def warned(caplog: pytest.LogCaptureFixture) -> list[str]:
    found = [record.getMessage() for record in caplog.records]
    caplog.clear()
    return found


def test_a_schedule_of_torchs_may_wrap_a_step_of_ours(caplog: pytest.LogCaptureFixture) -> None:
    optimizer, events = stepping(), Events()
    undo = wrap_method(optimizer, "step", after=lambda: events.append("ours"))
    LambdaLR(optimizer, lambda _: 1.0)
    weight = optimizer.param_groups[0]["params"][0]
    weight.grad = torch.ones(1)
    optimizer.step()
    undo()
    optimizer.step()
    assert events == ["ours"]
    assert torch.equal(weight.detach(), torch.ones(1) - 0.1 - 0.1)
    assert "SGD.step is left as it is" in warned(caplog)[0]


def test_a_value_that_somebody_changed_or_took_away_stays_so(
    caplog: pytest.LogCaptureFixture,
) -> None:
    config = SimpleNamespace(mode="old")
    undo = set_attribute(config, "mode", "ours")
    config.mode = "theirs"
    undo()
    assert config.mode == "theirs"
    assert "'theirs' was put there after 'ours'" in warned(caplog)[0]
    shared = set_attribute(config, "mode", "ours", shared=True)
    config.mode = "another"
    shared()
    assert config.mode == "theirs" and not warned(caplog)
    undo = set_attribute(config, "new", "ours")
    del config.new
    undo()
    assert vars(config) == {"mode": "theirs"}
    assert "nothing was put there after 'ours'" in warned(caplog)[0]


@pytest.mark.parametrize("order", [*permutations(range(3))], ids=str)
@pytest.mark.parametrize("theirs_after", [None, 0, 1, 2])
def test_changes_of_ours_may_be_undone_in_any_order(
    order: tuple[int, ...], theirs_after: int | None, caplog: pytest.LogCaptureFixture
) -> None:
    events = Events()
    owner: Any = SimpleNamespace(run=lambda: events.append("own"), flag=False)
    own = owner.run
    undos, flags = [], []
    for number in range(3):
        undos.append(wrap_method(owner, "run", before=partial(events.append, str(number))))
        flags.append(set_attribute(owner, "flag", True))
        if number == theirs_after:
            theirs_over(owner, "run", events)
    left = {"0", "1", "2"}
    for number in order:
        undos[number]()
        flags[number]()
        left.remove(str(number))
        events.clear()
        owner.run()
        expected = {*left, "own"} | ({"theirs"} if theirs_after is not None else set())
        assert set(events) == expected and len(events) == len(expected)
        assert owner.flag is bool(left)
    assert (owner.run is own) is (theirs_after is None)
    assert bool(warned(caplog)) is (theirs_after is not None)


def test_closure_variables_are_put_back_only_while_they_are_ours(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def made() -> tuple[Callable[[], str], Callable[[], str]]:
        def inner() -> str:
            return "own"

        def outer() -> str:
            return inner()

        return outer, inner

    outer, own = made()
    cell = cells_of(outer)["inner"]
    undo = replace_function(cell, "cell_contents", lambda: "ours")
    assert outer() == "ours"
    ours = cell.cell_contents
    cell.cell_contents = lambda: f"theirs over {ours()}"
    undo()
    assert outer() == "theirs over own" and len(warned(caplog)) == 1
    cell.cell_contents = own
    undo = set_attribute(cell, "cell_contents", lambda: "ours")
    undo()
    assert cell.cell_contents is own and not warned(caplog)


def frame_above() -> Any:
    return sys._getframe(1)


def test_no_frame_stands_between_a_caller_and_a_function_of_ours() -> None:
    def inner() -> Any:
        return None

    def outer() -> Any:
        return inner()

    owner: Any = SimpleNamespace(run=lambda: None)
    module: Any = nn.Linear(1, 1)
    undos = [
        replace_function(one, name, frame_above)
        for one, name in ((owner, "run"), (module, "forward"))
    ]
    inner_of = cells_of(outer)["inner"]
    undos.append(replace_function(inner_of, "cell_contents", frame_above))
    here = sys._getframe()
    assert owner.run() is here and module.forward() is here
    assert outer().f_code is outer.__code__
    for undo in undos:
        undo()


def test_a_method_of_a_class_gets_its_object_and_keeps_its_signature(
    caplog: pytest.LogCaptureFixture,
) -> None:
    class Owner:
        def run(self, value: int) -> Any:
            return "own", self, value

    def ours(self: Any, *args: Any) -> Any:
        return "ours", self, *args

    own, one = Owner.run, Owner()
    undo = replace_function(Owner, "run", ours)
    left: Any = vars(Owner)["run"]
    assert one.run(3) == ("ours", one, 3)
    assert list(inspect.signature(one.run).parameters) == ["value"]
    assert inspect.unwrap(Owner.run, stop=lambda found: found is ours) is ours
    undo()
    assert Owner.run is own and left.__get__(one)(4) == ("own", one, 4)
    assert not warned(caplog)


@pytest.mark.parametrize("number", [1, 2])
def test_an_object_whose_undo_was_dropped_is_freed(number: int) -> None:
    optimizer = stepping()
    for _ in range(number):
        wrap_method(optimizer, "step", after=lambda: None)
        set_attribute(optimizer, "flag", True)
    gone = weakref.ref(optimizer)
    del optimizer
    gc.collect()
    assert gone() is None


WAYS: dict[str, Callable[[Any], Any]] = {
    "copy": copy.copy,
    "deepcopy": copy.deepcopy,
    "pickle": lambda value: pickle.loads(pickle.dumps(value)),
    "pickle by protocol 0": lambda value: pickle.loads(pickle.dumps(value, protocol=0)),
}


@pytest.mark.parametrize("way", WAYS)
def test_a_module_with_changes_of_ours_is_not_copied(way: str) -> None:
    module = nn.Linear(1, 1)
    own = dict(vars(module))
    undos = [
        set_attribute(module, "forward", lambda rows: rows),
        add_observer(module, lambda *_: None),
        add_observer(module, lambda *_: None, after=True),
    ]
    for undo in undos:
        with pytest.raises(TypeError, match=r"cannot be copied or pickled.*or after close\(\)"):
            WAYS[way](module)
        undo()
        undo()
    assert vars(module) == own and not module._forward_hooks
    rows = torch.ones(1, 1)
    assert torch.equal(WAYS[way](module)(rows), module(rows))


@pytest.mark.parametrize("way", WAYS)
def test_a_reference_to_memory_is_not_copied(way: str) -> None:
    kept = torch.ones(8)
    alive = StorageReference(kept.untyped_storage())
    gone = StorageReference(torch.ones(8).untyped_storage())
    assert gone.expired() and gone.storage() is None
    storage = alive.storage()
    assert not alive.expired() and storage is not None and storage.data_ptr() == kept.data_ptr()
    for reference in (gone, alive):
        with pytest.raises(TypeError, match=r"cannot be copied or pickled\. Copy the module"):
            WAYS[way](reference)


def test_changes_in_force_are_listed_by_location() -> None:
    before = applied()
    owners = [stepping(), stepping()]
    undos = [replace_function(owner, "step", lambda: None) for owner in owners]
    undos.append(set_attribute(owners[0], "table", torch.zeros(3)))
    assert applied() == sorted([*before, "SGD.step", "SGD.step", "SGD.table"])
    for undo in undos:
        undo()
    assert applied() == before
