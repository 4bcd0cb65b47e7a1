"""A loaded graph has this rank's device and groups, and no other device changes."""

import io
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megatron_cg.compiled import trace
from megatron_cg.compiled.region import Region
from megatron_cg.compiled.save import path_of, read, save
from megatron_cg.compiled.trace import loading_for


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
    return read(path_of(folder, "it"))[1]


@pytest.mark.parametrize("device", ["cuda:3", "cpu"])
def test_meta_becomes_the_ranks_device_in_every_graph(
    device: str, code: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing runs, so no GPU is needed to look at the graphs of one."""
    graphs: list[str] = []
    post_compile = trace._RankedOutputCode.post_compile

    def kept(self: Any, *args: Any) -> None:
        post_compile(self, *args)
        graphs.append(self._graph_module.code)

    monkeypatch.setattr(trace._RankedOutputCode, "post_compile", kept)
    with loading_for(torch.device(device), {"mcg::pair": "group 7"}):
        torch.compiler.load_compiled_function(io.BytesIO(code))
    assert len(graphs) == 2
    assert all("meta" not in text and "mcg::" not in text for text in graphs)
    assert repr(torch.device(device)) in graphs[0] and "device(type='cpu')" in graphs[0]
    assert "'group 7'" in graphs[0]
