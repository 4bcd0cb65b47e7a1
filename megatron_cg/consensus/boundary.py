"""Decision of all ranks between two training steps: keep the graphs, or give them up.

Note [One step behind]
    Each rank posts its vote at the end of a step and collects all votes at the end of the next
    step, so the exchange overlaps a whole step. If ranks hold different graphs after step n, all
    give up theirs before step n + 2. The vote after it is under way by then; all collect it too,
    and drop it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from datetime import timedelta

from megatron_cg.consensus.decision import Decision, Kind, Vote
from megatron_cg.consensus.exchange import Agreement
from megatron_cg.consensus.process_exit import goes_on
from megatron_cg.errors import MegatronCGError

logger = logging.getLogger(__name__)

CLOSING = timedelta(seconds=30)
"""How long closing waits for the last vote. At a normal end all ranks have posted theirs."""


class Boundary:
    """Votes of one model's ranks on whether all hold the same graphs.

    Every rank calls :meth:`before_step` and :meth:`after_step` around each training step.

    Args:
        agreement: has no posted vote.
        graphs: called after each step for the digest of this rank's graphs; 0 if it has none.
        give_up: continues without graphs; called with the reason on all ranks before the same step.
    """

    def __init__(
        self,
        agreement: Agreement,
        graphs: Callable[[], int],
        give_up: Callable[[Decision], None],
    ) -> None:
        self._agreement = agreement
        self._graphs = graphs
        self._give_up = give_up
        self._steps = 0
        self._lost: int | None = None
        """``Agreement.left`` when this rank voted without graphs; else None."""
        self._known_lost: int | None = None
        """The same, of the last vote that is decided. If other ranks hold graphs, all give up, and
        undo together as well."""
        self._due: Decision | None = None
        self._closed = False

    def after_step(self, step: int | None = None) -> None:
        """Post this rank's vote, and collect the decision on the votes of the previous step.

        Args:
            step: the number of the training step, which detects ranks at different steps; counted
                here if not given.

        Raises:
            AgreementError: a rank is gone, or is at another step or vote. This rank must end.
        """
        if self._closed:
            return
        self._steps += 1
        self._due = self._agreement.collect()
        if self._due is not None:
            self._known_lost = self._lost
        serial = self._steps if step is None else step
        graphs = self._graphs()
        self._lost = self._agreement.left if graphs == 0 else None
        self._agreement.post(Kind.STEP, Vote(graphs=graphs), serial=serial)

    def before_step(self) -> None:
        """Apply the decision, if any. Raises what applying it raises, and AgreementError."""
        goes_on()
        due, self._due = self._due, None
        if self._closed or due is None:
            return
        if self._known_lost == self._agreement.left:
            self._agreement.together()
        if not due.minority:
            return
        self._agreement.collect()
        logger.warning("megatron_cg: all ranks discard their graphs: %s.", due.reason())
        self._give_up(due)
        self._agreement.together()

    def close(self) -> None:
        """Collect the last vote and stop voting; call it before graphs or groups are destroyed.

        Waits :data:`CLOSING` at most. Safe to call twice, and when ranks or groups are gone: the
        outcome of the last vote no longer matters then.
        """
        if self._closed:
            return
        self._closed = True
        goes_on()
        try:
            self._agreement.collect(CLOSING)
        except MegatronCGError as error:
            logger.warning("megatron_cg: the last vote between steps did not finish: %s", error)
