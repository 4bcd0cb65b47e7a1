"""What is kept of Megatron-FSDP v2's bookkeeping, beside what v2 itself computes."""

import logging
import operator
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from megatron.core.models.gpt import GPTModel
from torch import nn
from torch.distributed.tensor import DTensor

from megatron_cg.fastpath import install_parts, under_v2
from megatron_cg.fastpath.install_parts import install_under_v2
from megatron_cg.fastpath.under_v2 import keep_layouts, keep_views
from megatron_cg.fsdp.roles import unsharded_parameters
from megatron_cg.fully_shard import models
from megatron_cg.fully_shard.per_module import lies_in
from megatron_cg.replay.plain import _Identity as Same
from megatron_cg.tape.tape_backend import TapeBackend
from megatron_cg.tape.training_plan import CpuModelConfig
from megatron_cg.tools.record.record import parameter_digests
from megatron_cg.upstream.symbols import Symbol
from tests.unit.fastpath.test_fast_path import with_frozen, with_penalty
from tests.unit.fastpath.test_main_weights import Scratch
from tests.unit.ranks import on_ranks
from tests.unit.trainers import trainer_of
from tests.unit.units import sharded

PROGRAMS, LENGTH = 60, 40


@pytest.fixture
def groups(one_rank: None) -> Any:
    network: Any = sharded.under_v2(mesh=(1,))(sharded.Network((16, 24)))
    found = [group for each in (*network.layers, network) for group in each._parameter_groups]
    for group in found:
        group._unsharded_model_weight.reallocate_storage()
    yield found
    del network  # Main's groups do not keep their modules.


def place(tensor: Any) -> tuple[Any, ...]:
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    storage = local.untyped_storage()._cdata
    spec = tensor.placements if isinstance(tensor, DTensor) else None
    address = (storage, local.storage_offset(), local.data_ptr())
    return (*address, local.shape, local.stride(), local.dtype, tensor.shape, spec)


def check(buffer: Any, method: str, index: int) -> Any:
    """What a buffer returns is as what its class's own method makes."""
    found = getattr(buffer, method)(index)
    assert place(found) == place(getattr(type(buffer), method)(buffer, index))
    return found


def change(drawn: random.Random, group: Any) -> bool:
    """Do to a group's memory what v2, a session or a user may do; whether views stay valid."""
    buffer = drawn.choice((group._unsharded_model_weight, group.main_grad))
    kind = drawn.choice(("nothing", "resized", "moved", "data", "buffers"))
    if kind == "resized":
        buffer.release_storage()
        buffer.reallocate_storage()
    elif kind == "moved":
        buffer.local_buffer = lies_in(
            buffer.local_buffer, torch.empty_like(buffer.local_buffer).untyped_storage()
        )
    elif kind == "data":
        buffer.local_buffer.data = torch.empty_like(buffer.local_buffer)
    elif kind == "buffers":
        like = group.main_grad
        shapes = like.layout.tensor_shapes
        made = type(like)(like.mesh, like.placements, shapes, like.dtype, like.device)
        group.main_grad = made
    return kind in ("nothing", "resized")


def test_views_are_those_of_the_memory_that_a_buffer_has_now(groups: Any) -> None:
    kept = again = 0
    for seed in range(PROGRAMS):
        drawn, undo = random.Random(seed), keep_views(groups)
        for _ in range(LENGTH):
            group = drawn.choice(groups)
            index = drawn.randrange(len(group.main_grad.layout.tensor_shapes))
            pairs = (
                (group._unsharded_model_weight, "get_local_tensor"),
                (group.main_grad, "get_dtensor"),
            )
            before = [check(*pair, index) for pair in pairs]
            if change(drawn, group):
                again += 2
                after = [getattr(*pair)(index) for pair in pairs]
                kept += sum(map(operator.is_, before, after))
            check(group._unsharded_model_weight, "get_local_tensor", index)
            check(group.main_grad, "get_dtensor", index)
        undo()
    assert again > kept > again // 4  # Buffers that were put in keep nothing.
    for group in groups:
        assert not {"get_local_tensor", "get_dtensor"} & {
            *vars(group._unsharded_model_weight),
            *vars(group.main_grad),
        }


def test_gradients_that_get_a_new_buffer_in_each_step_are_not_kept(groups: Any) -> None:
    first, second = groups[:2]
    weights = first._unsharded_model_weight
    later = {"_main_grad_placements": weights.placements}
    later["_accumulation_placements"] = weights.placements
    hybrid = SimpleNamespace(**{**vars(first), **later})
    frozen = SimpleNamespace(**{**vars(second), "main_grad": None})
    undo = keep_views([hybrid, frozen])
    assert not any("get_dtensor" in vars(group.main_grad) for group in (first, second))
    assert "get_local_tensor" in vars(weights)
    undo()


class Group:
    """One that can go: the released v2's own never does, as autograd's hooks hold it."""

    def __init__(self, like: Any) -> None:
        self._unsharded_model_weight = like._unsharded_model_weight


def test_a_model_that_is_dropped_leaves_nothing_on_the_class_of_layouts(groups: Any) -> None:
    kind = type(groups[0].main_grad.layout)
    before, group = Same(vars(kind)["build"]), Group(groups[0])
    keep_layouts(group)
    assert Same(vars(kind)["build"]) != before
    del group
    assert Same(vars(kind)["build"]) == before


def shards(group: Any) -> list[Any]:
    if hasattr(group, "fsdp_parameters"):
        return [parameter.sharded for parameter in group.fsdp_parameters]
    return list(group.sharded_parameters)


def gradients_of(group: Any, seed: int, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
    generator = torch.Generator().manual_seed(seed)
    for parameter in unsharded_parameters(group):
        parameter.grad = change(torch.randn(parameter.shape, generator=generator))


def reduced(groups: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> list[list[float]]:
    """Sharded gradients of two microbatches of two steps."""
    found = []
    for seed in range(4):
        for group in groups:
            gradients_of(group, seed, change)
            packed = group.allocate_partial_grad_buffer()
            group.copy_gradients_to_partial_buffer(packed)
            assert not any(p.grad is not None for p in unsharded_parameters(group))
            group.reduce_partial_gradients(packed)
            for parameter in shards(group):
                found.append(parameter.grad.to_local().flatten().tolist())
                if seed % 2:
                    parameter.grad = None
    return found


CHANGES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "as they are": lambda gradient: gradient,
    "transposed": lambda gradient: gradient.t().contiguous().t(),
    "that need gradients": lambda gradient: gradient.requires_grad_(),
}


@pytest.mark.parametrize("name", CHANGES)
def test_packed_gradients_are_those_of_v2(groups: Any, name: str) -> None:
    change = CHANGES[name]
    expected, undo = reduced(groups, change), under_v2.pack_gradients(groups)
    assert reduced(groups, change) == expected
    group = groups[0]
    gradients_of(group, 0, change)
    packed = group.allocate_partial_grad_buffer()
    assert packed.local_buffer.untyped_storage().nbytes() > 0
    assert not packed.local_buffer.requires_grad
    group.reduce_partial_gradients(packed)
    assert packed.local_buffer.untyped_storage().nbytes() == 0
    assert group.allocate_partial_grad_buffer() is packed
    undo()
    gradients_of(group, 0, change)
    assert group.allocate_partial_grad_buffer() is not packed


def test_gaps_between_gradients_have_what_v2_leaves_there(groups: Any, deterministic: None) -> None:
    group, gaps = groups[1], []
    undo = under_v2.pack_gradients(groups)
    for _ in range(2):
        gradients_of(group, 0, CHANGES["as they are"])
        packed = group.allocate_partial_grad_buffer()
        group.copy_gradients_to_partial_buffer(packed)
        gaps.append(int(packed.local_buffer.isnan().sum()))
        group.reduce_partial_gradients(packed)
    undo()
    filled = sum(p.numel() for p in unsharded_parameters(group))
    assert gaps == [packed.local_buffer.numel() - filled] * 2 and gaps[0] > 0


def test_other_gradients_than_before_get_another_buffer(groups: Any) -> None:
    group, undo = groups[0], under_v2.pack_gradients(groups)
    first, second = unsharded_parameters(group)[:2]
    gradients_of(group, 0, CHANGES["as they are"])
    packed = group.allocate_partial_grad_buffer()
    for parameter in unsharded_parameters(group):
        parameter.grad_dtype = None
        parameter.grad = torch.ones_like(parameter, dtype=torch.float64)
    other = group.allocate_partial_grad_buffer()
    assert other is not packed and other.local_buffer.dtype is torch.float64
    group.copy_gradients_to_partial_buffer(other)
    assert other.get_local_tensor(0).eq(1).all()
    first.grad = torch.ones_like(first, dtype=torch.float64)
    second.grad = None
    with pytest.raises(RuntimeError, match="Missing gradient"):
        group.allocate_partial_grad_buffer()
    undo()


class Said(list[str]):
    """What happened."""

    gradients: Sequence[torch.Tensor | None] = ()
    """What v2 finds when it reduces."""
    breaks = False


@pytest.fixture
def hooked(groups: Any) -> Iterator[tuple[Any, list[nn.Parameter], Said]]:
    """The weights of one layer, the object that takes their gradients, and what then happens."""
    layer: Any = under_v2._owner(groups[0])
    said, weights = Said(), unsharded_parameters(groups[0])

    def post_backward() -> None:
        said.append("reduced")
        said.gradients = [weight.grad for weight in weights]
        if said.breaks:
            raise ArithmeticError

    layer.post_backward = post_backward
    taker = under_v2._Hooked(groups)
    undo = taker.install()
    yield taker, weights, said
    undo()
    del layer.post_backward


def take(taker: Any, weights: list[Any], numbers: Any, used: Any = ()) -> list[torch.Tensor]:
    """Give gradients of a graph, filled with these numbers."""
    gradients = [
        None if n is None else torch.full_like(w, n) for w, n in zip(weights, numbers, strict=True)
    ]
    together = taker.detach(weights, lambda: False)
    taker.take_detached(
        together, gradients, [any(weight is one for one in used) for weight in weights]
    )
    taker.attach(together)
    return gradients  # type: ignore[return-value]


@pytest.mark.parametrize("breaks", [False, True])
def test_gradients_of_a_whole_module_are_reduced_where_a_graph_left_them(
    hooked: Any, breaks: bool
) -> None:
    """A gradient that is still there after that is a copy."""
    taker, weights, said = hooked
    said.breaks = breaks
    gradients = [torch.full_like(weight, number) for number, weight in enumerate(weights)]
    together = taker.detach(weights, lambda: False)
    with pytest.raises(ArithmeticError) if breaks else nullcontext():
        taker.take_detached(together, gradients, [False] * len(weights))
    assert said == ["reduced"] and all(map(operator.is_, said.gradients, gradients))
    for weight, gradient in zip(weights, gradients, strict=True):
        assert weight.grad is not gradient and torch.equal(weight.grad, gradient)


def test_gradients_that_wait_for_others_are_copied(hooked: Any) -> None:
    taker, weights, said = hooked
    some, last = weights[:-1], weights[-1]
    gradients = take(taker, some, range(len(some)))
    for weight, gradient in zip(some, gradients, strict=True):
        assert weight.grad is not gradient and torch.equal(weight.grad, gradient)
    assert said == []
    take(taker, [last], [7])
    assert said == ["reduced"] and last.grad.eq(7).all()


@pytest.mark.parametrize("is_first", [True, False])
@pytest.mark.parametrize("others", [1, None])
def test_a_weight_with_another_use_is_counted_once(
    hooked: Any, is_first: bool, others: int | None
) -> None:
    """A module whose weights all have another use waits for its graph nevertheless."""
    taker, weights, said = hooked
    used, came = weights[:others], [is_first]
    to_come = taker.detach(weights, lambda: not came[0])
    for graph_comes in (is_first, not is_first):
        if graph_comes:
            came[0] = True
            take(taker, weights, [2] * len(weights), used)
        else:
            sum((weight * 3).sum() for weight in used).backward()  # Autograd calls v2's hooks.
            assert said == ["reduced"] * is_first
    assert said == ["reduced"] and all(weight.grad.eq(5).all() for weight in used)
    taker.attach(to_come)


def test_a_weight_without_a_gradient_is_not_counted(hooked: Any) -> None:
    taker, weights, said = hooked
    take(taker, weights, [None, *[1] * (len(weights) - 1)])
    assert said == [] and weights[0].grad is None


def of_norms(graphs: bool) -> Any:
    shape = CpuModelConfig(
        layers=3,
        hidden_size=16,
        ffn_hidden_size=16,
        graph_modules=("attn",),
        fsdp_options={"megatron_fsdp_version": 2},
    )
    with pytest.MonkeyPatch.context() as patch, ExitStack() as stack:
        # One weight of each layer is trained, which its graph and its eager part use.
        own = with_frozen(GPTModel, r"layers\.(?!.*input_layernorm\.weight)")
        patch.setattr("megatron_cg.tape.train.GPTModel", own)
        trainer = stack.enter_context(trainer_of(shape, graphs=graphs, microbatches=2))
        with_penalty(trainer, "input_layernorm.weight")
        numbers = [trainer.step()]
        if graphs:
            path: Any = trainer.capture(TapeBackend()).fast_path
            assert "detached-weights-of-graphs" in path.parts
        numbers += [trainer.step() for _ in range(3)]
        return numbers, parameter_digests(trainer.model)


def both_of_norms() -> list[Any]:
    return [of_norms(False), of_norms(True)]


@pytest.mark.skipif(not models.RELIES_ON, reason="Megatron's models before 0.20 have no v2")
def test_a_module_waits_for_its_graph_when_its_only_weight_has_another_use() -> None:
    for eager, graphed in on_ranks(both_of_norms):
        assert eager == graphed


def megatrons(inner: Any, parameters: list[Any]) -> Any:
    """Megatron's optimizer for v2, around another one."""
    from megatron.core.optimizer.fully_sharded_optimizer import FullyShardedOptimizer

    optimizer: Any = object.__new__(FullyShardedOptimizer)
    off = ("use_precision_aware_optimizer", "reuse_grad_buf_for_mxfp8_param_ag", "timers")
    optimizer.config = SimpleNamespace(**dict.fromkeys((*off, "overlap_param_gather")))
    optimizer.get_parameters, optimizer._casted_grads = lambda: parameters, []
    optimizer.is_stub_optimizer, optimizer.grad_scaler, optimizer.model_chunks = False, None, []
    optimizer.optimizer = inner
    return optimizer


class Stepping:
    """AdamW in Megatron's optimizer for v2, which casts gradients of BF16 and clips them here."""

    def __init__(self, run: sharded.Run, set_to_none: bool) -> None:
        adam: Any = run.optimizer
        self.param_groups, self.state = adam.param_groups, adam.state
        self.parameters = [p for group in adam.param_groups for p in group["params"]]
        self.megatrons, self.losses = megatrons(adam, self.parameters), run.losses
        self.megatrons.model_chunks = [run.model]
        self.zero_grad = partial(adam.zero_grad, set_to_none=set_to_none)

    def step(self) -> None:
        assert not self.megatrons.prepare_grads()
        pieces = [p.grad._local_tensor for p in self.parameters if p.grad is not None]
        norm = sum(piece.float().square().sum() for piece in pieces)
        dist.all_reduce(norm)
        self.losses.append(norm.clone())
        for piece in pieces:
            piece.mul_(0.1 / (norm.sqrt() + 1e-6))
        self.megatrons.step_with_ready_grads()


def stepped(case: sharded.Case, set_to_none: bool, graphed: bool) -> sharded.Run:
    """Two more steps follow without graphs."""
    run: Any = sharded.Run(case)
    run.optimizer = stepping = Stepping(run, set_to_none)
    scratch: Any = Scratch()
    undo = under_v2.install_casts([stepping.megatrons], scratch) if graphed else lambda: None
    run.train(graphed=graphed)
    undo()
    assert bool(scratch.pieces) is graphed and not scratch.alive()
    assert not {under_v2._CAST, under_v2._STEP} & {*vars(stepping.megatrons)}
    run.graphs = None
    run.train(2)
    return run  # type: ignore[no-any-return]


def cast_and_stepped() -> list[bool]:
    wrap = sharded.under_v2(prepare=lambda network: network.to(torch.bfloat16))
    cases = [sharded.Case(wrap), sharded.Case(wrap, before_step=sharded.evaluate)]
    return [
        sharded.equal(stepped(case, set_to_none, False), stepped(case, set_to_none, True))
        for case, set_to_none in zip(cases, (True, False), strict=True)
    ]


@pytest.mark.skipif(
    not (under_v2._IN_CORE and sharded.IN_CONTEXT), reason="no optimizer of Megatron's for this v2"
)
def test_steps_with_casts_have_the_bits_of_megatrons() -> None:
    assert on_ranks(cast_and_stepped) == [[True, True]] * 2


PARTS = ["layouts", "views", "packing", "clipping"]
"""Without graphs, and with an optimizer of no known class."""


OF_GRAPHS = "detached-weights-of-graphs"
FUNCTIONS = {
    "__post_init__": ["layouts"],
    "get_dtensor": ["views"],
    "get_local_tensor": ["views", "packing", OF_GRAPHS],
    "_reduce_gradient_groups": ["packing", OF_GRAPHS],
    "reallocate_storage": ["packing", OF_GRAPHS],
    "release_storage": ["packing", OF_GRAPHS],
    "_register_hooks": [OF_GRAPHS],
    "pre_forward": [OF_GRAPHS],
    "post_backward": [OF_GRAPHS],
}
if under_v2._IN_CORE:
    FUNCTIONS |= {under_v2._CAST: ["casts"], under_v2._STEP: ["casts"]}
else:
    FUNCTIONS["_make_grad_hook|_register_hooks"] = [OF_GRAPHS]


@pytest.mark.parametrize(("function", "off"), FUNCTIONS.items())
def test_an_unknown_function_turns_its_part_off(
    groups: Any,
    function: str,
    off: list[str],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def unknown_body(symbol: Symbol) -> str | None:
        is_it = symbol.path.endswith((f".{function}", f":{function}"))
        return "another body" if is_it else None

    install_parts._warn_once.cache_clear()
    monkeypatch.setattr(Symbol, "unknown_body", unknown_body)
    path = install_under_v2(groups, None, [SimpleNamespace(chained_optimizers=[])])
    path.close()
    assert path.parts == [part for part in PARTS if part not in off]
    assert [part for part, why in path.left_out.items() if why == "another body"] == off
    warnings = [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]
    assert warnings and all("another body" in text for text in warnings)


@pytest.mark.skipif(not models.RELIES_ON, reason="Megatron's models before 0.20 have no v2")
@pytest.mark.parametrize("gone", ["_RULES", "_MEMORY", "_CAST"])
def test_v2_that_has_changed_keeps_its_rules_and_ends_no_other_run(
    gone: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []
    monkeypatch.setattr(
        *(models._MODEL, "_validate_config"),
        staticmethod(lambda config, ddp_config: asked.append(config.cuda_graph_impl)),
    )
    known = models._MODEL._validate_config
    changed = replace(getattr(models, gone), parameters=("gone",), attributes=())
    monkeypatch.setattr(models, gone, changed)
    undo = models.allow_graphs()
    config, ddp_config = (SimpleNamespace(cuda_graph_impl=impl) for impl in ("none", ""))
    models._MODEL._validate_config(config, ddp_config)
    config.cuda_graph_impl = "transformer_engine"
    models._MODEL._validate_config(config, ddp_config)
    assert asked == ["none", "transformer_engine"]  # Its own rules refuse it.
    undo()
    assert models._MODEL._validate_config is known
