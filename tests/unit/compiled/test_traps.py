"""What cannot be compiled on one rank for all is refused by name, or is right all the same."""

import sys
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._functorch.config
import torch.distributed as dist
from torch.distributed import all_reduce as bound_at_import
from torch.distributed.device_mesh import init_device_mesh

from megatron_cg.compiled.region import Capability, Region
from megatron_cg.compiled.save import save
from megatron_cg.compiled.trace import trace
from megatron_cg.errors import PrecompileError
from tests.unit.compiled.regions import (
    MOE,
    STATIC,
    Plain,
    config,
    gathered_linear,
    layer,
    of,
    region,
)


def saved(build: Callable[[], Region], folder: Path) -> Any:
    return save(build, folder, name="it", world_size=2, capability=None)


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


def coordinate() -> Region:
    mesh = init_device_mesh("cpu", (2,))
    return region(lambda x, module: module.last(x) * (1 + mesh.get_local_rank()))


def constant_tensor() -> Region:
    return region(lambda x, m: x * torch.tensor([1.0, 2.0 + m.group.rank()]).sum())


def other_rows() -> Region:
    made = region(lambda x, module: module.last(x))
    rows = torch.randn(4 + dist.get_rank(), 4, device="meta")
    return Region(made.module, (rows,), {}, made.groups)


counted = 0


def counts(x: torch.Tensor, _module: Plain) -> torch.Tensor:
    global counted
    counted += 1
    return x * 2


def bound_and_asynchronous(x: torch.Tensor, module: Plain) -> torch.Tensor:
    y = x * 2
    bound_at_import(y, group=module.group, async_op=True).wait()
    return y


def frozen() -> Region:
    made = region(lambda x, module: module.last(x))
    made.module.get_submodule("last").requires_grad_(False)
    return made


def hooked() -> Region:
    made = region(lambda x, module: module.last(x))
    made.module.get_submodule("last").register_forward_hook(lambda *_: None)
    return made


@pytest.mark.parametrize(
    ("build", "texts"),
    [
        (coordinate, ('test_traps.py", line', "1) {}` on rank 0", "2) {}` on rank 1")),
        (of(lambda x, module: (x, module.group.rank())), ("the region's outputs", "on rank 1")),
        (constant_tensor, ('test_traps.py", line', "a tensor (2,) torch.float32", "on rank 1")),
        (other_rows, ("argument.0 was", "(4, 4)", "(5, 4)")),
        (of(lambda x, _: torch.nn.functional.dropout(x, 0.5)), ("draws random numbers",)),
        (of(lambda x, _: x + torch.rand(4, 4, device="meta")), ("draws random numbers",)),
        (of(lambda x, _: x if x.sum() > 0 else -x), ("cannot be traced as one graph",)),
        (of(counts), ("reads or changes variables of", "test_traps")),
        (of(bound_and_asynchronous), ("async_op=True", "test_traps.py")),
        (frozen, ("last.weight is frozen",)),
        (hooked, ("last has the hook tests.unit.compiled.test_traps.hooked",)),
        (of(reduced_later, named=False), ("group that the region does not",)),
        (of(reduced_later, device="cpu"), ('arguments, under torch.device("meta")',)),
    ],
    ids=[
        *("mesh", "rank in outputs", "constant tensor", "shapes", "dropout", "rand"),
        *("branch on data", "counter", "imported by name", "frozen", "hook"),
        *("group without a role", "weights with values"),
    ],
)
def test_what_cannot_be_compiled_for_all_ranks_is_refused_with_its_place(
    build: Callable[[], Region], texts: tuple[str, ...], tmp_path: Path
) -> None:
    said = refusal(build, tmp_path)
    assert all(text in said for text in texts), said


def test_code_that_takes_the_columns_of_its_rank_is_refused_with_its_place(tmp_path: Path) -> None:
    said = refusal(gathered_linear, tmp_path, 4)
    assert all(text in said for text in ("tensor_parallel/", "backward code", "on rank 1")), said


def test_a_process_whose_caches_are_off_saves_all_the_same(tmp_path: Path) -> None:
    config: Any = torch.compiler.config
    with (
        torch._functorch.config.patch(enable_autograd_cache=False),
        config.patch(force_disable_caches=True),
    ):
        assert saved(lambda: region(lambda x, _: x * 2), tmp_path).traced_ranks == [0, 1]


def test_a_process_with_a_group_does_not_save(one_rank: None, tmp_path: Path) -> None:
    with pytest.raises(PrecompileError, match="save in a process of its own"):
        saved(lambda: region(reduced_later), tmp_path)
    assert dist.is_initialized() and not list(tmp_path.glob("*.artifact"))


@pytest.mark.parametrize("capability", [(9, 0), None])
def test_rms_norm_is_one_operation_on_gpus_as_in_an_eager_pass(capability: Capability) -> None:
    with torch.device("meta"):
        norm = torch.nn.Sequential(torch.nn.RMSNorm(8), torch.nn.Linear(8, 8)).bfloat16()
        given = torch.randn(3, 2, 8, dtype=torch.bfloat16, requires_grad=True)
    code = trace(Region(norm, (given,)), 0, capability).code
    forward, backward = str(code["forward"]), str(code["backward"])
    assert forward.count("aten._fused_rms_norm.default") == (capability is not None)
    assert ("aten.rsqrt.default" in forward) == (capability is None)
    assert backward.count("aten._fused_rms_norm_backward.default") == 1
    assert not torch._C._dispatch_has_kernel_for_dispatch_key("aten::_fused_rms_norm", "Meta")


def test_nothing_of_other_packages_stays_changed(tmp_path: Path) -> None:
    from megatron.core.tensor_parallel import mappings, random
    from megatron.core.transformer.moe.token_dispatcher import MoEAlltoAllTokenDispatcher

    def now() -> list[object]:
        found: list[object] = [dist.all_reduce, torch.cuda.current_device]
        found += [mappings._reduce, sys.excepthook]
        found += [MoEAlltoAllTokenDispatcher.cuda_dtoh_stream]
        return [*found, random._CUDA_RNG_STATE_TRACKER, random.CudaRNGStatesTracker.fork]

    before = now()
    saved(lambda: region(reduced_later), tmp_path)
    assert all(one is two for one, two in zip(before, now(), strict=True))


AUX_LOSS = {"moe_router_load_balancing_type": "aux_loss", "moe_aux_loss_coeff": 1e-2}
SELECTIVE = {"recompute_granularity": "selective", "recompute_modules": ["core_attn"]}


def saved_layer(options: dict[str, Any], folder: Path) -> Any:
    return saved(lambda: layer(config(**options)), folder)


@pytest.mark.parametrize(
    ("options", "texts"),
    [
        ({"hidden_dropout": 0.1}, ("draws random numbers", "fused_bias_dropout.py")),
        (MOE, ("cannot be traced", "in _maybe_dtoh_and_synchronize")),
        (MOE | STATIC | AUX_LOSS, ("cannot be traced", "moe_utils.py")),
        (MOE | STATIC | {"expert_model_parallel_size": 2}, ("all_to_all", "leave this module")),
        (SELECTIVE, ("cannot be traced", "rng_states")),
    ],
    ids=["dropout", "dropless", "aux loss", "expert parallel", "core_attn"],
)
def test_other_layers_cannot_be_compiled(
    options: dict[str, Any], texts: tuple[str, ...], tmp_path: Path
) -> None:
    """In a new process, as the command runs: where Dynamo stops depends on what was traced."""
    with (
        ProcessPoolExecutor(1, get_context("forkserver")) as pool,
        pytest.raises(PrecompileError) as error,
    ):
        pool.submit(saved_layer, options, tmp_path).result()
    assert all(text in str(error.value) for text in texts), error.value
