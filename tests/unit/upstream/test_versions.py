"""Versions are those of the copies that are imported, whatever pip has installed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import megatron_cg
from megatron_cg.upstream.symbols import installed_version

MEGATRON = 'MAJOR = 0\nMINOR = 99\nPATCH = 1\nPRE_RELEASE = "rc3"\nVERSION = (MAJOR, MINOR)\n'
TORCH = "__version__ = '2.99.0a0+git123'\n"
ASK = """
import json, sys
from megatron_cg.upstream.symbols import installed_version
names = "megatron-core", "megatron-fsdp", "torch", "transformer-engine"
loaded = [name for name in ("megatron.core", "megatron_fsdp", "torch") if name in sys.modules]
print(json.dumps([[installed_version(name) for name in names], loaded]))
"""


def package(folder: Path, file: str, text: str) -> None:
    folder.mkdir(parents=True)
    (folder / "__init__.py").write_text("raise ImportError('nobody asked for this package')")
    (folder / file).write_text(text)


def test_copies_on_the_path_are_asked_without_an_import(tmp_path: Path) -> None:
    package(tmp_path / "megatron" / "core", "package_info.py", MEGATRON)
    package(tmp_path / "megatron_fsdp", "package_info.py", MEGATRON)
    package(tmp_path / "torch", "version.py", TORCH)
    root = Path(megatron_cg.__file__).parents[1]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), str(root)])}
    done = subprocess.run(
        [sys.executable, "-c", ASK],
        env=env,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=True,
    )
    versions, loaded = json.loads(done.stdout)
    assert versions[:3] == ["0.99.1rc3", "0.99.1rc3", "2.99.0a0+git123"] and loaded == []


def test_without_another_copy_it_is_what_pip_says() -> None:
    from importlib import metadata

    for name in ("megatron-core", "torch", "pytest"):
        public, _, _ = str(installed_version(name)).partition("+")
        assert public == metadata.version(name).partition("+")[0]
    assert installed_version("there-is-no-such-package") is None
