"""Run the contract tests and the tape's alignment with other versions; no GPU is needed.

    python -m tools.try_versions build/versions torch==2.15.0 megatron-core==0.19.0

makes the environment in that folder, unless it is there, and runs the checks with it. What is not
named has the version of ``requirements/``; ``docs/support.md`` has the table of what was tried.

    python -m tools.try_versions build/main --megatron ../Megatron-LM

runs them, the tests of rules and of the fast path, the alignments of all presets and what trains
under Megatron-FSDP v2, with the Megatron-LM in that folder and the rest of this environment. The
compiled dataset helpers are those of the installed megatron-core.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
CONTRACT = (
    *("backends", "tape", "tools/doctor/test_symbols.py"),
    *("fsdp/test_megatron_fsdp.py", "capture/test_hook_order.py"),
    "units/test_sharded.py",
)
ALIGN = "-m megatron_cg.tools.cli.main align --backend tape --steps 6 --preset "
PRESETS = ("llama-tiny", "qwen3-moe-tiny", "mixtral-tiny", "deepseek-v3-tiny")
PYTEST = "-m pytest -q -p no:cacheprovider -W ignore -n 2 --dist loadfile "
CHECKS = {
    "contract tests": f"{PYTEST}--ignore tests/unit/tape/test_own_loop.py "
    + " ".join(f"tests/unit/{name}" for name in CONTRACT),
    "alignment": f"{ALIGN}qwen3-moe-tiny",
}
MORE_CHECKS = {
    "fast path": f"{PYTEST}tests/unit/fastpath/test_fast_path.py tests/unit/fastpath/test_parts.py "
    "tests/unit/fastpath/test_under_v2.py tests/unit/ordering",
    "rules": f"{PYTEST}tests/unit/arguments tests/unit/runs/test_other_layers.py",
    **{f"alignment of {preset}": ALIGN + preset for preset in PRESETS},
    "alignment under v2": f"{ALIGN}{PRESETS[1]} --megatron-fsdp-version 2",
    "loops": f"{PYTEST}tests/unit/tape/test_own_loop.py tests/unit/runs/test_life.py",
}
"""With sources of Megatron-LM, in place of the one alignment."""
STANDALONE = {
    "standalone": f"{PYTEST}tests/unit/units/test_sharded.py tests/unit/fastpath/test_under_v2.py"
}
"""With the megatron_fsdp package in these sources too."""


def pinned(file: str, changed: Sequence[str], *, only: str = "") -> Iterable[str]:
    """The requirements of a file, with the changed ones in place of those of the same package."""
    names = {one.partition("==")[0]: one for one in changed}
    for line in (ROOT / "requirements" / file).read_text(encoding="utf-8").splitlines():
        if line.startswith(only) and not line.startswith("#"):
            name = line.partition("==")[0]
            yield names.get(name, line)


def make(folder: Path, changed: Sequence[str]) -> None:
    """An environment with these versions; of Transformer Engine the sources alone."""
    python = str(folder / "bin" / "python")
    subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
    source = str(folder / "te-source")
    for words in (
        [*pinned("runtime.txt", changed), *pinned("dev.txt", changed, only="pytest")],
        ["--no-deps", *pinned("upstream.txt", changed)],
        ["--no-deps", "--target", source, *pinned("contract.txt", changed)],
    ):
        subprocess.run(["sh", str(ROOT / "tools" / "install.sh"), python, *words], check=True)


def with_helpers(megatron: Path, folder: Path) -> Path:
    """A copy of a Megatron-LM's packages, with the compiled helpers of the installed release."""
    copy = folder / "sources"
    shutil.rmtree(copy, ignore_errors=True)
    shutil.copytree(megatron / "megatron", copy / "megatron")
    helpers = Path("megatron", "core", "datasets")
    for built in Path(sysconfig.get_path("purelib"), helpers).glob("helpers_cpp*.so"):
        shutil.copy(built, copy / helpers)
    return copy


def check(python: Path, checks: Mapping[str, str], *sources: Path) -> bool:
    """Run the checks with that interpreter, in turn, and print how each ended.

    ``sources`` come before what is installed for it.
    """
    path = os.pathsep.join(map(str, (ROOT, *sources)))
    environment = {**os.environ, "PYTHONPATH": path, "CUDA_VISIBLE_DEVICES": ""}
    codes = {}
    for name, words in checks.items():
        done = subprocess.run([str(python), *words.split()], cwd=ROOT, env=environment, check=False)
        codes[name] = done.returncode
    for name, code in codes.items():
        print(f"{name}: {'passed' if code == 0 else f'failed with exit code {code}'}")
    return not any(codes.values())


def main() -> int:
    """Make the environment where it is not, and check; 1 if a check failed."""
    parser = argparse.ArgumentParser(prog="python -m tools.try_versions", description=__doc__)
    parser.add_argument("folder", type=Path, help="of the environment")
    parser.add_argument("changed", nargs="*", help="PACKAGE==VERSION instead of the pinned one")
    parser.add_argument("--megatron", type=Path, help="a Megatron-LM, instead of an environment")
    args = parser.parse_args()
    folder = args.folder.absolute()
    if args.megatron is not None:
        if args.changed or not (args.megatron / "megatron" / "core").is_dir():
            parser.error(f"{args.megatron} is no Megatron-LM, or versions are named beside it")
        checks = {**CHECKS, **MORE_CHECKS}
        del checks["alignment"]
        sources = with_helpers(args.megatron.absolute(), folder)
        own = sources / "megatron" / "core" / "distributed" / "fsdp" / "src"
        python = Path(sys.executable)
        passed = [check(python, checks, sources), check(python, STANDALONE, own, sources)]
        return int(not all(passed))
    if not (folder / ".made").exists():
        make(folder, args.changed)
        (folder / ".made").touch()
    return int(not check(folder / "bin" / "python", CHECKS))


if __name__ == "__main__":
    sys.exit(main())
