"""Checks the other packages that this one relies on: they import, and every symbol exists."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from megatron_cg.tools.doctor import ask
from megatron_cg.tools.doctor.finding import Finding, error, note, ok, warning
from megatron_cg.tools.doctor.system import System

_INSTALL = "pip install 'megatron-core==0.19.2' 'transformer-engine[pytorch]==2.20.2'"
_SHOWN = 10
"""Symbols that are reported one by one; a broken package breaks all of its symbols."""
_NO_CAPTURE = (
    "this package uses it to change another package; without it a capture would be wrong or "
    "fail, so it is refused"
)


def torch_imports(system: System) -> Iterator[Finding]:
    """Torch can be imported."""
    yield ok(f"torch is imported from {system.ask(ask.TORCH)['file']}")


def te_imports(system: System) -> Iterator[Finding]:
    """TE can be imported, in a process that has imported torch."""
    failure = system.ask(ask.TE)["error"]
    if failure is None:
        yield ok("transformer_engine.pytorch can be imported")
    else:
        yield error(
            f"import transformer_engine.pytorch fails: {failure}",
            "graphs are captured by TE, and Megatron imports it too",
            "python -c 'import torch, transformer_engine.pytorch'",
        )


def relied_on(system: System) -> Iterator[Finding]:
    """Every symbol that a module of ours relies on exists where it is declared and used."""
    rows = system.ask(ask.SYMBOLS)
    broken = [row for row in rows if row["error"] is not None]
    for row in broken[:_SHOWN]:
        yield error(row["error"], f"{row['module']}: {_NO_CAPTURE}", _INSTALL)
    if len(broken) > _SHOWN:
        names = " ".join(row["symbol"] for row in broken[_SHOWN:])
        yield error(f"{len(broken) - _SHOWN} more symbols: {names}", _NO_CAPTURE, _INSTALL)
    for row in rows:
        if row.get("unknown") is not None:
            yield warning(
                row["unknown"],
                f"{row['module']} replaces this function if its code is known; here the "
                "replacement stays off, and the rest works",
                _INSTALL,
            )
    skipped = Counter(row["package"] for row in rows if row["skipped"])
    for package, count in skipped.items():
        yield note(
            f"{count} symbols of {package} were not looked at",
            f"{package} is not installed",
        )
    found = sum(row["error"] is None and not row["skipped"] for row in rows)
    modules = len({row["module"] for row in rows})
    if found:
        yield ok(f"{found} symbols that {modules} modules rely on are as expected")


def megatron_flags(system: System) -> Iterator[Finding]:
    """Megatron's parser has each setting that the rules read."""
    system.ask(ask.FLAGS)
    yield ok("Megatron's parser has every setting that our rules read")


def changes(system: System) -> Iterator[Finding]:
    """What a run with graphs would change in other packages; the report lists it."""
    when = Counter(row["when"] for row in system.ask(ask.CHANGES))
    yield ok(
        f"changes in other packages: {when['enabled']} once megatron_cg is enabled; while graphs "
        f"live, the work of {when['graphs live']} functions is taken over"
    )


def collected(system: System) -> Iterator[Finding]:
    """The machine's software, as ``torch.utils.collect_env`` tells it."""
    found = system.ask(ask.COLLECTED)
    processor = (found["cpu_info"] or "").partition("Model name:")[2].partition("\n")[0].strip()
    yield ok(", ".join(filter(None, (found["os"], found["libc_version"], processor))))
