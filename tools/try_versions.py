"""Run the tape's alignment and the contract tests on other versions, and keep what came of it.

``python -m tools.try_versions`` makes an environment for each torch of ``COMBINATIONS``, installs
the other packages of a row in it, runs :data:`CHECKS` and writes the row to
``requirements/tried.json``, from which ``docs/support.md`` has its table. No GPU is needed.
``--make FOLDER`` makes an environment and ``--python PATH`` runs the checks with one, as
``make newest`` does.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
TRIED = ROOT / "requirements" / "tried.json"
PACKAGES = ("torch", "megatron-core", "megatron-fsdp", "transformer-engine")
MAIN = "main"
_SOURCES = {
    "megatron-core": "megatron-core @ git+https://github.com/NVIDIA/Megatron-LM.git@main",
    "transformer-engine": (
        "transformer-engine @ git+https://github.com/NVIDIA/TransformerEngine.git@main"
    ),
}
CONTRACT = "contract tests"
CHECKS: dict[str, tuple[str, ...]] = {
    CONTRACT: (
        *(
            "-m",
            "pytest",
            "-q",
            "-p",
            "no:cacheprovider",
            "-W",
            "ignore",
        ),
        *("-n", "2", "--dist", "loadfile"),
        *("tests/unit/backends", "tests/unit/tools/cpu", "tests/unit/tools/doctor/test_symbols.py"),
        *("tests/unit/fsdp/test_hooks_of_real_models.py", "tests/unit/capture/test_hook_order.py"),
    ),
    "dense alignment": (
        *(
            "-m",
            "megatron_cg.tools.cli.main",
            "align",
            "--backend",
            "tape",
            "--preset",
            "llama-tiny",
        ),
        *("--steps", "6"),
    ),
    "MoE alignment": (
        *("-m", "megatron_cg.tools.cli.main", "align", "--backend", "tape"),
        *("--preset", "qwen3-moe-tiny", "--steps", "6"),
    ),
}
"""What is run, as Python's arguments; an exit code other than 0 is a failure."""
_SECONDS = 1800


@dataclass(frozen=True)
class Combination:
    """The versions of one row; of Transformer Engine the sources alone, which the tests read."""

    torch: str = "2.11.0"
    megatron_core: str = "0.19.2"
    megatron_fsdp: str = "0.6.1"
    transformer_engine: str = "2.20.2"

    @property
    def versions(self) -> dict[str, str]:
        """By the packages' names."""
        return dict(zip(PACKAGES, asdict(self).values(), strict=True))


COMBINATIONS = (
    Combination(),
    Combination(megatron_core="0.19.0"),
    Combination(megatron_fsdp="0.6.0"),
    Combination(transformer_engine="2.19.0"),
    Combination(megatron_core=MAIN),
    Combination(transformer_engine=MAIN),
    *(Combination(torch=torch) for torch in ("2.12.1", "2.13.0", "2.14.1", "2.15.0")),
)


class InstallError(Exception):
    """A row's packages could not be installed; the text is the reason."""


def wanted(package: str, version: str) -> str:
    """What pip is asked for: a release, or the main branch of the package's repository."""
    return _SOURCES[package] if version == MAIN else f"{package}=={version}"


def install(combination: Combination, place: Path) -> Path:
    """The interpreter of an environment with these versions in ``place``, made where it is not.

    Torch stays as it is in one that is there. Raises InstallError with the line in which the
    installer said why it failed.
    """
    python = place / "bin" / "python"
    versions = combination.versions
    if not python.exists():
        _run([sys.executable, "-m", "venv", str(place)])
        runtime = (ROOT / "requirements" / "runtime.txt").read_text(encoding="utf-8")
        tests = (ROOT / "requirements" / "dev.txt").read_text(encoding="utf-8")
        words = [line for line in runtime.splitlines() if not line.startswith("torch")]
        words += [line for line in tests.splitlines() if line.startswith("pytest")]
        try:
            _install(python, [wanted("torch", combination.torch), *words])
        except InstallError:
            shutil.rmtree(place)
            raise
    upstream = [wanted(name, versions[name]) for name in ("megatron-core", "megatron-fsdp")]
    _install(python, ["--no-deps", *upstream])
    source = place / "te-source"
    shutil.rmtree(source, ignore_errors=True)
    te = wanted("transformer-engine", versions["transformer-engine"])
    _install(python, ["--no-deps", "--target", str(source), te])
    return python


def _install(python: Path, words: Sequence[str]) -> None:
    _run(["sh", str(ROOT / "tools" / "install.sh"), str(python), *words])


def _run(words: Sequence[str]) -> None:
    done = subprocess.run(words, check=False, capture_output=True, text=True, timeout=_SECONDS)
    if done.returncode:
        raise InstallError(reason(done.stderr))


def reason(said: str) -> str:
    """The line of an installer's words that tells why: git's own, the first ``ERROR``, or any."""
    lines = [line.strip() for line in said.splitlines() if line.strip()]
    git = [line for line in lines if line.startswith("fatal:")]
    named = [line for line in lines if re.match(r"(ERROR|error):", line)]
    return (git or named or lines or ["no reason was given"])[0]


def check(python: Path) -> dict[str, str]:
    """What came of each of :data:`CHECKS` with that interpreter; ``ok`` begins a success."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""}

    def run(words: Sequence[str]) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [str(python), *words],
            cwd=ROOT,
            env=environment,
            check=False,
            capture_output=True,
            text=True,
            timeout=_SECONDS,
        )

    found = {}
    # The alignments beside the tests, one after the other: each has two processes.
    with ThreadPoolExecutor(2) as side_by_side:
        for name, done in zip(CHECKS, side_by_side.map(run, CHECKS.values()), strict=True):
            last = (done.stdout.strip() or done.stderr.strip() or "nothing was said").splitlines()
            found[name] = ended(done.returncode, last[-1])
            if done.returncode:
                print(done.stdout, done.stderr, sep="\n", file=sys.stderr)
            print(f"{name}: {found[name]}", flush=True)
    return found


def ended(code: int, last: str) -> str:
    """A check's end in words: without times, counts, and what is true of every run."""
    said = re.sub(r" in [\d.]+s( \([\d:]+\))?| \(CPU tape.*\)$", "", last.strip())
    said = re.sub(r"^\d+ passed(, \d+ skipped)?$", "passed", said)
    return f"ok: {said}" if code == 0 else f"failed with exit code {code}: {said}"


def row(combination: Combination, place: Path) -> dict[str, str]:
    """One row of the table: versions, and how installing or each check ended."""
    try:
        python = install(combination, place)
    except (InstallError, subprocess.TimeoutExpired) as error:
        return {**combination.versions, "installs": f"does not install: {error}"}
    return {**combination.versions, "installs": "ok", **check(python)}


def succeeded(found: dict[str, str]) -> bool:
    """Whether a row's packages installed and all of its checks are there and well."""
    return all(found.get(name, "").startswith("ok") for name in ("installs", *CHECKS))


def keep(found: dict[str, str], file: Path = TRIED) -> None:
    """Put a row into the file, instead of an earlier one of the same versions."""
    rows = json.loads(file.read_text(encoding="utf-8")) if file.exists() else []
    key = [found[name] for name in PACKAGES]
    rows = [old for old in rows if [old[name] for name in PACKAGES] != key] + [found]
    order = {tuple(c.versions.values()): n for n, c in enumerate(COMBINATIONS)}
    rows.sort(key=lambda one: order.get(tuple(one[name] for name in PACKAGES), len(order)))
    file.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")


def main(words: Sequence[str] | None = None) -> int:
    """Run what is asked for; the exit code is 1 where a check failed."""
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--python", type=Path, help="run the checks with this interpreter alone")
    parser.add_argument("--make", type=Path, help="only make an environment with --torch in here")
    parser.add_argument("--torch", nargs="*", help="rows with these versions of torch alone")
    asked = parser.parse_args(words)
    if asked.make is not None:
        (torch,) = asked.torch
        install(Combination(torch=torch), asked.make)
        return 0
    if asked.python is not None:
        return int(not all(said.startswith("ok") for said in check(asked.python).values()))
    good = True
    for version in dict.fromkeys(combination.torch for combination in COMBINATIONS):
        if asked.torch and version not in asked.torch:
            continue
        # One environment at a time: each has some 5 GB.
        with tempfile.TemporaryDirectory(prefix="megatron-cg-versions-") as folder:
            for combination in (c for c in COMBINATIONS if c.torch == version):
                print(" ".join(f"{n} {v}" for n, v in combination.versions.items()), flush=True)
                found = row(combination, Path(folder, "environment"))
                keep(found)
                good &= succeeded(found) or found["installs"] != "ok"
    return int(not good)


if __name__ == "__main__":
    sys.exit(main())
