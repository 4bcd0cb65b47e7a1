"""The fast path trains the very numbers of Megatron-FSDP's own bookkeeping."""

import re
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from itertools import count
from typing import Any

import pytest
import torch
import torch.distributed as dist
from packaging.version import Version
from torch import nn

from megatron_cg.fastpath import bucketing as gradients
from megatron_cg.fastpath import install_parts
from megatron_cg.fastpath.install_parts import FastPath, install
from megatron_cg.tape.tape_backend import TapeBackend
from megatron_cg.tape.training_plan import CpuModelConfig
from megatron_cg.tools.record.record import parameter_digests
from megatron_cg.upstream.symbols import installed_version
from tests.unit.counted import calls_of
from tests.unit.ranks import on_ranks
from tests.unit.trainers import UNPOOLED, layers_of, trainer_of

STEPS, CAPTURED_AFTER, LAYERS, MICROBATCHES = 4, 1, 2, 2
OF_GRADIENTS = {"gradients", "scaled-copies", "detached-weights-of-graphs", "deferred-prefetch"}
PARTS = {*OF_GRADIENTS, "unshard", "parameters", "main-gradients", "main-weights"}
MANY: dict[str, Any] = {
    "experts": 16,
    "topk": 2,
    "sequence_length": 4,
    "graph_modules": ("attn", "moe_router"),
}
"""More experts than tokens reach in a step, so that some have no gradient."""
SCENARIOS: dict[str, dict[str, Any]] = {
    "dense": {"graph_modules": ("attn", "mlp")},
    "experts without tokens": MANY,
    "few bytes wait": {**MANY, "waiting_bytes": 1},
    "borrowed memory": {"graph_modules": ("attn", "mlp"), "borrows": True},
    "frozen": {"graph_modules": ("attn", "mlp"), "frozen": "linear_proj"},
    "penalty on a graph's weights": {"graph_modules": ("attn",), "penalty": True},
    "fp32": {"bf16": False},
    "gradients in fp32": {"fsdp_options": {"megatron_fsdp_main_grads_dtype": torch.float32}},
    # Its buffers move, so that graphs would not do; the fast path does without any.
    "no double buffer": {"without_graphs": True, "fsdp_options": UNPOOLED},
    "buffers of the largest unit": {
        "experts": 4,
        "options": {"moe_layer_freq": [0, 1]},
        "graph_modules": ("attn",),
        "fsdp_options": {"megatron_fsdp_max_pool_double_buffer": True},
    },
    "ZeRO-2": {"fsdp_options": {"data_parallel_sharding_strategy": "optim_grads"}},
    "ZeRO-1": {"fsdp_options": {"data_parallel_sharding_strategy": "optim"}},
    "no shards": {"fsdp_options": {"data_parallel_sharding_strategy": "no_shard"}},
}
ALIKE_EAGERLY = {"few bytes wait": "experts without tokens", "borrowed memory": "dense"}
"""Scenarios whose eager run is that of another."""


class Some(nn.ModuleList):
    skips = False

    def __iter__(self) -> Iterator[nn.Module]:
        layers = super().__iter__()
        if self.skips:
            next(layers)
        return layers


class Shuffled(nn.ModuleList):
    """Layers that run in another order than they are registered in."""

    order = (1, 0)

    def __iter__(self) -> Iterator[nn.Module]:
        layers = list(super().__iter__())
        return iter([layers[number] for number in self.order])


def decoder_of(trainer: Any) -> Any:
    (decoder,) = (m for m in trainer.model.modules() if type(m).__name__ == "TransformerBlock")
    return decoder


@contextmanager
def one_rank_leaves_its_last_graph(trainer: Any) -> Iterator[None]:
    """The layer that runs last, and what follows it by registration is not there yet."""
    decoder_of(trainer).layers.__class__ = Shuffled
    last = list(decoder_of(trainer).layers)[-1]
    last.mlp.training = dist.get_rank() > 0
    yield
    last.mlp.training = True


@contextmanager
def first_layer_skipped(trainer: Any) -> Iterator[None]:
    """In the last microbatch of each step; Megatron-FSDP has no buffer for more of it."""
    layers, own, passes = decoder_of(trainer).layers, trainer._forward, count(1)
    layers.__class__ = Some

    def forward() -> torch.Tensor:
        layers.skips = next(passes) % MICROBATCHES == 0
        losses: torch.Tensor = own()
        layers.skips = False
        return losses

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trainer, "_forward", forward)
        yield


@contextmanager
def gradients_hooked(hook: Callable[[torch.Tensor], None], trainer: Any) -> Iterator[None]:
    """By hooks that run after Megatron-FSDP's own, and find no gradient then."""
    with ExitStack() as stack:
        for parameter in trainer.model.module.param_and_grad_buffer.params:
            stack.callback(parameter.register_post_accumulate_grad_hook(hook).remove)
        yield


def halve(parameter: torch.Tensor) -> None:
    if parameter.grad is not None:
        parameter.grad.mul_(0.5)


def drop(parameter: torch.Tensor) -> None:
    parameter.grad = None


EDGES: dict[str, Callable[[Any], AbstractContextManager[None]]] = {
    "first layer skipped": first_layer_skipped,
    "one rank leaves its last graph": one_rank_leaves_its_last_graph,
    "gradients halved": partial(gradients_hooked, halve),
    "gradients dropped": partial(gradients_hooked, drop),
}
"""Steps that are other than those before: passes begin elsewhere or leave a graph."""


def trained(options: dict[str, Any], graphs: bool, fast: bool) -> dict[str, Any]:
    options = dict(options)
    waiting, frozen = options.pop("waiting_bytes", None), options.pop("frozen", None)
    without_graphs = options.pop("without_graphs", False)
    backend = BorrowingTape() if options.pop("borrows", False) else TapeBackend()
    penalty = options.pop("penalty", False)
    edge = options.pop("edge", nullcontext)
    with pytest.MonkeyPatch.context() as patch, ExitStack() as stack:
        if waiting is not None:
            patch.setattr(gradients, "WAITING_BYTES", waiting)
        if frozen is not None:
            from megatron.core.models.gpt import GPTModel

            patch.setattr("megatron_cg.tape.train.GPTModel", with_frozen(GPTModel, frozen))
        shape = CpuModelConfig(layers=LAYERS, hidden_size=16, ffn_hidden_size=16, **options)
        trainer = stack.enter_context(trainer_of(shape, graphs=graphs, microbatches=MICROBATCHES))
        if penalty:
            with_penalty(trainer)
        patch.setattr(install_parts, "IdlePool", lambda _pool: backend)
        copies = stack.enter_context(calls_of(gradients.GradientBucketing, "_copy"))
        numbers = [trainer.step() for _ in range(CAPTURED_AFTER)]
        did: dict[str, Any] = {}
        path: FastPath | None = None
        if graphs and without_graphs:
            path = install(trainer.model.module)
            stack.callback(path.close)
        elif graphs:
            path = trainer.capture(backend, fast_path=fast).fast_path
        numbers.append(trainer.step())
        with edge(trainer):
            numbers += [trainer.step() for _ in range(STEPS - CAPTURED_AFTER - 1)]
        if path is not None:
            assert not isinstance(backend, BorrowingTape) or backend.poisoned > 0
            did = {"parts": path.parts, "left out": path.left_out, "copies": len(copies)}
        return {"numbers": numbers, "shards": parameter_digests(trainer.model), **did}


class BorrowingTape(TapeBackend):
    """A tape with scratch memory that replays overwrite, as those of CUDA graphs do."""

    def __init__(self) -> None:
        super().__init__()
        self.given: list[torch.Tensor] = []
        self.poisoned = 0

    pool = (0, 1)
    borrowed_bytes = 1

    def report_held(self) -> int:
        return 0

    def empty(self, _caller: Any, like: Any, dtype: torch.dtype) -> list[torch.Tensor]:
        made = [torch.full_like(tensor, torch.nan, dtype=dtype) for tensor in like]
        self.given += made
        return made

    def capture(self, *args: Any, **kwargs: Any) -> Any:
        graphs: Any = super().capture(*args, **kwargs)
        for graph in graphs:
            graph._recorded.forward.entries.insert(0, self.overwrite)
        return graphs

    def overwrite(self) -> None:
        for tensor in self.given:
            tensor.fill_(torch.nan)
        self.poisoned, self.given = self.poisoned + len(self.given), []


def with_penalty(trainer: Any, name: str = "self_attention.linear_proj.weight") -> None:
    """Let each layer's eager part use a weight of its graphed one: a penalty on it."""

    def forward(layer: Any, own: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        output, bias = own(*args, **kwargs)
        return output + layer.get_parameter(name).square().sum() * 1e-2, bias

    for layer in layers_of(trainer):
        layer.mlp.forward = partial(forward, layer, layer.mlp.forward)


def with_frozen(make: Callable[..., Any], names: str) -> Callable[..., Any]:
    def made(*args: Any, **kwargs: Any) -> Any:
        model = make(*args, **kwargs)
        for key, parameter in model.named_parameters():
            parameter.requires_grad_(not re.search(names, key))
        return model

    return made


def train_all() -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, options in SCENARIOS.items():
        alike = ALIKE_EAGERLY.get(name)
        runs = {
            "eager": found[alike]["eager"] if alike else trained(options, False, False),
            "fast": trained(options, graphs=True, fast=True),
        }
        if name == "dense":
            runs["plain"] = trained(options, graphs=True, fast=False)
        found[name] = runs
    for name, edge in EDGES.items():
        options = {"graph_modules": ("attn", "mlp"), "edge": edge}
        found[name] = {way: trained(options, way == "fast", True) for way in ("eager", "fast")}
    return found


@pytest.fixture(scope="module")
def results() -> list[dict[str, Any]]:
    return on_ranks(train_all)


@pytest.mark.parametrize("name", [*SCENARIOS, *EDGES])
def test_numbers_and_shards_are_those_of_an_eager_run(
    results: list[dict[str, Any]], name: str
) -> None:
    for runs in (found[name] for found in results):
        assert len(runs["eager"]["shards"]) > 10
        for way in runs.keys() - {"eager"}:
            for key in ("numbers", "shards"):
                assert runs[way][key] == runs["eager"][key], way


OFF = {
    "ZeRO-1": OF_GRADIENTS,
    "ZeRO-2": OF_GRADIENTS,
    "no shards": {*OF_GRADIENTS, "unshard", "main-weights"},
    "no double buffer": {"detached-weights-of-graphs", "deferred-prefetch"},
}


@pytest.mark.parametrize("name", SCENARIOS)
def test_every_part_is_used_or_says_why_not(results: list[dict[str, Any]], name: str) -> None:
    off, core = OFF.get(name, set()), Version(str(installed_version("megatron-core")))
    ordered = {"ordered-gradients"} if name == "ZeRO-2" and core.release >= (0, 20) else set()
    for did in (found[name]["fast"] for found in results):
        assert set(did["parts"]) == (PARTS - off) | ordered
        assert set(did["left out"]) == off


AT_MOST = {"dense": 2, "experts without tokens": 3, "frozen": 2, "buffers of the largest unit": 3}


def test_gradients_are_copied_a_bucket_at_a_time(results: list[dict[str, Any]]) -> None:
    passes = 2 * (STEPS - CAPTURED_AFTER)
    for name, at_most in AT_MOST.items():
        for runs in (found[name] for found in results):
            assert LAYERS * passes <= runs["fast"]["copies"] <= at_most * LAYERS * passes
    for runs in (found["few bytes wait"] for found in results):
        assert runs["fast"]["copies"] > 4 * LAYERS * passes
