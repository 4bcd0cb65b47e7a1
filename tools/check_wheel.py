"""Build the source archive and the wheel, check them, and use the wheel outside of the checkout.

    python -m tools.check_wheel build/dist

The wheel is built from the source archive, as ``python -m build`` does, with what is installed
here. Then: metadata and README (twine), the wheel's form (check-wheel-contents), that it holds
every file of the package and no other, and that, installed into a folder and used from an empty
one, it starts, knows its version, finds its presets and its example script, and trains a model
eagerly and with graphs on the tape, in processes of its own, to the same bits.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator, Sequence
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGE = "megatron_cg"

_SHORT = ("--preset", "llama-tiny", "--steps", "4", "--warmup-steps", "2")
_USE = """
from importlib import resources
from pathlib import Path
import megatron_cg
from megatron_cg.tools.align.presets import load_preset, preset_names
from megatron_cg.tools.align.run import example_script
from megatron_cg.arguments.rules import violations

place = Path(megatron_cg.__file__).resolve()
assert place.is_relative_to(Path({site!r}).resolve()), f"imported from {{place}}"
assert not (place.parent / "arguments").is_symlink()
assert [load_preset(name) for name in preset_names()], "no presets"
assert example_script().is_file()
assert (resources.files("megatron_cg") / "py.typed").is_file()
assert violations.__module__.startswith("megatron_cg.arguments")
print(len(preset_names()), "presets;", megatron_cg.__version__)
"""


class WheelError(Exception):
    """The wheel is not what it should be."""


def expected_files(package: Path) -> set[str]:
    """Every file of the package that a wheel is to hold, by its name there; links are followed."""
    found = set()
    for folder, below, files in package.walk(follow_symlinks=True):
        below[:] = [name for name in below if name != "__pycache__"]
        found |= {
            (folder / name).relative_to(package.parent).as_posix()
            for name in files
            if not name.startswith(".") and not name.endswith(".pyc")
        }
    return found


def differences(wheel: Path, expected: set[str]) -> Iterator[str]:
    """What the wheel lacks of ``expected``, and what it has besides its own metadata."""
    with zipfile.ZipFile(wheel) as archive:
        held = {name for name in archive.namelist() if not name.endswith("/")}
    held = {name for name in held if ".dist-info/" not in name}
    yield from (f"missing: {name}" for name in sorted(expected - held))
    yield from (f"not of the package: {name}" for name in sorted(held - expected))


def build(folder: Path) -> tuple[Path, Path]:
    """Build into an empty ``folder``; the source archive and the wheel."""
    _run([sys.executable, "-m", "build", "--no-isolation", "--outdir", str(folder), str(ROOT)])
    (archive,), (wheel,) = folder.glob("*.tar.gz"), folder.glob("*.whl")
    return archive, wheel


def check_form(archive: Path, wheel: Path) -> None:
    """Metadata, README and the form of the wheel."""
    _run([sys.executable, "-m", "twine", "check", "--strict", str(archive), str(wheel)])
    _run([sys.executable, "-m", "check_wheel_contents", str(wheel)])


def check_use(wheel: Path, folder: Path) -> str:
    """Install into ``folder`` and use it from an empty one; what the use printed."""
    site, elsewhere = folder / "site", folder / "elsewhere"
    elsewhere.mkdir()
    install = ["install", "--quiet", "--no-deps", "--target", str(site), str(wheel)]
    _run([sys.executable, "-m", "pip", *install])
    # First on the path, so before the checkout that is installed here in editable form.
    env = {**os.environ, "PYTHONPATH": str(site)}
    command = str(site / "bin" / "megatron-cg")
    version = _run([command, "--version"], cwd=elsewhere, env=env).strip()
    if f"-{version}-" not in wheel.name:
        raise WheelError(f"{wheel.name} says that its version is {version}")
    if "align" not in _run([command, "--help"], cwd=elsewhere, env=env):
        raise WheelError("megatron-cg --help does not name its commands")
    _run([sys.executable, "-m", PACKAGE, "--help"], cwd=elsewhere, env=env)
    use = _USE.format(site=str(site))
    used = _run([sys.executable, "-c", use], cwd=elsewhere, env=env).strip()
    _run([command, "align", "--backend", "tape", *_SHORT], cwd=elsewhere, env=env)
    return used


def _run(command: Sequence[str], cwd: Path = ROOT, env: dict[str, str] | None = None) -> str:
    """What the command printed. Raises WheelError, with all of it, when it fails."""
    done = subprocess.run(command, cwd=cwd, env=env, check=False, capture_output=True, text=True)
    if done.returncode != 0:
        raise WheelError(f"{' '.join(command)}\n{done.stdout}{done.stderr}")
    return done.stdout


def main() -> int:
    """Build into the folder that is given, check, and say what was found; 1 for a bad wheel."""
    folder = Path(sys.argv[1]).resolve()
    folder.mkdir(parents=True, exist_ok=True)
    for old in folder.glob(f"{PACKAGE}-*"):
        old.unlink()
    try:
        archive, wheel = build(folder)
        check_form(archive, wheel)
        if found := list(differences(wheel, expected_files(ROOT / PACKAGE))):
            raise WheelError("\n".join(found))
        with tempfile.TemporaryDirectory() as temporary:
            used = check_use(wheel, Path(temporary))
    except WheelError as error:
        print(error)
        return 1
    print(f"{wheel.name}: whole, and usable outside of the checkout ({used})")
    return 0


if __name__ == "__main__":
    sys.exit(main())
