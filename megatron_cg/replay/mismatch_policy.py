"""Handles a replay that a guard forbids: counts it, reports it once, does what the user asked for.

Note [One unit at a time]
    Without an interval one unit at a time is due, and its next replay is verified. Turns go by the
    count of steps alone, so all ranks verify the same units. A verification takes as long as three
    to four replays of its unit. So if there are few units, the distance of turns doubles with each
    round, until there is one round in :data:`_ROUND` steps.

Note [Refuted on all ranks]
    Ranks vote on each verification of a graph with collectives. Another graph may be refuted on one
    rank alone. That rank leaves a note, and the others read it when the next verification is due.
"""

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import timedelta
from typing import Literal

from megatron_cg import errors
from megatron_cg.consensus.process_exit import arm_fast_exit
from megatron_cg.replay.guard import Mismatch, Objects
from megatron_cg.replay.settings import settings_of
from megatron_cg.replay.unit import Unit
from megatron_cg.replay.verify import different


@dataclass
class Counters(Mapping[str, int]):
    """Counts of one session; ``docs/how-it-works.md`` says what each counts.

    A mapping from names to numbers, with the ``copy`` that ``wandb.log`` calls (wandb 0.31).
    """

    captured: int = 0
    replayed: int = 0
    eager: int = 0
    mismatched: int = 0
    verified: int = 0
    outputs_only: int = 0
    gradients_unstable: int = 0
    backwards: int = 0
    repeated: int = 0
    steps_verified: int = 0
    steps_differed: int = 0

    def __add__(self, other: "Counters") -> "Counters":
        return Counters(*map(sum, zip(self.values(), other.values(), strict=True)))

    def as_dict(self) -> dict[str, int]:
        return asdict(self)

    copy = as_dict

    def __getitem__(self, name: str) -> int:
        return self.as_dict()[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.as_dict())

    def __len__(self) -> int:
        return len(self.as_dict())


logger = logging.getLogger(__name__)
_TURN, _ROUND = 10, 300
_AS_ASKED = "({flag:--cg-on-mismatch error})"
_NOT_BY_CAPTURE = ("order", "recompute", "recorded", "verification")
"""Mismatches that another capture would meet too."""


@dataclass(frozen=True)
class ReplayPolicy:
    """What ``--cg-on-mismatch``, ``--cg-verify-interval`` and ``--cg-verify-steps`` say."""

    on_mismatch: Literal["eager", "error"] = "eager"
    verify_interval: int | None = 0
    """Steps between two verifications of all graphs; 0 means never, None one unit in turn."""
    verify_steps: int = 0
    """Steps from one that is trained twice and compared to the next; 0 means never."""
    voice: errors.Voice = field(default_factory=errors.current_voice)
    """In which errors name settings, also those of a replay outside of a step."""
    again: str = ""
    """What a report adds if another capture could help."""


@dataclass
class Conditions:
    """What a session's replays and eager passes have to do in this step, besides the guards."""

    all_eager: bool = False
    """Whether every unit runs eagerly on all ranks: they repeat a step, or one has differed."""
    within_row_bound: Callable[[], bool] = lambda: True
    """Whether the numbers of graphs with collectives hold in this step so far. A call of all ranks;
    see ``integrations/megatron/steps.py``."""
    before_pass: Callable[[], None] = lambda: None
    """Called as a forward pass of all units begins, and not inside of one."""
    flush_prefetch: Callable[[], None] = lambda: None
    """Issues the all-gathers deferred until a launch; must be called before eager passes."""


class Verifications:
    """The verifications of one session's graphs, by the index of their units.

    ``interval`` is as ``verify_interval`` above; ``noted`` is that of the ranks' ``Agreement``.
    """

    def __init__(
        self, interval: int | None, units: int, counters: Counters, noted: Callable[..., bool]
    ) -> None:
        self.due: set[int] = set()
        """The units whose next replay is verified."""
        self.refuted: dict[int, Mismatch] = {}
        """These graphs are wrong for good."""
        self._interval, self._units = interval, units
        self._counters, self._noted = counters, noted
        self.step = self._turn = 0
        """The training step since the capture, from 1."""
        self._gap = self._next = _TURN
        self._last: dict[int, int] = {}
        """The step in which all of a graph was last compared."""
        self._new: set[int] = set()
        """Units that were verified since notes were read."""

    def begin_step(self) -> None:
        self.step += 1
        if self._interval is not None:
            is_due = self._interval > 0 and self.step % self._interval == 0
            self.due = set(range(self._units)) if is_due else set()
        elif is_due := self.step == self._next:
            self.due.add(self._turn % self._units)
            self._turn += 1
            if self._turn % self._units == 0:
                self._gap = min(2 * self._gap, max(_TURN, _ROUND // self._units))
            self._next += self._gap
        if is_due:
            told = {n for n in self._new - self.refuted.keys() if self._noted(str(n), here=False)}
            self.refuted |= dict.fromkeys(told, different("a result on another rank"))
            self._new.clear()

    def ended(self, index: int, found: Mismatch | None, *, gradients: bool) -> Mismatch | None:
        """Note what a verification has ``found``. Gradients were compared only if ``gradients``.

        Returns the same, with the steps whose numbers may be wrong.
        """
        self._counters.verified += gradients and index in self.due
        self._counters.outputs_only += not gradients
        if self._interval is None:
            self.due.discard(index)
        self._new.add(index)
        last = self._last.setdefault(index, self.step)
        if found is None:
            self._last[index] = self.step if gradients else last
            return None
        if self._interval != 1 and last < self.step:
            doubt = (
                f"It was last compared in step {last} with graphs, {self.step - last} steps ago: "
                "the numbers of the steps since then may be wrong."
            )
            found = replace(found, cause=f"{found.cause} {doubt}")
        self.refuted[index] = found
        self._noted(str(index), here=True)
        return found


class MismatchPolicy:
    """The mismatch policy of all graphs of one session.

    ``on_any_rank`` and ``noted`` are those of the ranks' ``Agreement``; without them this rank
    decides alone. ``units`` have the graphs.
    """

    def __init__(
        self,
        policy: ReplayPolicy,
        counters: Counters,
        on_any_rank: Callable[..., bool] = lambda _name, here, timeout=None: here,
        *,
        units: Sequence[Unit] = (),
        noted: Callable[..., bool] = lambda _name, here: here,
    ) -> None:
        self.counters = counters
        self.verifications = Verifications(policy.verify_interval, len(units), counters, noted)
        self.conditions = Conditions()
        self._policy = policy
        self.on_any_rank = on_any_rank
        """Whether something is true on any rank; all ranks ask at the same replay of a unit."""
        self.suffix = ""
        """Says in reports whose unit it is, if several models have graphs."""
        self._reported: set[tuple[str, tuple[str, str]]] = set()
        self._likewise: dict[tuple[str, str], list[str]] = {}
        """Other units with a mismatch that was reported, to be named together."""
        self._units = units
        self._settings: Objects | None = None
        """Switches of torch and settings of modules, as they were when the first step began."""
        self._other_setting: Mismatch | None = None
        self._asked = len(units)
        """The index of the unit that asked for them last."""

    def begin_step(self) -> None:
        for (clause, subject), units in self._likewise.items():
            text = "megatron_cg: no replay of %s for %s (%s) either."
            logger.warning(text, errors.ranged(units), subject, clause)
        self._likewise.clear()
        self.verifications.begin_step()
        self._settings = self._settings or settings_of(self._units)
        self._asked = len(self._units)

    def other_setting(self, index: int) -> Mismatch | None:
        """What says that a switch of torch or a setting of a module is another in this pass.

        The unit ``index`` asks. One that comes before, or is, the last that asked begins a pass.
        """
        if index <= self._asked:
            self.conditions.before_pass()
            self._settings = self._settings or settings_of(self._units)
            self._other_setting = self._settings.broken()
        self._asked = index
        return self._other_setting

    @property
    def verifies_step(self) -> bool:
        """Whether this whole step is trained eagerly too, and compared."""
        interval = self._policy.verify_steps
        is_due = interval > 0 and self.verifications.step % interval == 0
        return is_due and not self.conditions.all_eager

    def step_differed(self, text: str) -> None:
        """Never replay again: all ranks have agreed that a verified step differs.

        Raises ReplayMismatchError: ``--cg-on-mismatch error``.
        """
        self.counters.steps_differed += 1
        if self._policy.on_mismatch == "error":
            raise self._error(text, _AS_ASKED)
        logger.warning("megatron_cg: %s This step has eager numbers; so will all others.", text)
        self.conditions.all_eager = True

    def mismatched(self, mismatch: Mismatch, layer: str, *, collectives: bool) -> None:
        """Return if the unit ``layer`` must run eagerly instead of the replay.

        Raises ReplayMismatchError: ``--cg-on-mismatch error``, or the graph contains collectives
        and the ranks cannot fall back together.
        """
        text = self._report(mismatch, layer)
        if self._policy.on_mismatch == "error":
            arm_fast_exit()
            raise self._error(text, _AS_ASKED)
        if collectives:
            self.fall_back_together(f"{layer}/eager", text)

    def mismatched_in_backward(self, mismatch: Mismatch, layer: str) -> None:
        """Raise ReplayMismatchError: the backward of a replay cannot run eagerly."""
        text = self._report(mismatch, layer)
        arm_fast_exit()
        raise self._error(f"{text} The pass was replayed, so it cannot run eagerly any more.")

    def fall_back_together(self, name: str, text: str, timeout: timedelta | None = None) -> None:
        """Return if all ranks agree, by ``name``, on what to do with a graph with collectives.

        Otherwise raise ReplayMismatchError with a message that begins with ``text``. ``timeout`` is
        as in ``Agreement.on_any_rank``.
        """
        try:
            self.on_any_rank(name, True, timeout)
        except RuntimeError as error:
            raise self._error(
                f"{text} The graph holds collectives, which no rank may run eagerly while others "
                f"replay them, and not all ranks found the same ({error}).",
                f"Or {errors.LEAVE_LAYER_OUT}. {errors.WITHOUT_GRAPHS}",
            ) from error

    def _error(self, text: str, remedy: str = "") -> errors.ReplayMismatchError:
        return errors.ReplayMismatchError(f"{text} {self._policy.voice.say(remedy)}".rstrip())

    def _report(self, mismatch: Mismatch, layer: str) -> str:
        self.counters.mismatched += 1
        text = mismatch.text(f"{layer}{self.suffix}")
        if (layer, mismatch.key) in self._reported:
            return text
        if any(key == mismatch.key for _, key in self._reported):
            self._likewise.setdefault(mismatch.key, []).append(layer)
        else:
            again = "" if mismatch.clause in _NOT_BY_CAPTURE else self._policy.again
            logger.warning("megatron_cg: no replay of %s Reported once.%s", text, again)
        self._reported.add((layer, mismatch.key))
        return text
