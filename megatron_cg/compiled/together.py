"""One decision of all ranks at the guards of ``torch.compile``, and one shape for all.

Dynamo decides on each rank alone whether a compiled region fits a call, and which sizes it compiles
as constants. Ranks whose batches differ then compile at different times and different code.

Note [Who decides the shape]
    No rank alone. When a guard fails on one rank, all compile that region again. Dynamo first
    traces it with every size as a constant. Then each rank enters the sizes that all ranks met, in
    rank order, into its history of sizes, and Dynamo traces again. So all apply the same rule to
    the same history: a size that has been the same on all ranks is a constant, any other is
    dynamic. This is torch's own scheme (``enable_compiler_collectives``), but torch 2.11 to 2.15
    run it on the group of one accelerator only. Here it runs on the votes' gloo group. Where sizes
    must be constants (``dynamic=False``, CUDA graphs) and differ, all ranks raise an error.

Note [A hook must not raise]
    An exception in the guard-complete hook ends the process by ``std::terminate`` (torch 2.11). So
    the hook keeps it and answers that a guard failed. It is raised where Dynamo then begins to
    compile, or at the end of the block if Dynamo may not compile there.

Note [One vote before each compilation]
    Dynamo asks the hook only if a region has compiled code, which may be gone on one rank only: its
    guards drop an object when garbage is collected. So a rank that begins to compile without
    having been asked votes there. A vote at which all guards passed leads to no compilation, so it
    never counts for the next one; a failed vote does, until the hook is asked again. If Dynamo may
    not compile after a failed vote, and next compiles another region whose code is gone on one rank
    only, that rank skips this vote, which is an error on all of them.
"""

import logging
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from typing import Any, Self

import torch.distributed as dist

from megatron_cg.arguments.schema import shared_by_ranks
from megatron_cg.consensus import decision
from megatron_cg.consensus.exchange import TIMEOUT, Agreement, under_capture
from megatron_cg.errors import ArgumentError, PhaseError, Violation
from megatron_cg.upstream.patch import replace_function
from megatron_cg.upstream.symbols import Symbol

logger = logging.getLogger(__name__)


def _dynamo(path: str, expected: str, **checks: tuple[str, ...]) -> Symbol:
    return Symbol(f"torch._dynamo.{path}", expected, **checks)


_SET_HOOK = Symbol(
    "torch._C._dynamo.eval_frame:set_guard_complete_hook",
    "sets the function that is asked after each check of guards; returns the previous one",
)
_BEGIN = _dynamo("convert_frame:get_compile_pg", "is called when a compilation begins")
_EXCHANGE = _dynamo(
    "output_graph:OutputGraph.run_compiler_collective",
    "exchanges the sizes that ranks met in the first trace, and starts the second",
    fingerprints=("7686050615057836", "7057496218b8adfe"),  # torch 2.11 and 2.12; 2.13 to 2.15
)
_STATE = _dynamo(
    "symbolic_convert:DistributedState",
    "what one compilation exchanges",
    attributes=("compile_pg", "local_state", "all_states"),
)
_MET = _dynamo("pgo:FrameStateSizeEntry", "the sizes of one input", attributes=("size", "scalar"))
_RESTART = _dynamo("exc:CompileCollectiveRestartAnalysis", "starts the second trace")
_WRAPPED = _dynamo("exc:InternalTorchDynamoError", "what Dynamo makes of our errors")
_DYNAMIC = _dynamo(
    "config:automatic_dynamic_shapes",
    "whether a size that varied is dynamic; False under dynamic=False",
)
_SUPPRESS = _dynamo(
    "config:suppress_errors", "whether Dynamo goes on in eager after an error, ours included"
)
RELIES_ON = (_SET_HOOK, _BEGIN, _EXCHANGE, _STATE, _MET, _RESTART, _WRAPPED, _DYNAMIC, _SUPPRESS)
_REMEDY = (
    "Call the same compiled regions in the same order on all ranks; what one rank alone evaluates "
    "or logs calls the module that is not compiled."
)


class _Votes:
    """The votes of all ranks on compiled regions."""

    def __init__(self, agreement: Agreement) -> None:
        self._agreement = agreement
        self._serial = 0
        self._voted = False
        """Whether the hook's last vote failed, and no compilation has begun since."""
        self.unraised: BaseException | None = None
        """What went wrong at a vote on guards, until it is raised."""
        self.wrapped: BaseException | None = None
        """What :meth:`sizes_met` raised last, which Dynamo puts into an exception of its own."""

    def guards_checked(self, passed: bool) -> bool:
        """The hook: whether guards passed on all ranks; False makes Dynamo compile.

        Under a capture of a CUDA graph no vote is held. See Note [A hook must not raise].
        """
        self._voted = False
        if under_capture():
            return passed
        if self.unraised is not None:
            return False  # Ranks no longer do the same, so another vote would say nothing.
        try:
            all_passed = self._vote_on_guards(passed)
        except BaseException as error:
            self.unraised = error
            logger.error("megatron_cg: the vote on a compiled region failed: %s", error)
            return False
        self._voted = not all_passed
        return all_passed

    def compilation_begins(self) -> Self:
        """In place of Dynamo's ``get_compile_pg``; the result gets to :meth:`sizes_met`."""
        if self.unraised is not None:
            error, self.unraised = self.unraised, None
            raise error
        # See Note [One vote before each compilation].
        if not self._voted:
            self._vote_on_guards(False)
        self._voted = False
        return self

    def sizes_met(self, graph: Any) -> None:
        """In place of Dynamo's ``OutputGraph.run_compiler_collective``.

        Raises what starts the second trace, and AgreementError.
        """
        tracer = graph.root_tx
        state = tracer.distributed_state
        if state is None or state.all_states is not None:
            return
        try:
            state.all_states = self._exchange(tracer.f_code, state.local_state)
        except BaseException as error:
            self.wrapped = error
            raise
        # The second trace may take another way than the first.
        tracer.speculation_log.clear()
        raise _RESTART.find()

    def _exchange(self, code: Any, met: Any) -> list[Any]:
        region = f"{code.co_name}, line {code.co_firstlineno}"
        vote = decision.Vote(graphs=decision.digest([region]))
        decided = self._vote(decision.Kind.COMPILE, vote, region)
        if decided.minority:
            others = decision.ranks_text(decided.minority)
            raise decision.AgreementError(
                f"this rank is at {region}, and {others} differ from most ranks. {_REMEDY}"
            )
        states = self._agreement.gather(met)
        if not _DYNAMIC.find():
            _require_one_shape(region, [state.automatic_dynamic for state in states])
        return states

    def _vote_on_guards(self, passed: bool) -> bool:
        return not self._vote(decision.Kind.GUARD, decision.Vote(against=not passed)).against

    def _vote(self, kind: decision.Kind, vote: decision.Vote, name: str = "") -> decision.Decision:
        self._serial += 1
        return self._agreement.agree(kind, vote, serial=self._serial, name=name)


@contextmanager
def compile_together(*, timeout: timedelta = TIMEOUT) -> Iterator[None]:
    """Let all ranks decide together at every compiled region that is called in this block.

    All ranks enter it together, before the first call of a compiled region, and call the same
    regions in the same order. ``timeout`` is how long a rank waits for another at a vote; longer
    than a compilation takes.

    Raises:
        ArgumentError: ``timeout`` is no timedelta.
        PhaseError: no process groups, another guard-complete hook, or Dynamo suppresses errors.
        UpstreamChangedError: this torch is none that this was written for.
        AgreementError: ranks have other versions or settings. In the block or at its end: a rank is
            gone or late, or ranks called different regions, or would compile for different static
            shapes. This process must end.
    """
    if not isinstance(timeout, timedelta):
        reason, remedy = "it is a datetime.timedelta", "timeout=timedelta(seconds=600)"
        raise ArgumentError([Violation("argument", f"timeout={timeout!r}", reason, remedy)])
    if not dist.is_initialized():
        raise PhaseError(
            "compile_together() needs the other ranks: call torch.distributed.init_process_group() "
            "before"
        )
    _require_usable_dynamo()
    with ExitStack() as undo:
        agreement = Agreement(timeout, remedy=_REMEDY)
        undo.callback(agreement.close)
        settings = {"call": "compile_together", "timeout": timeout}
        agreement.require_same(settings | shared_by_ranks())
        together = _Votes(agreement)
        undo.callback(_SET_HOOK.find(), None)
        _SET_HOOK.find()(together.guards_checked)
        undo.callback(replace_function(*_BEGIN.place(), together.compilation_begins))
        undo.callback(replace_function(*_EXCHANGE.place(), together.sizes_met))
        try:
            yield
        except _WRAPPED.find() as error:
            if together.wrapped is None:
                raise
            raise together.wrapped from error
        if together.unraised is not None:
            raise together.unraised


def _require_usable_dynamo() -> None:
    install = _SET_HOOK.find()
    if (other := install(None)) is not None:
        install(other)
        raise PhaseError(
            "another guard-complete hook is installed, and torch has one only: leave the other "
            "compile_together() first, or type torch.compiler.set_enable_guard_collectives(False)"
        )
    _EXCHANGE.require_known_body()
    for symbol in RELIES_ON:
        symbol.find()
    if _SUPPRESS.find():
        raise PhaseError(
            "torch._dynamo.config.suppress_errors is on, so Dynamo would swallow the errors of "
            "compile_together(), and ranks would go on with different code. Type "
            "torch._dynamo.config.suppress_errors = False before, and unset "
            "TORCHDYNAMO_SUPPRESS_ERRORS: any value of it, 0 too, turns the setting on"
        )


def _require_one_shape(region: str, met: list[dict[str, Any]]) -> None:
    """Raise AgreementError if an input's sizes differ between ranks."""
    for name in met[0]:
        entries = [entries.get(name) for entries in met]
        sizes = [e and (e.size if isinstance(e.size, tuple) else e.scalar) for e in entries]
        if found := decision.differing(sizes, range(len(met))):
            raise decision.AgreementError(
                f"ranks would compile {region} for different static shapes: {name} is {found}. Pad "
                "it to the largest size of all ranks before the call, or let sizes be dynamic: "
                "torch.compile(..., dynamic=None)"
            )
