"""What cannot be compiled on one rank for all is refused by name, or is right all the same."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._functorch.config
import torch.distributed as dist
from torch.distributed import all_reduce as bound_at_import
from torch.distributed.device_mesh import init_device_mesh

from megatron_cg.compiled.region import Region
from megatron_cg.compiled.save import save
from megatron_cg.errors import PrecompileError
from tests.unit.compiled.regions import config, gathered_linear, with_groups


class Plain(torch.nn.Module):
    """Runs a function on a group between two linear layers."""

    def __init__(self, body: Callable[..., Any], group: Any = None) -> None:
        super().__init__()
        self.first, self.last = torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)
        self.body, self.group = body, group

    def forward(self, given: torch.Tensor) -> Any:
        return self.body(self.first(given), self)


def region(body: Callable[..., Any], *, named: bool = True, device: str = "meta") -> Region:
    group = dist.new_group([0, 1])
    with torch.device(device):
        module, given = Plain(body, group), torch.randn(4, 4, requires_grad=True)
    return Region(module, (given,), {}, {"pair": group} if named else {})


def saved(body: Callable[..., Any], folder: Path, **options: Any) -> Any:
    return save(lambda: region(body, **options), folder, name="it", world_size=2, capability=None)


def refusal(build: Callable[[], Region], folder: Path, world_size: int = 2) -> str:
    with pytest.raises(PrecompileError) as caught:
        save(build, folder, name="it", world_size=world_size, capability=None)
    assert not list(folder.iterdir()), "nothing is written"
    assert not dist.is_initialized()
    return str(caught.value)


def reduced_later(x: torch.Tensor, module: Plain) -> torch.Tensor:
    y = x * 2
    handle = dist.all_reduce(y, group=module.group, async_op=True)
    z: torch.Tensor = module.last(x)
    handle.wait()
    return y + z


def test_an_asynchronous_collective_is_waited_for_at_once(tmp_path: Path) -> None:
    """That its numbers are right is tested with the layer and the MLP, whose backward has some."""
    assert saved(reduced_later, tmp_path).roles == ["pair"]


def test_an_asynchronous_collective_that_was_imported_by_name_is_refused(tmp_path: Path) -> None:
    def body(x: torch.Tensor, module: Plain) -> torch.Tensor:
        y = x * 2
        bound_at_import(y, group=module.group, async_op=True).wait()
        return y

    found = refusal(lambda: region(body), tmp_path)
    assert "async_op=True" in found and "test_traps.py" in found


def vocabulary() -> Region:
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel.layers import VocabParallelEmbedding

    settings = config(tensor_model_parallel_size=2)
    with_groups(settings, "meta")
    group = parallel_state.get_tensor_model_parallel_group()
    with torch.device("meta"):
        embedding = VocabParallelEmbedding(
            *(64, 32), config=settings, init_method=settings.init_method, tp_group=group
        )
        model = torch.nn.Sequential()
        model.add_module("embedding", embedding)
        tokens = torch.zeros(2, 8, dtype=torch.int64)
    return Region(model.to("meta"), (tokens,), {}, {"tp": group})


def test_an_embedding_that_has_its_ranks_first_row_is_refused_with_it(tmp_path: Path) -> None:
    found = refusal(vocabulary, tmp_path, 4)
    assert "embedding (VocabParallelEmbedding)" in found and "layers.py:" in found
    assert "0) {}` on rank 0" in found and "32) {}` on rank 1" in found


def test_a_layer_that_takes_its_ranks_columns_is_refused(tmp_path: Path) -> None:
    found = refusal(gathered_linear, tmp_path, 4)
    assert "ColumnParallelLinear" in found and "backward code" in found
    assert "on rank 0" in found and "on rank 1" in found


def coordinate() -> Region:
    mesh = init_device_mesh("cpu", (2,))
    return region(lambda x, module: module.last(x) * (1 + mesh.get_local_rank()))


def test_a_coordinate_of_the_mesh_is_refused(tmp_path: Path) -> None:
    found = refusal(coordinate, tmp_path)
    assert "1) {}` on rank 0" in found and "2) {}` on rank 1" in found
    assert "test_traps.py:" in found


def test_a_rank_among_the_outputs_is_refused(tmp_path: Path) -> None:
    found = refusal(lambda: region(lambda x, module: (x, module.group.rank())), tmp_path)
    assert "the region's outputs" in found and "on rank 1" in found


def test_a_constant_tensor_of_the_rank_is_refused(tmp_path: Path) -> None:
    def body(x: torch.Tensor, module: Plain) -> torch.Tensor:
        return x * torch.tensor([1.0, 2.0 + module.group.rank()]).sum()

    found = refusal(lambda: region(body), tmp_path)
    assert "test_traps.py:" in found and found.count("a tensor (2,) torch.float32") == 2


def test_shapes_that_differ_between_ranks_are_refused(tmp_path: Path) -> None:
    def build() -> Region:
        found = region(lambda x, module: module.last(x))
        rows = 4 + dist.get_rank()
        return Region(found.module, (torch.randn(rows, 4, device="meta"),), {}, found.groups)

    found = refusal(build, tmp_path)
    assert "argument.0 was" in found and "(4, 4)" in found and "(5, 4)" in found


def test_modules_of_transformer_engine_are_refused_by_name(tmp_path: Path) -> None:
    class Linear(torch.nn.Linear):
        pass

    Linear.__module__ = "transformer_engine.pytorch.module.linear"

    def build() -> Region:
        found = region(lambda x, module: module.last(x))
        found.module.last = Linear(4, 4, device="meta")
        return found

    found = refusal(build, tmp_path)
    assert "last is Transformer Engine's Linear" in found and "get_gpt_layer_local_spec" in found


@pytest.mark.parametrize(
    ("body", "text"),
    [
        (lambda x, _: torch.nn.functional.dropout(x, 0.5), "draws random numbers"),
        (lambda x, _: x + torch.rand(4, 4, device="meta"), "draws random numbers"),
        (lambda x, _: x if x.sum() > 0 else -x, "cannot be traced as one graph"),
    ],
)
def test_what_is_no_graph_of_tensors_is_refused(
    body: Callable[..., Any], text: str, tmp_path: Path
) -> None:
    assert text in refusal(lambda: region(body), tmp_path)


counted = 0


def counts(x: torch.Tensor, _module: Plain) -> torch.Tensor:
    global counted
    counted += 1
    return x * 2


def test_a_variable_of_a_module_that_changes_at_each_call_is_refused(tmp_path: Path) -> None:
    found = refusal(lambda: region(counts), tmp_path)
    assert "reads or changes variables of" in found and "test_traps" in found


def test_code_that_asks_for_the_gpu_gets_the_one_it_is_for(tmp_path: Path) -> None:
    """No GPU is here: the trace sees the capability that was given, and the artifact names it."""

    def build() -> Region:
        assert torch.cuda.get_device_capability() == (10, 3)
        return region(lambda x, _: x if torch.cuda.get_device_capability()[0] >= 10 else x / 0)

    found = save(build, tmp_path, name="it", world_size=2, capability=(10, 3))
    assert found.fingerprint["device"] == "cuda 10.3"
    older = save(
        lambda: region(lambda x, _: x if torch.cuda.get_device_capability()[0] >= 10 else x + 1),
        tmp_path,
        name="older",
        world_size=2,
        capability=(9, 0),
    )
    assert older.code_bytes > found.code_bytes


def test_hooks_are_refused_by_name(tmp_path: Path) -> None:
    def build() -> Region:
        found = region(lambda x, module: module.last(x))
        found.module.last.register_forward_hook(lambda *_: None)  # type: ignore[union-attr]
        return found

    found = refusal(build, tmp_path)
    assert "last has the hook" in found and "test_traps" in found


def test_a_group_without_a_role_is_refused(tmp_path: Path) -> None:
    found = refusal(lambda: region(reduced_later, named=False), tmp_path)
    assert "a process group that the region does not name" in found


def test_weights_with_values_are_refused(tmp_path: Path) -> None:
    found = refusal(lambda: region(reduced_later, device="cpu"), tmp_path)
    assert 'build the module, and the arguments, under torch.device("meta")' in found


@pytest.fixture
def a_group(tmp_path: Path) -> Iterator[None]:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/x", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_a_process_with_a_group_does_not_save(
    a_group: None, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("out")
    with pytest.raises(PrecompileError, match="save in a process of its own"):
        save(lambda: region(reduced_later), folder, name="it", world_size=2)
    assert dist.is_initialized() and not list(folder.iterdir())


def test_a_process_whose_caches_are_off_does_not_save(tmp_path: Path) -> None:
    with torch._functorch.config.patch(enable_autograd_cache=False):
        assert "unset TORCHINDUCTOR_AUTOGRAD_CACHE" in refusal(
            lambda: region(lambda x, _: x * 2), tmp_path
        )


def test_nothing_of_other_packages_stays_changed(tmp_path: Path) -> None:
    from megatron.core.tensor_parallel import mappings, random

    def now() -> list[object]:
        found: list[object] = [dist.all_reduce, torch.cuda.current_device, torch.cuda.Stream]
        found += [mappings._reduce, vars(mappings._AllToAll)["forward"], sys.excepthook]
        return [*found, random._CUDA_RNG_STATE_TRACKER, random.CudaRNGStatesTracker.fork]

    before = now()
    saved(reduced_later, tmp_path)
    assert all(one is two for one, two in zip(before, now(), strict=True))
    assert isinstance(vars(mappings._AllToAll)["forward"], staticmethod)
