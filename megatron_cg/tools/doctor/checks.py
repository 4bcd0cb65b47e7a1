"""Lists all checks in the order of the report, and runs them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from megatron_cg.arguments.schema import NATIVE, TAPE, TRANSFORMER_ENGINE
from megatron_cg.tools.doctor import ask, environment, gpu_checks, libraries, versions
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
    Check("driver", gpu_checks.driver, backends=_GPU, stage=ask.DRIVER),
    Check("gpus", gpu_checks.gpus, backends=_GPU),
    Check("peer-access", gpu_checks.peers, decides=False, backends=_GPU),
    Check("gpu-memory", gpu_checks.memory, decides=False, backends=_GPU),
    Check("shared-memory", gpu_checks.shared_memory, decides=False, backends=_GPU),
    Check("te-import", symbols.te_imports, backends=_TE, stage=ask.TE),
    Check("libraries", libraries.libraries, decides=False, backends=_GPU),
    Check("megatron", modules.megatron_copies),
    Check("dataset-helpers", modules.dataset_helpers, backends=_GPU),
    Check("shadowing", modules.shadowing, decides=False),
    Check("symbols", symbols.relied_on, stage=ask.SYMBOLS),
    Check("flags", symbols.megatron_flags, stage=ask.FLAGS),
    Check("changes", symbols.changes, decides=False, stage=ask.CHANGES),
    Check("gloo", gpu_checks.gloo, backends=(TAPE,)),
    Check("environment", environment.variables, backends=_GPU),
    Check("system", symbols.collected, decides=False, stage=ask.COLLECTED),
)
_ELSEWHERE = "what it depends on is reported on its own"


def examine(system: System, checks: Sequence[Check] = CHECKS) -> list[Finding]:
    """The findings of all checks for the system's backend. Raises nothing that a check raises."""
    found: list[Finding] = []
    for check in checks:
        if system.backend in check.backends:
            found += [replace(finding, check=check.name) for finding in _look(check, system)]
    return found


def can_run(findings: Iterable[Finding]) -> bool:
    """Whether no finding prevents the run."""
    return all(finding.level is not Level.ERROR for finding in findings)


def _look(check: Check, system: System) -> list[Finding]:
    """The check's findings; if it raises, the exception becomes a finding after them."""
    found: list[Finding] = []
    failed = Level.ERROR if check.decides else Level.WARNING
    try:
        found.extend(check.look(system))
    except NotReachedError as reason:
        found.append(note(str(reason), _ELSEWHERE))
    except ask.StageError as failure:
        what = f"looking at {failure.stage} failed"
        if failure.stage != check.stage:
            found.append(note(f"not looked at: {what}", _ELSEWHERE))
        else:
            probe = "python -m megatron_cg.tools.doctor.probe /dev/stdout transformer_engine"
            why = "a run would fail in the same place"
            found.append(Finding(failed, f"{what}: {failure}", why, f"{probe} {failure.stage}"))
    except Exception as failure:
        what = f"this check itself failed: {type(failure).__name__}: {failure}"
        unknown = "what it looks at is not known"
        why = f"{unknown}, so nothing says that the run can be" if check.decides else unknown
        remedy = "megatron-cg doctor --json, and report what it prints"
        found.append(Finding(failed, what, why, remedy))
    return found
