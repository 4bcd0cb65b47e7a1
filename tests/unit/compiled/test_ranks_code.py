"""A loaded graph has this rank's device and groups, and no other device changes."""

from __future__ import annotations

import io

import pytest
import torch
import torch.distributed as dist

from megatron_cg.compiled import trace
from megatron_cg.compiled.artifact import path_of, read
from megatron_cg.compiled.region import Region
from megatron_cg.compiled.save import save
from megatron_cg.compiled.trace import Rank, loading_for
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
def code(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    folder = tmp_path_factory.mktemp("artifact")
    save(build, folder, name="it", world_size=2, capability=None)
    return read(path_of(folder, "it")).code


@pytest.mark.parametrize("device", ["cuda:0", "cuda:3", "cpu"])
def test_meta_becomes_the_ranks_device_in_every_graph(
    device: str, code: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing runs, so no GPU is needed to look at the graphs of one."""
    graphs: list[tuple[str, str]] = []

    def kept(rank: Rank, graph_module: torch.fx.GraphModule) -> None:
        before = graph_module.code
        give_to(rank, graph_module)
        graphs.append((before, graph_module.code))

    give_to = trace._give_to
    monkeypatch.setattr(trace, "_give_to", kept)
    with loading_for(Rank(torch.device(device), {"mcg::pair": "group 7"})):
        torch.compiler.load_compiled_function(io.BytesIO(code))
    (before, after), *_ = graphs
    assert len(graphs) == 2
    assert "device(type='meta')" in before and "'mcg::pair'" in before
    assert all("meta" not in text and "mcg::" not in text for _, text in graphs)
    assert repr(torch.device(device)) in after and "device(type='cpu')" in after
    assert "'group 7'" in after


def test_code_that_belongs_to_no_rank_is_refused(code: bytes) -> None:
    with pytest.raises(ArtifactRefusedError, match="belongs to no rank yet"):
        torch.compiler.load_compiled_function(io.BytesIO(code))
