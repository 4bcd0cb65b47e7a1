"""Training states without walks: each module has the state that Megatron-FSDP gives it."""

from contextlib import suppress
from functools import partial, partialmethod
from typing import Any
from unittest import mock

import pytest
from torch import nn

from megatron_cg.fastpath.training_states import _Modules, set_states_at_once
from megatron_cg.tape.tape_backend import TapeBackend
from megatron_cg.tape.training_plan import CpuModelConfig
from tests.unit.fastpath.test_between_passes import layers, linear, other_module
from tests.unit.fastpath.test_gather import RECOMPUTED
from tests.unit.trainers import trainer_of

STATE, GATHER = "_training_state", "all_gather_and_wait_parameters_ready"


def of_class(_fsdp: Any, mlp: Any, _fc: Any, **own: Any) -> None:
    mlp.__class__ = type("Other", (type(mlp),), own)


KEPT = property(lambda m: m.__dict__.get("kept"), lambda m, state: m.__dict__.update(kept=state))
CHANGES: dict[str, Any] = {
    "nothing": (lambda *_: None, 0),
    "modules": (lambda fsdp, *_: other_module(fsdp), 3),
    "a module": (lambda _, mlp, __: mlp.add_module("new", nn.Identity()), 2),
    "a state": (lambda _, __, fc: fc.__dict__.pop(STATE), 1),
    "a class": (of_class, 2),
    "assignments": (partial(of_class, __setattr__=lambda m, n, v: m.__dict__.update({n: [v]})), 6),
    "a walk": (partial(of_class, named_modules=partialmethod(nn.Module.named_modules)), 6),
    "a property": (partial(of_class, _training_state=KEPT), 6),
    "a buffer": (lambda _, __, fc: fc._buffers.setdefault(STATE, fc.__dict__.pop(STATE)), 2),
    "a pass": (lambda *of: [p.register_hook(lambda g: g.x) for p in of[0].raw_param.values()], 0),
}
"""And the walks that follow, of which one a step is over all modules."""


def trained(run: str, change: str, ours: bool) -> tuple[list[Any], list[int]]:
    """The states whenever Megatron-FSDP gathers and releases, and walks until after each step."""
    seen: list[Any] = []
    shape = CpuModelConfig(layers=2, options=RECOMPUTED if run == "recomputed" else {})
    counting = mock.patch.object(_Modules, "_walk", autospec=True, side_effect=_Modules._walk)
    with trainer_of(shape, graphs=run == "graphs") as trainer, counting as walk:
        fsdp, counts = trainer.model.module, [0]

        def note(own: Any, *args: Any, **named: Any) -> Any:
            seen.append(str([getattr(m, STATE, None) for m in nn.Module.modules(fsdp.module)]))
            return own(*args, **named)

        for owner, name in ((fsdp, GATHER), (fsdp.all_gather_pipeline, "release_bucket")):
            setattr(owner, name, partial(note, getattr(owner, name)))
        trainer.step()
        if run == "graphs":
            trainer.capture(TapeBackend(), fast_path=False)
        undo = set_states_at_once(fsdp) if ours else lambda: None
        for number in range(4):
            if number == 2:
                CHANGES[change][0](fsdp, layers(fsdp)[0].mlp, linear(fsdp))
            with suppress(AttributeError, TypeError):
                seen.append(trainer.step())
            note(counts.append, walk.call_count)
        assert [*fsdp.module.modules()] == [*nn.Module.modules(fsdp.module)]
        undo()
    return seen, counts


RUNS = [("plain", change) for change in CHANGES] + [("graphs", "nothing")]
RUNS += [("recomputed", change) for change in ("nothing", "assignments", "a pass")]


@pytest.mark.parametrize(("run", "change"), RUNS)
def test_modules_have_the_states_of_megatron_fsdp(one_rank: None, run: str, change: str) -> None:
    (theirs, none), (ours, walks) = (trained(run, change, one) for one in (False, True))
    assert ours == theirs and len(ours) > 20
    assert none == [0] * 5 and walks[:3] == [0, 3, 3] and walks[4] == 3 + CHANGES[change][1]
