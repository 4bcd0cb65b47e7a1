"""A profiler names what this package does."""

from typing import get_args

from torch.profiler import ProfilerActivity, profile

from megatron_cg.events import Range
from megatron_cg.replay.mismatch_policy import ReplayPolicy
from megatron_cg.tape.tape_backend import TapeBackend
from megatron_cg.tape.training_plan import CpuModelConfig
from tests.unit.trainers import trainer_of

ELSEWHERE = {"clip gradients", "eager pass", "vote"}
"""What one rank without Transformer Engine, whose guards all hold, does not do."""


def test_a_profile_names_what_this_package_does(one_rank: None) -> None:
    model = CpuModelConfig(layers=2, graph_modules=("attn", "mlp"))
    with trainer_of(model, graphs=True) as trainer:
        trainer.step()
        with profile(activities=[ProfilerActivity.CPU]) as profiled:
            trainer.capture(TapeBackend(), policy=ReplayPolicy("error"))
            trainer.step()
    prefix = "megatron_cg: "
    named = {event.key.removeprefix(prefix) for event in profiled.key_averages()}
    assert named & set(get_args(Range)) == set(get_args(Range)) - ELSEWHERE
