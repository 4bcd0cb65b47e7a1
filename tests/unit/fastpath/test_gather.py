"""Unsharding with fewer calls: collectives, waits and frees are Megatron-FSDP's, in its order."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megatron_cg.fastpath.gather import DeferredPrefetch, Gathers, install_gathers
from megatron_cg.fastpath.unshard import CachedModules, install_unshard
from megatron_cg.tools.cpu.fakes import FakeStream, cpu_fakes
from megatron_cg.tools.cpu.training_plan import CpuModelConfig
from tests.functional.loops import RECOMPUTE
from tests.unit.ranks import on_ranks
from tests.unit.trainers import trainer_of

Events = list[tuple[Any, ...]]
GATHER = "gather"
RECOMPUTED = {
    "cuda_graph_impl": "none",
    "cuda_graph_modules": [],
    **RECOMPUTE,
}
SCENARIOS: dict[str, dict[str, Any]] = {
    "experts": {"experts": 4},
    "no double buffer": {
        "fsdp_options": {
            "fsdp_double_buffer": False,
            "fsdp_db_use_persist_buf_on_alloc_fail": False,
        }
    },
    "recomputed": {"recompute": True},
    "no overlap": {"fsdp_options": {"overlap_param_gather": False}},
    "ZeRO-2": {"fsdp_options": {"data_parallel_sharding_strategy": "optim_grads"}},
}


def trained(options: dict[str, Any], *installs: Callable[[Any], Callable[[], None]]) -> Any:
    """Numbers of a run with an evaluation and a checkpoint, and what it did with buckets."""
    from megatron.core.transformer.transformer_config import TransformerConfig as Config

    options = dict(options)
    recompute = options.pop("recompute", False)
    with pytest.MonkeyPatch.context() as patch, ExitStack() as stack:
        if recompute:

            def recomputing(**given: Any) -> Any:
                return Config(**given | RECOMPUTED)

            patch.setattr("megatron_cg.tools.cpu.cpu_model.TransformerConfig", recomputing)
        shape = CpuModelConfig(layers=3, hidden_size=16, ffn_hidden_size=16, **options)
        trainer = stack.enter_context(trainer_of(shape, microbatches=2))
        fsdp = trainer.model.module
        numbers: list[Any] = [trainer.step()]
        undo = ExitStack()
        events: Events = []
        with undo, recorded(fsdp, events):
            for install in installs:
                undo.callback(install(fsdp))
            numbers += [trainer.step(), evaluated(trainer), trainer.step()]
            # A forward pass that no backward pass follows, and weights that change after it.
            numbers += [float(trainer._forward().double().sum()), changed(trainer)]
            numbers += [len(fsdp.state_dict()), trainer.step()]
        states = sorted({str(module._training_state) for module in fsdp.module.modules()})
        numbers += [trainer.step(), states]
        return {"numbers": numbers, "events": events}


def shorten(fsdp: Any) -> Callable[[], None]:
    deferred = DeferredPrefetch()
    with ExitStack() as undo:
        undo.callback(install_unshard(fsdp, lambda _unit: None, deferred))
        undo.callback(install_gathers(fsdp, deferred))
        return undo.pop_all().close


def evaluated(trainer: Any) -> float:
    """The loss of one forward pass, ended as Megatron ends those of an evaluation."""
    with torch.no_grad():
        loss = float(trainer._forward().double().sum())
    trainer.model.synchronize_param_gather()
    return loss


def changed(trainer: Any) -> float:
    """As :func:`evaluated`, with other weights."""
    for group in trainer.model.module.param_and_grad_buffer.parameter_groups:
        for buffer in (group.model_weight_buffer, group.main_weight_buffer):
            if buffer is not None:
                buffer.data.mul_(1.25)
    return evaluated(trainer)


@contextmanager
def recorded(fsdp: Any, events: Events) -> Iterator[None]:
    """Note each coalesced collective, each wait for one, and each bucket of weights freed."""
    groups: dict[str, int] = {}

    def number_of(group: Any) -> int:
        return groups.setdefault(group.group_name, len(groups))

    def noting(
        target: Any, name: str, note: Callable[..., tuple[Any, ...]], called: str | None = None
    ) -> None:
        original = getattr(target, name)

        def noted(*args: Any, **kwargs: Any) -> Any:
            events.append((called or name, *note(*args)))
            return original(*args, **kwargs)

        patch.setattr(target, name, noted)

    def sizes(group: Any, outputs: Any, inputs: Any, *_: Any) -> tuple[Any, ...]:
        return (number_of(group), *([t.numel() for t in tensors] for tensors in (outputs, inputs)))

    def single(group: Any, output: Any, source: Any, *_: Any) -> tuple[Any, ...]:
        return sizes(group, [output], [source])

    with pytest.MonkeyPatch.context() as patch:
        noting(dist.ProcessGroup, "reduce_scatter_tensor_coalesced", sizes)
        # Of one bucket alone, the two are the same collective.
        noting(dist.ProcessGroup, "allgather_into_tensor_coalesced", sizes, GATHER)
        noting(dist.ProcessGroup, "_allgather_base", single, GATHER)
        noting(dist.Work, "wait", lambda _work: ())
        for number, group in enumerate(fsdp.param_and_grad_buffer.parameter_groups):
            noting(group.model_weight_buffer, "free_bucket_storage", lambda n=number: (n,))
        yield


def train_all() -> dict[str, Any]:
    found = {}
    for name, options in SCENARIOS.items():
        found[name] = {"own": trained(options), "short": trained(options, shorten)}
    return found


@pytest.fixture(scope="module")
def results() -> list[dict[str, Any]]:
    return on_ranks(train_all)


@pytest.mark.parametrize("name", SCENARIOS)
def test_collectives_waits_and_frees_are_megatrons_own(
    results: list[dict[str, Any]], name: str
) -> None:
    for found in results:
        runs = found[name]
        assert runs["short"]["numbers"] == runs["own"]["numbers"]
        assert runs["short"]["events"] == runs["own"]["events"]
        kinds = {event[0] for event in runs["own"]["events"]}
        assert {GATHER, "wait"} <= kinds
        assert "free_bucket_storage" in kinds or name == "ZeRO-2"


def asked_of(
    statuses: dict[int, str], *, together: bool = False, **options: Any
) -> tuple[list[Any], dict[Any, bool]]:
    """What of three buckets is gathered, or how Megatron-FSDP is asked, for the first two.

    And what it may release.
    """
    from megatron.core.distributed.fsdp.src.megatron_fsdp import param_and_grad_buffer as upstream

    parameters = [torch.nn.Parameter(torch.zeros(1)) for _ in range(3)]
    groups = [
        SimpleNamespace(
            fsdp_unit_id=0,
            transpose_weight_buffer=None,
            model_weight_buffer=SimpleNamespace(bucket_index=SimpleNamespace(size=1)),
        )
        for _ in parameters
    ]
    pipeline: Any = object.__new__(upstream.AllGatherPipeline)
    pipeline.buffer = SimpleNamespace(
        parameter_groups=groups,
        param_to_param_group={parameter: i for i, parameter in enumerate(parameters)},
        bucket_to_bucket_group={i: [i] for i in range(3)},
        num_buckets=3,
        ddp_config=SimpleNamespace(fsdp_double_buffer=False),
    )
    pipeline.bucket_status = {
        (i, False): upstream.BucketStatus[statuses.get(i, "READY_TO_USE")] for i in range(3)
    }
    pipeline.bucket_can_be_released = {(i, False): True for i in range(3)}
    pipeline.bucket_to_bucket_group = {i: 7 if together else i for i in range(3)}
    pipeline.ag_stream = FakeStream()
    asked: list[Any] = []

    def all_gather_params(params: Any, prefetch: bool = False, **_: Any) -> None:
        asked.append(([next(i for i in range(3) if parameters[i] is p) for p in params], prefetch))

    pipeline.all_gather_params = all_gather_params
    gathers: Any = Gathers(pipeline, DeferredPrefetch(), lambda: True)
    gathers.async_bucket_gather = lambda bucket, _: asked.append(bucket)
    with cpu_fakes():
        gathers.all_gather_params(parameters[:2], **options)
    return asked, pipeline.bucket_can_be_released


def test_only_what_is_not_there_is_gathered() -> None:
    kept = {(0, False): False, (1, False): False, (2, False): True}
    assert asked_of({}, prefetch=True) == ([], kept)
    assert asked_of({2: "EMPTY"}) == ([], kept)
    assert asked_of({2: "EMPTY"}, prefetch=True) == ([2], kept)
    two = {1: "EMPTY", 2: "EMPTY", 0: "COMMUNICATING"}
    assert asked_of(two, prefetch=True, bwd=True) == ([1, 2], kept)


@pytest.mark.parametrize(
    "options",
    [
        {"together": True},
        {"async_param_gather": False},
        {"outer_fsdp_group_param_gather": True},
    ],
)
def test_megatron_is_asked_for_what_is_more_than_a_gather_a_group(options: Any) -> None:
    two = {1: "EMPTY", 2: "EMPTY"}
    assert asked_of(two, prefetch=True, **options)[0] == [([1, 2], False)]


def test_a_bucket_kept_past_a_reset_is_left_to_megatron() -> None:
    asked, _ = asked_of({0: "PRESERVED", 1: "EMPTY"}, prefetch=True)
    assert asked == [([0, 1], True)]


@pytest.mark.parametrize("status", ["COMMUNICATING", "READY_TO_USE", "PRESERVED"])
def test_a_bucket_that_is_not_empty_is_left_to_megatron(status: str) -> None:
    from megatron.core.distributed.fsdp.src.megatron_fsdp import param_and_grad_buffer as upstream

    asked: list[Any] = []
    pipeline: Any = object.__new__(upstream.AllGatherPipeline)
    pipeline.buffer = SimpleNamespace(
        parameter_groups=[SimpleNamespace(transpose_weight_buffer=None)],
        param_to_param_group={},
    )
    pipeline.bucket_status = {(0, False): upstream.BucketStatus[status]}
    pipeline.bucket_can_be_released = {(0, False): True}
    pipeline.async_bucket_gather = lambda *bucket: asked.append(bucket)
    Gathers(pipeline, DeferredPrefetch(), lambda: True).async_bucket_gather(0, False)
    assert asked == [(0, False)]
    assert pipeline.bucket_status == {(0, False): upstream.BucketStatus[status]}
    assert pipeline.bucket_can_be_released == {(0, False): True}


def test_no_call_is_made_twice_to_learn_the_same(dense_model: Any) -> None:
    pipeline = dense_model.module.all_gather_pipeline
    undo = install_gathers(dense_model.module, DeferredPrefetch())
    seen = []
    own = type(pipeline).all_gather_params

    def counted(*args: Any, **kwargs: Any) -> None:
        seen.append(args)
        own(*args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(pipeline), "all_gather_params", counted)
        listed = [pipeline.buffer.parameter_groups[0].params[0]]
        for _ in range(3):
            pipeline.all_gather_params(params=listed, bwd=False)
    assert len(seen) == 1
    undo()
    assert not {"all_gather_params", "async_bucket_gather"} & vars(pipeline).keys()


def test_modules_get_their_state_together() -> None:
    unit = torch.nn.Sequential(torch.nn.Linear(1, 1), torch.nn.Sequential(torch.nn.Linear(1, 1)))
    for module in CachedModules(unit).modules():
        module._training_state = "forward"
    assert {module._training_state for module in unit.modules()} == {"forward"}
