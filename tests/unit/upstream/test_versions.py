"""Versions are those of the copies that are imported; which attention is fused."""

import ast
import json
import os
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

import megatron_cg
from megatron_cg.capture import observer
from megatron_cg.capture.observer import _FUSED
from megatron_cg.upstream.symbols import installed_version
from megatron_cg.upstream.te import _ATTENTION, fuses_attention
from tests.unit.interpreted import run
from tests.unit.te_sources import source_of_te

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


def asked(folder: Path) -> tuple[list[str | None], list[str]]:
    """What ASK prints where ``folder`` comes first on the path, whatever this process has there."""
    root = Path(megatron_cg.__file__).parents[1]
    done = run("-c", ASK, folder=folder, PYTHONPATH=os.pathsep.join([str(folder), str(root)]))
    assert done.returncode == 0, done.stderr
    versions, loaded = json.loads(done.stdout)
    return versions, loaded


def test_copies_on_the_path_are_asked_without_an_import(tmp_path: Path) -> None:
    package(tmp_path / "megatron" / "core", "package_info.py", MEGATRON)
    package(tmp_path / "megatron_fsdp", "package_info.py", MEGATRON)
    package(tmp_path / "torch", "version.py", TORCH)
    versions, loaded = asked(tmp_path)
    assert versions[:3] == ["0.99.1rc3", "0.99.1rc3", "2.99.0a0+git123"] and loaded == []


def test_without_another_copy_it_is_what_pip_says(tmp_path: Path) -> None:
    from importlib import metadata

    (core, _, torch, _), _ = asked(tmp_path)
    for name, found in (("megatron-core", core), ("torch", torch)):
        assert str(found).partition("+")[0] == metadata.version(name).partition("+")[0]
    assert installed_version("pytest") == metadata.version("pytest")
    assert installed_version("there-is-no-such-package") is None


@pytest.mark.parametrize(("chosen", "fused"), [(None, False), (0, False), (1, True)])
def test_attention_is_fused_if_te_says_so_or_is_not_there(
    chosen: int | None, fused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    module: Any = ModuleType(_ATTENTION.path.partition(":")[0])
    monkeypatch.delitem(sys.modules, module.__name__, raising=False)
    assert fuses_attention()
    module._attention_backends = {"use_fused_attention": chosen}
    monkeypatch.setitem(sys.modules, module.__name__, module)
    assert fuses_attention() is fused


@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_fused_attention_draws_for_dropout(monkeypatch: pytest.MonkeyPatch, dropout: float) -> None:
    source = ast.parse(source_of_te("cpp_extensions", "fused_attn.py").read_text())
    calls = [node for node in ast.walk(source) if isinstance(node, ast.Call)]
    (call,) = (node for node in calls if ast.unparse(node.func) == "tex.fused_attn_fwd")
    given = [dropout if ast.unparse(one) == "dropout" else 1.0 for one in call.args]
    module: Any = ModuleType(_FUSED.path.partition(":")[0])
    module.tex = SimpleNamespace(fused_attn_fwd=lambda *_given: torch.rand(1))
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr(observer, "device_generator", lambda: [torch.default_generator])
    undo, before = observer.fused_attention_draws_only_dropout(), torch.get_rng_state()
    for is_changed in (dropout > 0, True):
        module.tex.fused_attn_fwd(*given)
        assert torch.equal(torch.get_rng_state(), before) is not is_changed
        undo()
