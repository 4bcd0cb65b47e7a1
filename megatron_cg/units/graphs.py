"""The graphs of one model, over the steps of a training loop."""

import logging
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, Self

import torch
import torch.distributed as dist
from torch import nn
from torch._dynamo.exc import InternalTorchDynamoError
from torch.utils.weak import WeakIdKeyDictionary

from megatron_cg.arguments.schema import TRUE_OR_FALSE, OnFailure, OnMismatch, Takes, at_least
from megatron_cg.backends.base import Backend, CaptureRequest
from megatron_cg.capture.session import GraphController, Session
from megatron_cg.consensus.exchange import TIMEOUT, Agreement
from megatron_cg.errors import ConfigurationError, Violation, speaking
from megatron_cg.integrations import call_arguments
from megatron_cg.integrations.repeated_step import StepState, train_step
from megatron_cg.integrations.teardown import graphs_close_in_time
from megatron_cg.replay.borders import RUN_BACKWARD, users_of
from megatron_cg.replay.mismatch_policy import Counters, ReplayPolicy
from megatron_cg.restore import Restores
from megatron_cg.telemetry import is_first_rank
from megatron_cg.units.call import separate
from megatron_cg.units.find_units import UnitName, check_seen, compiled_unit, find_units, label_of
from megatron_cg.units.module_unit import ModuleUnit
from megatron_cg.units.observe import Observer
from megatron_cg.units.sums import Later
from megatron_cg.units.unsharded import find_sharding
from megatron_cg.upstream.patch import run_instead, undone_after
from megatron_cg.upstream.symbols import Symbol

logger = logging.getLogger(__name__)

_CALL = Symbol("torch.nn:Module._call_impl", "what every call of a module runs")
RELIES_ON = (_CALL, RUN_BACKWARD)
_VOICE = call_arguments.CallVoice(call_arguments.UNITS)
_NO_UNITS = Violation(
    "argument",
    "units names nothing",
    "no unit would be captured",
    'units=["layers.*"], with names as in model.module.named_modules()',
)
_ALIKE = (
    "Run the same steps and passes on all ranks. To train without graphs: leave graph_units out."
)
_HAS_GRADIENTS = Violation(
    *("verify-steps", "a model of Megatron has gradients from before graphs.verified"),
    "a verified step is trained twice, each time from cleared gradients",
    "call zero_grad before graphs.verified, and all backward passes of the step in it",
)
_NOT_VERIFIED = Violation(
    "step-not-verified",
    "verify_steps, and a step that did not give its passes to graphs.verified()",
    "only a function that trains all passes of a step can be run twice and compared",
    "loss = graphs.verified(lambda: train(batch)) before optimizer.step(), or leave verify_steps "
    "out",
)
_COMPILED = compiled_unit("torch.compile was called on a unit, or on what calls one")
_AGAIN = (
    " If it stays so, capture again, on all ranks between two steps: graphs.close(), and then "
    "graphs = graph_units(model, units)."
)
_SOME_RANKS = (
    "If only some ranks train this model, name them on those: graph_units(..., group=GROUP), with "
    "GROUP = torch.distributed.new_group(RANKS), which all ranks call"
)
_PROCESS_GROUP = Takes(
    lambda one: one is None or (isinstance(one, dist.ProcessGroup) and dist.get_rank(one) >= 0),
    "a process group of torch.distributed with this rank in it; None: all ranks",
    "mesh.get_group(), on the ranks of that group only",
)


class GraphedUnits:
    """Replay CUDA graphs of ``units`` of a model while it trains.

    The model may be sharded by Megatron-FSDP, its version 2 or FSDP2, wrapped by
    DistributedDataParallel, or neither. Units are captured after ``warmup_steps`` steps inside
    :meth:`GraphedUnits.step`, with the arguments of their calls. All ranks of ``group`` call this
    together::

        with graph_units(model, ["layers.*"]) as graphs:
            for batch in batches:
                with graphs.step():
                    optimizer.zero_grad()
                    model(batch).mean().backward()
                    optimizer.step()

    Args:
        model: the wrapped model, or any module around it. ``fully_shard_model`` must have been
            called with ``fsdp_double_buffer=True`` and
            ``fsdp_db_use_persist_buf_on_alloc_fail=True``.
        units: FSDP units, or any modules if the model is not sharded: names as in
            ``named_modules()`` of the model inside the wrapper, with ``*`` for one part between
            dots; modules; or classes. A single one may be given without a list.
        warmup_steps: eager steps before capture, at least 1.
        backend: the capture backend, as an object or by name: ``"native"``, which needs nothing but
            torch; ``"transformer_engine"`` or ``"te"``, which captures FP8 too; ``"tape"``.
        on_failure: whether a failed capture raises, or is logged and training goes on eagerly.
        on_mismatch: what happens when a graph must not be replayed; as ``--cg-on-mismatch``.
        verify_interval: None compares one unit's replay with an eager pass in every tenth step, in
            turn. A number N compares all replays of every N-th step; 0 means never.
        verify_steps: in every N-th step :meth:`verified` trains twice and compares; 0 means never.
        fast_path: False is as ``--cg-no-fsdp-fast-path``.
        separate_inputs: whether units take their arguments through views (``x.view_as(x)``), in
            eager passes too, so that a unit's own uses of a tensor are summed first. Numbers equal
            those of eager training with these views bit for bit, which is this same call with more
            ``warmup_steps`` than the loop has steps.
        group: the ranks that train this model together, if those are not all ranks of the default
            process group, such as ``mesh.get_group()``.

    Raises:
        ArgumentError: with every argument that is wrong.
        AgreementError: not all ranks of ``group`` make this call, or they differ in settings.
        HookError: the model is sharded in a way that is not known, or in more than one.
        ConfigurationError: with every reason why a unit cannot be captured.
        UpstreamChangedError, CaptureError: the backend is not there.
    """

    @speaking(_VOICE)
    def __init__(
        self,
        model: nn.Module,
        units: UnitName | Iterable[UnitName],
        *,
        warmup_steps: int = 3,
        backend: Backend | call_arguments.BackendName = "native",
        on_failure: OnFailure = "error",
        on_mismatch: OnMismatch = "eager",
        verify_interval: int | None = None,
        verify_steps: int = 0,
        fast_path: bool = True,
        separate_inputs: bool = False,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        given, wanted = call_arguments.settings_in(locals()), call_arguments.several(units)
        broken = [] if wanted else [_NO_UNITS]
        broken += at_least(1).check("warmup_steps", warmup_steps)
        broken += TRUE_OR_FALSE.check("separate_inputs", separate_inputs)
        broken += call_arguments.check_settings(given, call_arguments.UNITS)
        broken += _PROCESS_GROUP.check("group", group)
        call_arguments.refuse(broken)
        self._warmup_steps, self._on_failure = warmup_steps, on_failure
        self._policy = ReplayPolicy(on_mismatch, verify_interval, verify_steps, again=_AGAIN)
        self._later: Later | None = None
        self._begun = 0
        """Steps for the next capture; equal on all ranks."""
        self._fast_path, self._awaits_verified = fast_path, False
        with ExitStack() as undo:
            self._agreement = Agreement(group=group, remedy=_ALIKE, alone=_SOME_RANKS)
            undo.callback(self._agreement.close)
            given |= {"units": [*map(label_of, wanted)], "warmup_steps": warmup_steps}
            given["separate_inputs"] = separate_inputs
            given["backend"] = getattr(backend, "name", backend)
            call_arguments.require_same(self._agreement, "graph_units", given)
            self._backend = call_arguments.backend_of(backend)
            self._sharding = find_sharding(model)
            self._units = find_units(self._sharding, wanted, self._backend.name)
            self._observer = Observer(self._units, self._sharding)
            undo.callback(self._observer.forget)
            for unit in self._units.values() if separate_inputs else ():
                undo.callback(separate(unit))
            undo.callback(graphs_close_in_time())
            self._controller = GraphController(
                self._agreement, self._capture, eager_on_failure=on_failure == "eager"
            )
            undo.callback(self._controller.close)
            undo.callback(self._controller.release)
            self._undo = undo.pop_all()

    def _all_have_seen_enough(self) -> bool:
        """A vote, since on one rank a step may have raised, or weights need a gradient anew."""
        if self._begun < self._warmup_steps:
            return False
        is_recent = self._observer.is_recent(first=self._begun == self._warmup_steps)
        enough = self._observer.steps >= self._warmup_steps and is_recent
        return not self._agreement.on_any_rank("steps to observe", not enough, TIMEOUT)

    @property
    def counters(self) -> Counters:
        """The counts of all captures so far."""
        return self._controller.counters

    @property
    def session(self) -> Session | None:
        """The current graphs; None before capture, and after falling back to eager."""
        return self._controller.session

    @contextmanager
    def step(self) -> Iterator[None]:
        """One training step of all ranks: every pass up to the optimizer's step.

        On entry, graphs are captured if they are due. If other weights need a gradient than in the
        last step, one more step is observed first.

        Raises:
            ConfigurationError: the observed calls of a unit cannot be captured.
            CaptureError: capture failed, on this rank or another; nothing was changed. Not raised
                with ``on_failure="eager"``, unless ranks can no longer go on together.
            AgreementError: ranks no longer do the same; this one has to end.
            ReplayMismatchError: as :class:`megatron_cg.replay.mismatch_policy.MismatchPolicy`.
        """
        with speaking(_VOICE), ExitStack() as stack:
            if self._controller.awaits_capture and self._all_have_seen_enough():
                self._controller.capture()
            if self._controller.gave_up:
                self._observer.forget()
            self._controller.begin_step()
            session = self.session
            self._awaits_verified = session is not None and session.mismatches.verifies_step
            if self.session is None and self._controller.awaits_capture:
                self._begun += 1
                stack.enter_context(self._observer.observe_step())
            try:
                yield
            except InternalTorchDynamoError as error:
                if "megatron_cg" not in str(error):
                    raise
                raise ConfigurationError([_COMPILED]) from error
        if self._awaits_verified:
            raise ConfigurationError([_NOT_VERIFIED])
        if self._later is not None:
            self._later.end_step()

    def verified[T](self, step: Callable[[], T]) -> T:
        """What ``step`` returns, which runs all passes of a training step, inside :meth:`step`.

        In every ``verify_steps``-th step it runs once more, eagerly, from the state and gradients
        of before (Megatron-FSDP: from cleared gradients), and the numbers of both are compared. So
        it must not update weights or read its batch by itself::

            with graphs.step():
                batch = next(batches)
                optimizer.zero_grad()
                loss = graphs.verified(lambda: train(batch))
                optimizer.step()

        Raises ReplayMismatchError: with ``on_mismatch="error"``, if they differ on any rank.
        """
        self._awaits_verified, session = False, self.session
        if session is None or not session.mismatches.verifies_step:
            return step()
        once = partial((state := _AllState(session)).observe, step)
        return train_step(session, once, step, state=state)  # type: ignore[no-any-return]

    def close(self) -> None:
        """Release the graphs and undo all changes. Safe to call twice.

        Call it before ``destroy_process_group``, which closes graphs too but waits for them. Warns
        if the loop was over before the capture.
        """
        if self._controller.awaits_capture and not self.counters.captured and is_first_rank():
            logger.warning(
                f"megatron_cg: nothing was captured: the loop had {self._observer.steps} steps in "
                f"graphs.step(), and the first {self._warmup_steps} are eager (warmup_steps)."
            )
        self._undo.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_exception: object) -> None:
        if kind is not None:
            self._undo.close()
        self.close()

    @speaking(_VOICE)
    def _capture(self) -> Session:
        seen = self._observer.calls
        check_seen(self._units, self._observer)
        device_type = next(iter(seen.values())).autocast["device_type"]
        backward = self._observer.autocast_in_backward(device_type) | {"cache_enabled": False}
        units = [ModuleUnit(name, self._units[name], call, backward) for name, call in seen.items()]
        session = Session(
            self._sharding,
            units,
            self._backend,
            self._agreement,
            run_remaining_hooks=self._on_failure == "eager",
            policy=self._policy,
            fast_path=self._fast_path,
        )
        samples = [tuple(make() for make in call.makers) for call in seen.values()]
        with session.capturing(), torch.autocast(**backward), ExitStack() as stack:
            for unit, own in zip(units, samples, strict=True):
                stack.callback(unit.taking_tensors(own))
            graphs = session.capture(CaptureRequest(tuple(unit.layer for unit in units), samples))
            for unit, graph in zip(units, graphs, strict=True):
                vars(unit.layer)["cuda_graphs"] = [graph]
        waiting, found = graphs[0].in_flight.nodes, session.mismatches.mismatched_in_backward
        self._later = Later(self._observer.sums.seen, units, waiting, found)
        session.on_close(self._later.observe())
        session.on_close(partial(setattr, self, "_later", None))
        return session


class _AllState(StepState):
    """Also gradients, and what a step meets around the model, saved as it comes to it."""

    def __init__(self, session: Session) -> None:
        sharding, self._units = session.sharding, session.units
        super().__init__([sharding.network], self._units)
        self._sharding, self._met = sharding, {sharding.wrapped, *sharding.network.modules()}
        self._clears = [*clears_of(self._met)]
        self._around, self._gradients = list[StepState](), WeakIdKeyDictionary()
        self._keep(self._owners())

    def observe(self, step: Callable[[], Any]) -> Any:
        def call(original: Any, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            if module not in self._met:
                self._clears += clears_of(module.modules())
                self._around.append(StepState([module], self._units))
                self._met.update(module.modules())
                self._keep((parameter, "grad") for parameter in module.parameters())
            return original(module, *args, **kwargs)

        def run(original: Any, roots: Any, *args: Any, **kwargs: Any) -> Any:
            leaves = (getattr(node, "variable", None) for node, _ in users_of(roots))
            self._keep((leaf, "grad") for leaf in leaves if leaf is not None)
            return original(roots, *args, **kwargs)

        with undone_after(run_instead(_CALL, call)), undone_after(run_instead(RUN_BACKWARD, run)):
            return step()

    def restore(self) -> None:
        # FSDP2's modules may have held other parameters before: the unsharded ones.
        now = {owner: (name, None, None) for owner, name in self._owners()}
        with Restores() as stack:
            stack.callback(super().restore)
            for clear in self._clears:
                stack.callback(clear)
            for owner, (name, grad, values) in (now | dict(self._gradients)).items():
                stack.restore("a gradient", setattr, owner, name, grad)
                if grad is not None:
                    stack.restore("a gradient", grad.copy_, values)
            for state in self._around:
                stack.callback(state.restore)

    def tensors(self) -> Iterator[tuple[str, Any]]:
        yield from super().tensors()
        own = dict(self._owners())
        for leaf in self._gradients:
            if isinstance(leaf, nn.Parameter) and leaf not in own:  # The step makes other leaves.
                yield f"gradient outside, of shape {tuple(leaf.shape)}", leaf.grad
        for state in self._around:
            yield from state.tensors()

    def _owners(self) -> Iterable[tuple[Any, str]]:
        """What may hold a gradient of the model: object and attribute."""
        own = ((parameter, "grad") for parameter in self._sharding.network.parameters())
        return *own, *self._sharding.gradient_owners()

    def _keep(self, owners: Iterable[tuple[Any, str]]) -> None:
        for owner, name in owners:
            if owner not in self._gradients:
                grad = getattr(owner, name, None)
                self._gradients[owner] = name, grad, None if grad is None else grad.clone()


def clears_of(modules: Iterable[Any]) -> Iterator[Callable[[], None]]:
    """What clears the gradients of each model of Megatron among ``modules``.

    Raises ConfigurationError if one already has some, which would be lost.
    """
    for model in modules:
        if (store := getattr(model, "param_and_grad_buffer", None)) is not None:
            buffers = [group.main_grad_buffer for group in store.parameter_groups]
            waits = model.grad_reduce_pipeline.grad_reduce_queue
            if waits or any(one is not None and one.data.any() for one in buffers):
                raise ConfigurationError([_HAS_GRADIENTS])
        if hasattr(model, "zero_grad_buffer"):
            yield model.zero_grad_buffer


graph_units = GraphedUnits
