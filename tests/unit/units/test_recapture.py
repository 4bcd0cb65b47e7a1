"""Units are captured again after a change that lasts, if that was asked for."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from megatron_cg.replay.mismatch_policy import Counters
from tests.unit.counted import expect
from tests.unit.ranks import on_ranks
from tests.unit.units import plain
from tests.unit.units.plain import UNITS, WARMUP, WIDTH, Training, Unit, same, units
from tests.unit.units.sharded import MICROBATCHES, Case, Run, equal
from tests.unit.units.test_sharded import WRAPS

STEPS, EVERY, CHANGE = 16, 2, 5
"""The first capture comes in step 2, and the change in the fourth step with graphs."""


class Growing(Unit):
    """Has a scale and, frozen at first, a second layer."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.second = 1.0, nn.Linear(WIDTH, WIDTH).requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = super().forward(x) * self.scale + self.second(x)
        return out


def unfreeze(run: Training) -> None:
    run.model[0].second.requires_grad_(True)
    run.optimizer.add_param_group({"params": run.model[0].second.parameters()})


def set_schedule(run: Training) -> None:
    run.model[0].scale = 0.5


def in_double(run: Training) -> None:
    run.optimizer = torch.optim.AdamW(run.model.double().parameters(), lr=0.1)
    run.microbatch = lambda run, x: plain.train(run, x.double())


@pytest.fixture(autouse=True)
def _long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plain, "STEPS", STEPS)


def trained(before: Callable[[Training], object], **options: Any) -> Counters:
    eager, graphed = (Training(partial(units, Growing), before=before) for _ in range(2))
    expected = list(eager.run())
    with graphed.graphs(**options) as graphs:
        assert same(expected, graphed.run(graphs))
    return graphs.counters


def once(change: Callable[[Training], object]) -> Callable[[Training], object]:
    return lambda run: change(run) if run.step == CHANGE else None


CHANGES = {unfreeze: 1, set_schedule: 1, in_double: 2}
"""And how many units have a mismatch then."""


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_that_lasts_is_captured_after_so_many_steps(change: Any) -> None:
    counters = trained(once(change), recapture=EVERY)
    without = EVERY * CHANGES[change]
    replayed = (STEPS - 2 * WARMUP) * UNITS - without
    expect(counters, captured=2 * UNITS, mismatched=without, eager=without, replayed=replayed)


SCALES: list[tuple[Callable[[int], float], int, int]] = [
    (lambda step: step % 2, EVERY, 1),
    (lambda step: step, 1, 3),
]
"""By step, with ``recapture`` and the number of captures: the second waits longer each time."""


@pytest.mark.parametrize(("scale", "every", "captures"), SCALES)
def test_a_change_that_comes_and_goes_is_seldom_captured(
    scale: Callable[[int], float], every: int, captures: int
) -> None:
    def before(run: Training) -> None:
        run.model[0].scale = 1.0 + scale(run.step)

    counters = trained(before, recapture=every)
    expect(counters, captured=captures * UNITS)


def test_units_that_are_no_more_are_a_capture_that_fails() -> None:
    def change(run: Training) -> None:
        del run.model[1]
        set_schedule(run)

    counters = trained(once(change), recapture=1, units=["0", "1"], on_failure="eager")
    expect(counters, captured=UNITS, mismatched=1)


class Unguarded(Growing):
    file: Path
    """No guard reads files."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * float(self.file.read_text())


OFF = [
    ({"verify_interval": 3}, {"captured": 2 * UNITS, "replayed": 2 * UNITS + STEPS - 7}),
    ({"verify_steps": 3}, {"captured": UNITS, "replayed": 2 * UNITS + 1}),
]


@pytest.mark.parametrize(("options", "counts"), OFF)
def test_what_a_verification_has_turned_off_stays_off(
    options: Any, counts: dict[str, int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of one unit in the third step with graphs, while the other one has a mismatch."""
    monkeypatch.setattr(Unguarded, "file", tmp_path / "scale", raising=False)

    def before(run: Training) -> None:
        Unguarded.file.write_text("1" if run.step < CHANGE - 1 else "0.5")
        if run.step == CHANGE - 1:
            set_schedule(run)

    run = Training(partial(units, Unguarded), before=before)
    with run.graphs(recapture=1, **options) as graphs:
        run.microbatch = lambda *of: graphs.verified(partial(plain.train, *of))
        list(run.run(graphs))
    expect(graphs.counters, **counts)


def double_on_one_rank(run: Run, step: int) -> None:
    if step == 3 and dist.get_rank() == 1:
        run.network.doubled = True


def freeze_on_one_rank(run: Run, step: int) -> None:
    if step == 1 and dist.get_rank() == 1:
        run.network.layers[0].get_parameter("scale").requires_grad_(False)


@contextmanager
def together(_model: Any, _last: bool) -> Iterator[None]:
    """A loop has collectives of its own."""
    dist.barrier()
    yield


def run_each() -> dict[str, Any]:
    """By way of sharding, whether a run equals an eager one, and its counters."""
    found = {}
    changed: Any = {"options": {"recapture": EVERY}, "before_step": double_on_one_rank}
    cases = {way: Case(wrap, **changed) for way, wrap in WRAPS.items()}
    frozen: Any = {"before_step": freeze_on_one_rank, "microbatch": together}
    for way, case in (cases | {"none": Case(lambda network: network, **frozen)}).items():
        plain, graphed = Run(case), Run(case)
        plain.train(10)
        graphed.train(10, graphed=True)
        assert graphed.graphs is not None
        found[way] = equal(plain, graphed), graphed.graphs.counters.as_dict()
    return found


def test_all_ranks_capture_again_if_one_has_changed() -> None:
    """Mismatches in steps 3 to 5, a vote in step 6 that rank 1 wins, and a capture in step 7.

    With no sharding a weight is frozen in step 1: all ranks observe that step too.
    """
    passes = 3 * MICROBATCHES
    for rank, found in enumerate(on_ranks(run_each)):
        for way, (is_equal, counters) in found.items():
            again = way != "none"
            eager = 3 * passes * rank * again
            expected = {"captured": 3 + 3 * again, "mismatched": eager}
            expected["replayed"] = 8 * passes - eager
            assert is_equal and counters | expected == counters, way
