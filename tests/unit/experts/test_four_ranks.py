"""Four ranks train bit for bit as eager, however the model is split over them."""

from functools import partial
from typing import Any

import pytest

from tests.unit.experts.test_training import Model, check, train_all
from tests.unit.ranks import on_ranks

RANKS = 4
TWO_GROUPS = {"num_distributed_optimizer_instances": 2}
"""Weights are sharded over two ranks, twice (HSDP)."""
OUTER_SHARDS = {**TWO_GROUPS, "outer_dp_sharding_strategy": "optim"}
"""And the optimizer's state is sharded over all four (HFSDP)."""
WHOLE_AND_PARTS = ("fast", "router")
DENSE: dict[str, Any] = {"experts": 0, "grouped": False, "ways": ("dense",)}
LAYOUTS = {
    "EP 2 x FSDP 2": Model(2, ways=WHOLE_AND_PARTS),
    "EP 4": Model(4, experts=8),
    "TP 2 x FSDP 2": Model(tensor_parallel=2, **DENSE),
    "HSDP 2 x 2": Model(fsdp=TWO_GROUPS, **DENSE),
    "HFSDP 2 x 2": Model(fsdp=OUTER_SHARDS, ways=WHOLE_AND_PARTS),
}
CASES = [(name, way) for name, model in LAYOUTS.items() for way in model.ways]


@pytest.fixture(scope="module")
def results() -> list[dict[str, Any]]:
    return on_ranks(partial(train_all, LAYOUTS), RANKS)


@pytest.mark.parametrize(("layout", "way"), CASES)
def test_layers_train_as_megatrons(results: list[dict[str, Any]], layout: str, way: str) -> None:
    for found in results:
        check(found[layout], LAYOUTS[layout], way)
