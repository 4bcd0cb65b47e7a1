"""Lists all checks in the order of the report, and runs them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from megatron_cg.arguments.schema import NATIVE, TAPE, TRANSFORMER_ENGINE
from megatron_cg.tools.doctor import ask, environment, libraries, versions
from megatron_cg.tools.doctor import gpu_checks as machine
from megatron_cg.tools.doctor import module_places as modules
from megatron_cg.tools.doctor import symbol_checks as symbols
from megatron_cg.tools.doctor.finding import Finding, Level, NotReachedError, note
from megatron_cg.tools.doctor.system import System


@dataclass(frozen=True)
class Check:
    """One question about a system; the answers are findings."""

    name: str
    look: Callable[[System], Iterable[Finding]]
    decides: bool = True
    """Whether it can find that a run is impossible; then its own failure must be reported."""
    backends: tuple[str, ...] = (TRANSFORMER_ENGINE, NATIVE, TAPE)
    stage: str | None = None
    """The stage of the other process; this check reports the stage's failure."""


_TE = (TRANSFORMER_ENGINE,)
_GPU = (TRANSFORMER_ENGINE, NATIVE)
CHECKS: tuple[Check, ...] = (
    Check("python", versions.python),
    Check("packages", versions.packages),
    Check("te-parts", versions.te_parts, backends=_TE),
    Check("torch", symbols.torch_imports, stage=ask.TORCH),
    Check("cuda", versions.cuda, backends=_GPU),
    Check("driver", machine.driver, backends=_GPU, stage=ask.DRIVER),
    Check("gpus", machine.gpus, backends=_GPU),
    Check("gpu-memory", machine.memory, decides=False, backends=_GPU),
    Check("shared-memory", machine.shared_memory, decides=False, backends=_GPU),
    Check("te-import", symbols.te_imports, backends=_TE, stage=ask.TE),
    Check("libraries", libraries.libraries, decides=False, backends=_GPU),
    Check("megatron", modules.megatron_copies),
    Check("dataset-helpers", modules.dataset_helpers, backends=_GPU),
    Check("shadowing", modules.shadowing, decides=False),
    Check("symbols", symbols.relied_on, stage=ask.SYMBOLS),
    Check("flags", symbols.megatron_flags, stage=ask.FLAGS),
    Check("changes", symbols.changes, decides=False, stage=ask.CHANGES),
    Check("gloo", machine.gloo, backends=(TAPE,)),
    Check("environment", environment.variables, backends=_GPU),
    Check("system", symbols.collected, decides=False, stage=ask.COLLECTED),
)


def examine(system: System, checks: Sequence[Check] = CHECKS) -> list[Finding]:
    """The findings of all checks for the system's backend. Raises nothing that a check raises."""
    found: list[Finding] = []
    for check in checks:
        if system.backend in check.backends:
            found += _look(check, system)
    return found


def told(system: System, stage: str) -> Any:
    """What the other process found at a stage; None where a check reports why there is nothing."""
    try:
        return system.ask(stage)
    except (NotReachedError, ask.StageError):
        return None


def can_run(findings: Iterable[Finding]) -> bool:
    """Whether no finding prevents the run."""
    return all(finding.level is not Level.ERROR for finding in findings)


def _look(check: Check, system: System) -> list[Finding]:
    """The check's findings; if it raises, the exception becomes a finding after them."""
    found: list[Finding] = []
    try:
        found.extend(check.look(system))
    except NotReachedError as reason:
        found.append(note(str(reason), "what it depends on is reported on its own"))
    except ask.StageError as failure:
        found.append(_stage_failed(check, failure))
    except Exception as failure:
        found.append(_failed(check, failure))
    return [dataclasses.replace(finding, check=check.name) for finding in found]


def _stage_failed(check: Check, failure: ask.StageError) -> Finding:
    if failure.stage != check.stage:
        return note(
            f"not looked at: looking at {failure.stage} failed",
            "what it depends on is reported on its own",
        )
    return Finding(
        Level.ERROR if check.decides else Level.WARNING,
        f"looking at {failure.stage} failed: {failure}",
        "a run would fail in the same place",
        f"python -m megatron_cg.tools.doctor.probe /dev/stdout transformer_engine {failure.stage}",
    )


def _failed(check: Check, failure: Exception) -> Finding:
    return Finding(
        Level.ERROR if check.decides else Level.WARNING,
        f"this check itself failed: {type(failure).__name__}: {failure}",
        "what it looks at is not known, so nothing says that the run can be"
        if check.decides
        else "what it looks at is not known",
        "megatron-cg doctor --json, and report what it prints",
    )
