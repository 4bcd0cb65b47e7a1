"""A loaded graph has this rank's device and groups, and no other device changes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from megatron_cg.compiled import output_code
from megatron_cg.compiled.output_code import Rank, loading_for
from megatron_cg.compiled.region import Region
from megatron_cg.compiled.save import save
from megatron_cg.errors import ArtifactRefusedError


class Moves(torch.nn.Module):
    """Makes tensors on the traced device and on the CPU, and reduces over a group."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(4))
        self.group = group

    def forward(self, given: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        positions = torch.arange(4, device=given.device)
        counts = torch.full((2,), 3, device="cpu")
        made = given * self.weight + positions
        dist.all_reduce(made, group=self.group)
        return made, counts


def build() -> Region:
    group = dist.new_group([0, 1])
    with torch.device("meta"):
        module, given = Moves(group), torch.randn(4, requires_grad=True)
    return Region(module, (given,), {}, {"pair": group})


@pytest.fixture(scope="module")
def artifact(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("artifact")
    save(build, folder, name="it", world_size=2, capability=None)
    return folder / "it.artifact"


@pytest.mark.parametrize("device", ["cuda:0", "cuda:3", "cpu"])
def test_meta_becomes_the_ranks_device_in_every_graph(
    device: str, artifact: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing runs, so no GPU is needed to look at the graphs of one."""
    graphs: list[tuple[str, str]] = []

    def kept(rank: Rank, graph_module: torch.fx.GraphModule) -> None:
        before = graph_module.code
        give_to(rank, graph_module)
        graphs.append((before, graph_module.code))

    give_to = output_code.give_to
    monkeypatch.setattr(output_code, "give_to", kept)
    with (
        loading_for(Rank(torch.device(device), {"mcg::pair": "group 7"})),
        artifact.open("rb") as file,
    ):
        torch.compiler.load_compiled_function(file)
    (before, after), *_ = graphs
    assert len(graphs) == 2
    assert "device(type='meta')" in before and "'mcg::pair'" in before
    assert all("meta" not in code and "mcg::" not in code for _, code in graphs)
    assert repr(torch.device(device)) in after and "device(type='cpu')" in after
    assert "'group 7'" in after


def test_code_that_belongs_to_no_rank_is_refused(artifact: Path) -> None:
    with (
        artifact.open("rb") as file,
        pytest.raises(ArtifactRefusedError, match="belongs to no rank yet"),
    ):
        torch.compiler.load_compiled_function(file)
