"""Capture is a transaction: after any failure the model is as it was; closing undoes it all."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch

from megatron_cg.backends.driver.graphed import GraphResetError
from megatron_cg.backends.tape.tape_backend import TapeBackend
from megatron_cg.capture.controller import GraphController
from megatron_cg.capture.session import Phase, Session, open_sessions
from megatron_cg.consensus.exchange import Agreement
from megatron_cg.errors import CaptureError, EarlierWorkError, HookError, PhaseError
from megatron_cg.events import CaptureEnded, Event, GraphsDeleted, subscribe
from megatron_cg.hooks import HookKind
from megatron_cg.hooks.hook_records import FLAG_REGISTRIES
from megatron_cg.replay.mismatch_policy import ReplayPolicy
from megatron_cg.tools.cpu.training_plan import CpuModelConfig
from tests.unit.counted import expect
from tests.unit.identity import Same
from tests.unit.trainers import trainer_of


class Forced(Exception):
    """Raised on purpose."""


@pytest.fixture
def trainer(one_rank: None) -> Iterator[Any]:
    model = CpuModelConfig(layers=2, graph_modules=("attn", "mlp"), dropout=0.1)
    with trainer_of(model) as made:
        made.step()
        yield made


def layers_of(trainer: Any) -> list[Any]:
    from megatron_cg.tools.cpu.cpu_model import transformer_layers

    return list(transformer_layers(trainer.model))


def state(trainer: Any) -> dict[str, Any]:
    """All that a capture may not change, by identity and in order where that matters."""
    from megatron.core.transformer import cuda_graphs

    hooks = [
        (name, registry, key, Same(fn))
        for name, module in trainer.model.named_modules()
        for registry in (*(kind.value for kind in HookKind), *FLAG_REGISTRIES)
        for key, fn in getattr(module, registry).items()
    ]
    raw = trainer.model.module.param_and_grad_buffer.params
    quiet = [
        (index, key, Same(fn))
        for index, parameter in enumerate(raw)
        for key, fn in (parameter._post_accumulate_grad_hooks or {}).items()
    ]
    assert hooks and quiet
    return {
        "hooks": hooks,
        "parameter hooks": quiet,
        "gradients": [Same(p.grad) for p in raw],
        "values": [p.full_tensor().clone() for p in trainer.model.module.parameters()],
        "buffers": [b.clone() for b in trainer.model.buffers()],
        "attributes": [sorted(vars(layer)) for layer in layers_of(trainer)],
        "states": [layer._training_state for layer in layers_of(trainer)],
        "rng": torch.get_rng_state(),
        "gc": gc.isenabled(),
        "capturing": cuda_graphs.is_graph_capturing(),
    }


def assert_same(before: dict[str, Any], after: dict[str, Any]) -> None:
    for name, old in before.items():
        new = after[name]
        if name in ("values", "buffers"):
            assert all(torch.equal(a, b) for a, b in zip(old, new, strict=True)), name
        elif name == "rng":
            assert torch.equal(old, new)
        else:
            assert old == new, name


def failing(owner: Any, name: str, number: int, error: BaseException) -> Callable[[], None]:
    """Let the ``number``-th call of ``owner.name`` raise; returns the undo."""
    old = getattr(owner, name)
    calls = iter(range(1, 1000))

    def wrapped(*args: Any, **kwargs: Any) -> Any:
        if next(calls) == number:
            raise error
        return old(*args, **kwargs)

    setattr(owner, name, wrapped)
    return lambda: setattr(owner, name, old)


def stages() -> dict[str, tuple[Any, str, int]]:
    """Where to raise: (owner, name, number of the call). Two warmup iterations of two layers."""
    from megatron.core.transformer.transformer_layer import TransformerLayer

    from megatron_cg.backends.driver import capture as driver
    from megatron_cg.capture import session
    from megatron_cg.integrations.megatron import helper

    return {
        "before the first change": (session, "GuardedCapture", 1),
        "first hook": (driver, "check_hooks", 1),
        "warmup forward": (TransformerLayer, "_te_cuda_graph_capture", 2),
        "warmup backward": (torch.autograd, "backward", 1),
        "capture forward": (TransformerLayer, "_te_cuda_graph_capture", 6),
        "capture backward": (torch.autograd, "backward", 6),
        "publishing": (helper, "attach_replay", 2),
    }


@pytest.mark.parametrize(
    ("stage", "error"),
    [
        *((stage, Forced("forced")) for stage in sorted(stages())),
        ("capture forward", KeyboardInterrupt()),
        ("capture backward", torch.OutOfMemoryError()),
    ],
)
def test_a_failure_at_any_stage_changes_nothing(
    trainer: Any, stage: str, error: BaseException
) -> None:
    before = state(trainer)
    undo = failing(*stages()[stage], error)
    try:
        with pytest.raises(type(error)):
            trainer.capture(TapeBackend())
    finally:
        undo()
    assert_same(before, state(trainer))


def test_close_puts_everything_back_and_is_safe_to_run_twice(trainer: Any) -> None:
    before = state(trainer)
    session = trainer.capture(TapeBackend())
    assert session.phase is Phase.REPLAYING
    assert "forward" in vars(layers_of(trainer)[0])
    replaying = state(trainer)
    for name in ("hooks", "parameter hooks"):
        assert replaying[name] == before[name]
    assert torch.equal(replaying["rng"], before["rng"])
    session.close()
    session.close()
    assert session.phase.value == "closed"
    assert_same(before, state(trainer))


def test_ranks_vote_on_lost_graphs_also_if_one_cannot_be_released(trainer: Any) -> None:
    session = trainer.capture(TapeBackend())
    session._agreement = votes = Agreement()
    session._capture.eager_passes[0].collectives = True
    graph = layers_of(trainer)[0].cuda_graphs[0]
    undo = failing(type(graph), "reset", 1, Forced())
    try:
        with pytest.raises(Forced):
            session.close()
    finally:
        undo()
    assert votes.left is not None
    votes.close()


@pytest.mark.parametrize("error", [None, Forced()])
def test_a_closed_session_has_released_its_graphs_once_the_gpu_was_done(
    trainer: Any, error: Exception | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And also where the wait for the GPU tells of an error of its work."""
    session = trainer.capture(TapeBackend())
    graphs = [graph.graph for layer in layers_of(trainer) for graph in layer.cuda_graphs]
    assert len(graphs) == 2
    guarded = layers_of(trainer)[0].cuda_graphs[0]
    assert guarded.backward_dw == graphs[0].backward_dw and not hasattr(guarded, "no_such_method")
    waits: list[list[bool]] = []

    def wait(_backend: TapeBackend) -> None:
        waits.append([is_reset(graph) for graph in graphs])
        if error is not None:
            raise error

    monkeypatch.setattr(TapeBackend, "synchronize", wait)
    with nullcontext() if error is None else pytest.raises(Forced):
        session.close()
    assert waits == [[False, False]] and all(map(is_reset, graphs))


def is_reset(graph: Any) -> bool:
    try:
        graph.backward_dw()
    except GraphResetError:
        return True
    return False


class LeavesHooks(TapeBackend):
    """Fails with hooks of its own on all modules of the units, as TE in its warmup."""

    def capture(self, callables: Any, *_args: Any, **_options: Any) -> Any:
        for module in (m for layer in callables for m in layer.modules()):
            module.register_forward_hook(lambda *_: None)
        raise Forced


def test_hooks_that_a_backend_leaves_below_the_units_are_taken_off(trainer: Any) -> None:
    before = state(trainer)
    with pytest.raises(Forced):
        trainer.capture(LeavesHooks())
    assert_same(before, state(trainer))


def test_another_capture_is_asked_for_only_once_the_last_one_has_replayed(trainer: Any) -> None:
    session = trainer.capture(TapeBackend(), policy=ReplayPolicy("recapture"))
    session.mismatches.captured_again = True
    hook = layers_of(trainer)[0].self_attention.register_forward_hook(lambda *_: None)
    trainer.step()
    expect(session.counters, replayed=1, mismatched=1)
    assert not session.mismatches.wants_recapture
    hook.remove()
    trainer.step()
    expect(session.counters, replayed=3, mismatched=1)
    layers_of(trainer)[0].self_attention.register_forward_hook(lambda *_: None)
    trainer.step()
    expect(session.counters, replayed=4, mismatched=2)
    assert session.mismatches.wants_recapture


class Alone(Agreement):
    """Votes of a rank whose others do not answer once it has failed."""

    def report_failure(self) -> None:
        raise CaptureError("the others do not answer")


def test_a_failure_after_the_graphs_is_told_also_if_no_other_rank_answers(
    trainer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    votes = Alone()
    before = state(trainer)
    monkeypatch.setattr(Session, "_install_fast_path", forced)
    with pytest.raises(Forced):
        trainer.capture(TapeBackend(), votes)
    monkeypatch.undo()
    assert_same(before, state(trainer))
    votes.close()


def forced(*_args: object) -> None:
    raise Forced


def test_a_failure_to_undo_is_told_too_and_the_session_can_try_again(
    trainer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    votes = Alone()
    told: list[bool] = []
    monkeypatch.setattr(votes, "report_failure", lambda: told.append(True))

    def attach_and_fail(session: Session) -> None:
        session._undo.callback(forced)
        raise CaptureError("the fast path failed")

    monkeypatch.setattr(Session, "_install_fast_path", attach_and_fail)
    session = Session(trainer.model, [], TapeBackend(), votes, joins=True)
    with pytest.raises(Forced), session.capturing():
        pass
    assert session.phase is Phase.EAGER and told == [True]
    votes.close()


@contextmanager
def ears_that_fail(kind: type[Event]) -> Iterator[None]:
    """A subscriber raises, as a print does whose reader is gone."""

    def hear(event: Event) -> None:
        if isinstance(event, kind):
            raise BrokenPipeError

    stop = subscribe(hear)
    try:
        yield
    finally:
        stop()


def test_graphs_are_released_if_their_report_fails(trainer: Any) -> None:
    before = state(trainer)
    with ears_that_fail(CaptureEnded), pytest.raises(BrokenPipeError):
        trainer.capture(TapeBackend())
    assert open_sessions() == 0
    assert_same(before, state(trainer))


def test_graphs_are_deleted_if_the_report_on_them_fails(trainer: Any) -> None:
    before = state(trainer)
    session = trainer.capture(TapeBackend())
    votes = Agreement()
    controller = GraphController(votes, lambda: session, lambda: None)
    controller.capture()
    with ears_that_fail(GraphsDeleted), pytest.raises(BrokenPipeError):
        controller.delete()
    assert session.phase is Phase.CLOSED and open_sessions() == 0
    assert_same(before, state(trainer))
    controller.close()


class HalfMade(TapeBackend):
    """Fails with a graph half made, which only its own frame holds."""

    def __init__(self) -> None:
        self.memory: weakref.ref[torch.Tensor] | None = None

    def capture(self, *_args: Any, **_options: Any) -> Any:
        graph = torch.ones(1)
        self.memory = weakref.ref(graph)
        raise Forced


def test_half_made_graphs_are_let_go_before_the_hooks_that_other_ranks_wait_for(
    trainer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend, fsdp = HalfMade(), trainer.model.module
    alive: list[bool] = []
    own = fsdp.all_gather_and_wait_parameters_ready

    def gather(*args: Any, **options: Any) -> None:
        if backend.memory is not None:
            alive.append(backend.memory() is not None)
        own(*args, **options)

    with monkeypatch.context() as patch:
        patch.setattr(fsdp, "all_gather_and_wait_parameters_ready", gather)
        with pytest.raises(Forced):
            trainer.capture(backend, joins=True)
    assert alive and not any(alive)


def test_a_session_captures_once(trainer: Any) -> None:
    session = trainer.capture(TapeBackend())
    with (
        pytest.raises(PhaseError, match="delete its graphs and open a new session"),
        session.capturing(),
    ):
        pass
    session.close()
    with pytest.raises(PhaseError, match="this session is closed"), session.capturing():
        pass


def test_a_capture_without_graphs_is_an_error_that_names_the_layers(trainer: Any) -> None:
    from megatron_cg.replay.unit import Unit

    before = state(trainer)
    units = [Unit(f"layer {i}", layer, ()) for i, layer in enumerate(layers_of(trainer))]
    session = Session(trainer.model, units, TapeBackend())
    with pytest.raises(CaptureError, match="layer 0, layer 1"), session.capturing():
        pass
    assert session.phase is Phase.EAGER
    assert_same(before, state(trainer))


def test_a_model_without_fsdp_is_refused() -> None:
    with pytest.raises(HookError, match="--use-megatron-fsdp"):
        Session(torch.nn.Linear(2, 2), [], TapeBackend())


def test_a_user_hook_inside_the_graph_stops_capture_before_anything_changes(trainer: Any) -> None:
    handle = layers_of(trainer)[0].self_attention.register_forward_hook(lambda *_: None)
    before = state(trainer)
    with pytest.raises(HookError, match="inside the part that becomes a CUDA graph"):
        trainer.capture(TapeBackend())
    assert_same(before, state(trainer))
    handle.remove()


def test_a_user_hook_on_the_layer_runs_around_every_replay(trainer: Any) -> None:
    calls: list[str] = []
    layers_of(trainer)[0].register_forward_hook(lambda *_: calls.append("forward"))
    session = trainer.capture(TapeBackend())
    assert calls == []
    trainer.step()
    assert calls == ["forward"]
    expect(session.counters, replayed=2)


def test_work_that_failed_before_capture_is_not_blamed_on_capture(
    trainer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = state(trainer)

    def broken(_self: TapeBackend) -> None:
        raise RuntimeError("CUDA error: device-side assert triggered")

    monkeypatch.setattr(TapeBackend, "synchronize", broken)
    with pytest.raises(EarlierWorkError, match=r"work queued before capture failed.*device-side"):
        trainer.capture(TapeBackend())
    monkeypatch.undo()
    assert_same(before, state(trainer))
    trainer.capture(TapeBackend())
