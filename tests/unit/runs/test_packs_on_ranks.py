"""Packs of more sequences than graphs take, on one rank alone or on both."""

from __future__ import annotations

from contextlib import ExitStack
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch.distributed as dist
from torch.multiprocessing.spawn import ProcessRaisedException

from megatron_cg.consensus import exchange
from megatron_cg.errors import ReplayMismatchError
from megatron_cg.integrations.megatron.packs import fix_packs
from megatron_cg.tools.cpu.launch import run_processes
from megatron_cg.tools.cpu.training_plan import CpuModelConfig
from tests.functional.tampering.packs import boundaries
from tests.unit.moe.test_life import captured
from tests.unit.ranks import on_ranks
from tests.unit.runs.test_one_rank_failures import no_hang
from tests.unit.runs.test_packed_sequences import attention_of_packs
from tests.unit.trainers import trainer_of

LAYERS, LENGTH, MOST = 2, 8, 2
FITS, ALSO, MORE = (0, 3, LENGTH), (0, LENGTH), (0, 1, 2, LENGTH)


def train(scopes: tuple[str, ...], packs: tuple[tuple[int, ...], ...], graphs: bool) -> Any:
    """Losses and norms of steps with these packs, and the counts of the graphs; captured after one.

    The two ranks share the experts.
    """
    from megatron_cg.moe.install import use_device_counts
    from megatron_cg.tools.cpu.grouped_linear import in_place_of_te

    shape = CpuModelConfig(
        layers=LAYERS,
        sequence_length=LENGTH,
        experts=4,
        grouped=True,
        expert_parallel=2,
        graph_modules=scopes,
    )
    with ExitStack() as undo:
        undo.enter_context(in_place_of_te())
        undo.callback(use_device_counts())
        undo.callback(fix_packs(MOST))
        undo.enter_context(attention_of_packs())
        trainer = undo.enter_context(trainer_of(shape, graphs=graphs, micro_batch_size=1))
        whole = trainer.model
        numbers = []
        for step, starts in enumerate(packs):
            if graphs and step == 1:
                trainer.model = whole
                captured(trainer)
            trainer.model = partial(whole, packed_seq_params=boundaries(starts, "cpu"))
            numbers.append([number.hex() for number in trainer.step()])
        counters = trainer.session.counters.as_dict() if graphs else {}
        return numbers, [counters.get(name) for name in ("replayed", "mismatched", "eager")]


def trained(scopes: tuple[str, ...], second: tuple[int, ...]) -> Any:
    """The same steps eagerly and with graphs; rank 1 has the pack ``second`` in the third."""
    mine = second if dist.get_rank() == 1 else MORE
    packs = (FITS, ALSO, mine, FITS)
    eager, _ = train(scopes, packs, graphs=False)
    return eager, *train(scopes, packs, graphs=True)


@pytest.mark.parametrize(
    ("scopes", "second", "on_second"),
    [
        (("attn",), ALSO, [3 * LAYERS, 0, 0]),
        (("attn", "moe"), MORE, [2 * LAYERS, LAYERS, LAYERS]),
    ],
    ids=["one rank alone, without collectives", "both ranks, with collectives"],
)
def test_attention_of_more_sequences_runs_eagerly(
    scopes: tuple[str, ...], second: tuple[int, ...], on_second: list[int]
) -> None:
    results = on_ranks(partial(trained, scopes, second))
    counts = [[2 * LAYERS, LAYERS, LAYERS], on_second]
    for (eager, graphed, found), expected in zip(results, counts, strict=True):
        assert graphed == eager and found == expected


def more_alone(folder: Path) -> None:
    soon = timedelta(seconds=3)
    mine = MORE if dist.get_rank() == 1 else ALSO
    with (
        no_hang(),
        patch.object(exchange, "FALLING_BACK", soon),
        patch.object(exchange, "TIMEOUT", soon),
    ):
        try:
            train(("attn", "moe"), (FITS, ALSO, mine), graphs=True)
        except ReplayMismatchError as error:
            (folder / f"{dist.get_rank()}.txt").write_text(str(error))
            raise


def test_more_sequences_on_one_rank_end_a_run_whose_graphs_hold_collectives(
    tmp_path: Path,
) -> None:
    with pytest.raises(ProcessRaisedException):
        run_processes(partial(more_alone, tmp_path))
    assert [path.name for path in tmp_path.iterdir()] == ["1.txt"]
    text = (tmp_path / "1.txt").read_text()
    assert "a pack of more than N sequences" in text and "The graph holds collectives" in text
