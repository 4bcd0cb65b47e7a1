"""A rank that fails inside the comparison, while another waits for it there in a collective."""

from __future__ import annotations

from datetime import timedelta
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

from megatron_cg.compiled import beside, one_step
from megatron_cg.compiled.beside import Outcome, beside_other_ranks
from megatron_cg.compiled.load import load
from megatron_cg.compiled.region import Region
from megatron_cg.compiled.save import save
from megatron_cg.consensus.decision import AgreementError
from megatron_cg.consensus.exchange import Agreement
from megatron_cg.errors import ArtifactRefusedError
from tests.unit.ranks import on_ranks


class Row(nn.Module):
    """A linear layer whose results are added over a tensor-parallel group."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        super().__init__()
        self.linear, self.group = nn.Linear(8, 8, bias=False), group

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        from megatron.core.tensor_parallel import mappings

        y = self.linear(x)
        out: torch.Tensor = mappings.reduce_from_tensor_model_parallel_region(y, group=self.group)
        return out


def row(device: str = "meta") -> Region:
    from megatron.core import parallel_state

    parallel_state.destroy_model_parallel()
    parallel_state.initialize_model_parallel(2, create_gloo_process_groups=False)
    group = parallel_state.get_tensor_model_parallel_group()
    with torch.device(device):
        return Region(Row(group), (torch.randn(3, 8, requires_grad=True),), {}, {"tp": group})


def fails() -> None:
    raise torch.OutOfMemoryError("forced")


def failed(region: object, compiled: object) -> None:
    fails()


def failed_afterwards(region: object, compiled: object) -> None:
    original(region, compiled)  # type: ignore[arg-type]
    fails()


original = one_step.first_difference


def load_on_a_rank(folder: Path) -> list[str]:
    """In one process: rank 1 fails after the last collective of a comparison, then before one."""
    beside.GRACE = timedelta(seconds=1)
    votes, rank, said = Agreement(), dist.get_rank(), []
    region = row("cpu")
    for failure in (failed_afterwards, failed):
        if rank == 1:
            one_step.first_difference = failure
        try:
            said.append(str(load(folder, "row", region, votes, on_refusal="eager")))
        except AgreementError as error:
            said.append(f"{error}; after {type(error.__cause__).__name__}")
    return said


def test_all_ranks_raise_if_one_is_left_waiting(tmp_path: Path) -> None:
    torch.use_deterministic_algorithms(True)  # As on the ranks.
    try:
        save(row, tmp_path, name="row", world_size=2, capability=None)
    finally:
        torch.use_deterministic_algorithms(False)
    first, second = on_ranks(partial(load_on_a_rank, tmp_path))
    words = "rank 1 failed while compiled code was compared with eager, for the reason in the log"
    assert first[0] == second[0] == "None"
    assert first[1].startswith(words) and first[1].endswith("; after NoneType")
    assert second[1].startswith(words) and second[1].endswith("; after OutOfMemoryError")


def modes() -> list[object]:
    kinds = ("cpu", "cuda")
    return [
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        torch.get_default_device(),
        *(torch.is_autocast_enabled(kind) for kind in kinds),
        torch.is_autocast_enabled("cpu") and torch.get_autocast_dtype("cpu"),
    ]


@pytest.mark.parametrize(
    "mode",
    [
        torch.enable_grad(),
        torch.no_grad(),
        torch.inference_mode(),
        torch.autocast("cpu", torch.float16),
        torch.device("meta"),
    ],
)
def test_the_code_runs_in_the_modes_of_its_caller(one_rank: None, mode: object) -> None:
    seen: list[list[object]] = []
    with mode:  # type: ignore[attr-defined]
        expected = modes()
        assert beside_other_ranks(lambda: seen.append(modes())) == Outcome()
    assert seen == [expected]


def test_an_error_of_the_code_comes_out(one_rank: None) -> None:
    found = beside_other_ranks(fails)
    assert isinstance(found.error, torch.OutOfMemoryError) and not found.waits
    assert not isinstance(found.error, ArtifactRefusedError)
