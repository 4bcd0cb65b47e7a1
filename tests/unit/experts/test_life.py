"""A rank that alone has fewer tokens than the graphs of dropless experts hold."""

import torch.distributed as dist

from megatron_cg.consensus.exchange import Agreement
from megatron_cg.errors import ReplayMismatchError
from megatron_cg.experts.install import use_device_counts
from megatron_cg.tape.tape_backend import TapeBackend
from megatron_cg.tape.training_plan import CpuModelConfig
from megatron_cg.upstream.patch import undone_after
from tests.unit.experts.test_training import EXPERTS
from tests.unit.grouped_linear import grouped_experts, in_place_of_te
from tests.unit.ranks import ended, soon_over
from tests.unit.trainers import half_a_batch, trainer_of


def short_alone() -> None:
    """Rank 0 waits for rank 1 inside its graph, until rank 1 has ended."""
    shape = CpuModelConfig(
        layers=2, experts=4, grouped=grouped_experts, expert_parallel=2, graph_modules=EXPERTS
    )
    with (
        in_place_of_te(),
        undone_after(use_device_counts()),
        trainer_of(shape, graphs=True) as trainer,
        soon_over(),
    ):
        trainer.step()
        trainer.capture(TapeBackend(), Agreement())
        trainer.step()
        with half_a_batch(trainer, dist.get_rank() == 1):
            trainer.step()


def test_it_ends_with_the_reason() -> None:
    ends = ended(short_alone, ReplayMismatchError)
    assert [*ends] == [1] and "The graph holds collectives" in ends[1] and "shape" in ends[1]
