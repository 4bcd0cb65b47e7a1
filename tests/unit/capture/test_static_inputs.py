"""Which inputs of layers are read in place."""

from __future__ import annotations

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from megatron_cg.capture.static_inputs import StaticInputs


class Layer(nn.Module):
    def forward(self, x: torch.Tensor, **_more: object) -> torch.Tensor:
        return x


def seen(steps: int, *tables: object) -> tuple[StaticInputs, Layer]:
    """A layer that is given the tables in turn, one in each step."""
    layer = Layer()
    inputs = StaticInputs([layer])
    for step in range(steps):
        stop = inputs.observe_step()
        layer(torch.ones(1), table=tables[min(step, len(tables) - 1)])
        stop()
    return inputs, layer


def replaced(found: tuple[StaticInputs, Layer], sample: torch.Tensor) -> torch.Tensor:
    inputs, layer = found
    return inputs.replace_in(layer, {"table": sample})["table"]


def test_only_a_table_that_never_changes_takes_the_place_of_a_sample_after_two_steps() -> None:
    table, sample, other = torch.ones(3), torch.zeros(3), torch.ones(3)
    assert replaced(seen(2, table), sample) is table
    learned = torch.ones(3, requires_grad=True)
    changing = seen(3, table, other), seen(3, table, None, table), seen(2, learned)
    for found in (seen(1, table), *changing):
        assert replaced(found, sample) is sample


def test_a_table_unlike_the_sample_is_not_read_in_place() -> None:
    table = torch.ones(3)
    inputs, layer = seen(2, table)
    unlike = (torch.zeros(4), torch.zeros(3).half(), torch.zeros(6)[::2])
    for sample in (*unlike, torch.zeros(3, device="meta"), torch.zeros(3, requires_grad=True)):
        assert replaced((inputs, layer), sample) is sample


def test_a_table_is_the_same_where_a_recomputation_has_a_detached_one() -> None:
    table, sample, layer = torch.ones(3), torch.zeros(3), Layer()
    inputs = StaticInputs([layer])
    calls: list[object] = []

    def run(x: torch.Tensor, given: torch.Tensor) -> torch.Tensor:
        calls.append(given)
        out: torch.Tensor = layer(x * 2, table=given)
        return out

    for _ in range(2):
        stop = inputs.observe_step()
        out = checkpoint(run, torch.ones(1, requires_grad=True), table, use_reentrant=True)
        out.sum().backward()
        stop()
    assert [given is table for given in calls] == [True, False] * 2
    assert replaced((inputs, layer), sample) is table
