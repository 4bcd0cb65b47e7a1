"""Capture is a transaction: after any failure the model is as it was; closing undoes it all."""

import gc
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any
from unittest.mock import patch

import pytest
import torch
from megatron.core.transformer import cuda_graphs
from torch._dynamo.testing import CompileCounter

from megatron_cg.backends.base import CaptureRequest
from megatron_cg.backends.driver import GraphResetError
from megatron_cg.capture import session as session_module
from megatron_cg.capture.guarded_capture import compiled_kept
from megatron_cg.capture.session import Phase, Session, open_sessions
from megatron_cg.consensus.exchange import Agreement
from megatron_cg.errors import CaptureError, EarlierWorkError, NotRestoredError, PhaseError
from megatron_cg.fsdp.sharding import MegatronFsdp
from megatron_cg.hooks import MODULE_REGISTRIES
from megatron_cg.replay.plain import _Identity as Same
from megatron_cg.replay.verify import bytes_of
from megatron_cg.tape.tape_backend import TapeBackend
from megatron_cg.tape.training_plan import CpuModelConfig
from megatron_cg.telemetry import CaptureReport
from tests.unit.counted import expect
from tests.unit.runs.test_one_rank_failures import call_that_fails, failing
from tests.unit.trainers import layers_of, trainer_of

pytestmark = pytest.mark.fault


class Forced(Exception):
    """Raised on purpose."""


class Alone(Agreement):
    """Votes of a rank whose others do not answer once it has failed."""

    def report_failure(self, *, ends: bool = False) -> None:
        raise CaptureError("the others do not answer")


@pytest.fixture
def trainer(one_rank: None) -> Iterator[Any]:
    model = CpuModelConfig(layers=2, graph_modules=("attn", "mlp"), dropout=0.1)
    with trainer_of(model) as made:
        made.step()
        yield made


def state(trainer: Any) -> dict[str, Any]:
    """All that a capture may not change, by identity and in order where that matters."""
    hooks = [
        (name, registry, key, Same(fn))
        for name, module in trainer.model.named_modules()
        for registry in MODULE_REGISTRIES
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
        "values": [bytes_of(p.full_tensor()).tolist() for p in trainer.model.module.parameters()],
        "buffers": [bytes_of(b).tolist() for b in trainer.model.buffers()],
        "attributes": [sorted(vars(layer)) for layer in layers_of(trainer)],
        "states": [layer._training_state for layer in layers_of(trainer)],
        "rng": torch.get_rng_state().tolist(),
        "gc": gc.isenabled(),
        "capturing": cuda_graphs.is_graph_capturing(),
    }


@contextmanager
def unchanged(trainer: Any, error: type[BaseException], words: str | None = None) -> Iterator[None]:
    before = state(trainer)
    with pytest.raises(error, match=words):
        yield
    assert state(trainer) == before


IN_ALL = (
    *("before the first hook", "warmup forward", "warmup backward"),
    *("capture forward", "capture backward", "publishing"),
)
HERE: dict[str, tuple[Any, str, int]] = {
    "earlier work": (TapeBackend, "synchronize", 1),
    "before the first change": (session_module, "GuardedCapture", 1),
    "fast path": (Session, "_install_fast_path", 1),
}
"""Where to raise beside the places of ``call_that_fails``."""


@pytest.mark.parametrize(
    ("stage", "raised", "error", "words"),
    [
        *((stage, Forced(), Forced, None) for stage in (*IN_ALL, *HERE) if stage != "earlier work"),
        ("capture forward", KeyboardInterrupt(), KeyboardInterrupt, None),
        ("capture backward", torch.OutOfMemoryError(), torch.OutOfMemoryError, None),
        (
            *("earlier work", RuntimeError("device-side assert"), EarlierWorkError),
            "work queued before capture failed.*device-side",
        ),
    ],
)
def test_a_failure_at_any_stage_changes_nothing(
    trainer: Any, stage: str, raised: BaseException, error: type[BaseException], words: str | None
) -> None:
    """It is told also if no other rank answers, and the next capture succeeds."""
    votes = Alone() if stage == "fast path" else None
    with (
        unchanged(trainer, error, words),
        failing(*(HERE.get(stage) or call_that_fails(stage)), raised),
    ):
        trainer.capture(TapeBackend(), votes)
    if votes is not None:
        votes.close()
    trainer.capture(TapeBackend())
    trainer.step()
    expect(trainer.session.counters, replayed=2)


def test_close_puts_everything_back_and_is_safe_to_run_twice(trainer: Any) -> None:
    """A user's hook on a layer runs around its replays, and not in the capture."""
    calls: list[str] = []
    layers_of(trainer)[0].register_forward_hook(lambda *_: calls.append("forward"))
    before = state(trainer)
    session = trainer.capture(TapeBackend())
    assert session.phase is Phase.REPLAYING
    assert "forward" in vars(layers_of(trainer)[0])
    replaying = state(trainer)
    for name in ("hooks", "parameter hooks", "rng"):
        assert replaying[name] == before[name]
    session.close()
    session.close()
    assert session.phase.value == "closed" and calls == []
    assert state(trainer) == before
    session = trainer.capture(TapeBackend())
    trainer.step()
    assert calls == ["forward"]
    expect(session.counters, replayed=2)


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

    def capture(self, request: CaptureRequest) -> Any:
        for module in (m for layer in request.callables for m in layer.modules()):
            module.register_forward_hook(lambda *_: None)
        raise Forced


def test_hooks_that_a_backend_leaves_below_the_units_are_taken_off(trainer: Any) -> None:
    with unchanged(trainer, Forced):
        trainer.capture(LeavesHooks())


def forced(*_args: object) -> None:
    raise Forced


def test_a_failed_undo_can_be_tried_again(trainer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    votes = Alone()
    told: list[bool] = []
    monkeypatch.setattr(votes, "report_failure", lambda *, ends: told.append(ends))

    def attach_and_fail(session: Session) -> None:
        session._undo.callback(forced)
        raise CaptureError("the fast path failed")

    monkeypatch.setattr(Session, "_install_fast_path", attach_and_fail)
    session = Session(
        MegatronFsdp(trainer.model.module), [], TapeBackend(), votes, run_remaining_hooks=True
    )
    with pytest.raises(NotRestoredError, match="Forced"), session.capturing():
        pass
    assert session.phase is Phase.EAGER and told == [True]
    votes.close()


def test_graphs_are_released_if_their_report_fails(trainer: Any) -> None:
    # As a print does whose reader is gone.
    failing = patch.object(CaptureReport, "ended", side_effect=BrokenPipeError)
    with failing, unchanged(trainer, BrokenPipeError):
        trainer.capture(TapeBackend())
    assert open_sessions() == 0


class HalfMade(TapeBackend):
    """Fails with a graph half made, which only a frame of its first error holds."""

    memory: weakref.ref[torch.Tensor] | None = None

    def capture(self, _request: CaptureRequest) -> Any:
        try:
            self.make()
        finally:
            raise Forced

    def make(self) -> None:
        graph = torch.ones(1)
        self.memory = weakref.ref(graph)
        raise KeyError


def test_half_made_graphs_are_let_go_before_the_hooks_that_other_ranks_wait_for(
    trainer: Any,
) -> None:
    backend, fsdp, name = HalfMade(), trainer.model.module, "all_gather_and_wait_parameters_ready"
    alive: list[bool] = []
    own = getattr(fsdp, name)

    def gather(*args: Any, **options: Any) -> None:
        if backend.memory is not None:
            alive.append(backend.memory() is not None)
        own(*args, **options)

    with patch.object(fsdp, name, gather), pytest.raises(Forced):
        trainer.capture(backend, run_remaining_hooks=True)
    assert alive and not any(alive)


def test_a_session_captures_once(trainer: Any) -> None:
    session = trainer.capture(TapeBackend())
    for words in ("delete its graphs and open a new session", "this session is closed"):
        with pytest.raises(PhaseError, match=words), session.capturing():
            pass
        session.close()


@pytest.mark.parametrize(("before", "compiled"), [((8,), 1), ((8, 9), 0)])
def test_eager_passes_keep_their_compiled_code(before: tuple[int, ...], compiled: int) -> None:
    torch._dynamo.reset()
    counter = CompileCounter()
    twice = torch.compile(lambda x: x * 2, backend=counter)
    for size in before:
        twice(torch.ones(size))
    with compiled_kept():
        twice(torch.ones(20))
    assert counter.frame_count == len(before) + compiled
    # Code that was compiled last is tried first: for any size it would take this one too.
    shapes = [torch.ones(size) for size in before]
    with torch.compiler.set_stance("fail_on_recompile"):
        for given in shapes:
            twice(given)
    twice(torch.ones(33))
    assert counter.frame_count == len(before) + 2 * compiled
