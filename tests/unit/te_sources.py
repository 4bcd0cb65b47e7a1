"""Transformer Engine's Python sources, which cannot be imported without its compiled part."""

from __future__ import annotations

import ast
import contextlib
import math
import re
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from torch.utils._pytree import tree_flatten, tree_unflatten

from megatron_cg.backends.base import CaptureRequest
from megatron_cg.backends.te_backend import options_of
from megatron_cg.fsdp.roles import CAPTURE_TIME_KEYS
from megatron_cg.upstream.symbols import fingerprint_of


def source_of_te(*below: str) -> Path:
    """A file or folder below ``transformer_engine/pytorch``, of what ``make test`` installs."""
    folders = [str(Path(sys.prefix, "te-source")), *sys.path]
    places = (Path(folder, "transformer_engine", "pytorch", *below) for folder in folders)
    found = next((place for place in places if place.exists()), None)
    assert found is not None, "transformer-engine's sources are not there: run make test"
    return found


def fingerprint_in(source: str, path: str) -> str:
    """The fingerprint of the function at ``path``, such as ``Class.method``, in a file's source."""
    node: Any = ast.parse(source)
    for name in path.replace(".<locals>", "").split("."):
        node = next(one for one in ast.walk(node) if getattr(one, "name", None) == name)
    lines = source.splitlines(keepends=True)
    first = min([node.lineno, *(one.lineno for one in node.decorator_list)])
    return fingerprint_of(textwrap.dedent("".join(lines[first - 1 : node.end_lineno])))


def functions_of_te(monkeypatch: pytest.MonkeyPatch, renamed: str = "") -> dict[str, Any]:
    """TE's functions of a capture, from the installed sources; only CUDA's parts are not.

    A variable may be ``renamed``, as another version might have it.
    """
    path = source_of_te("graph.py")
    text = path.read_text()
    if renamed:
        text = re.sub(rf"\b{renamed}\b", f"{renamed}_of_next_year", text)
    wanted = {
        "_make_graphed_callables",
        "_canonicalize_capture_time_hooks",
        "_run_capture_time_hooks",
        "_none_grad_context_wrapper",
        "_GraphedCallableHelpers",
    }
    body = [n for n in ast.parse(text).body if getattr(n, "name", None) in wanted]
    attention = ModuleType("te.attention.linear_attention.base")
    attention.LinearAttentionBase = type("LinearAttentionBase", (), {})  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, attention.__name__, attention)
    scope: dict[str, Any] = {
        "__package__": "te",
        "__name__": "te.graph",
        "torch": torch,
        "contextlib": contextlib,
        "ceil": math.ceil,
        "NamedTuple": NamedTuple,
        "FP8GlobalStateManager": SimpleNamespace(is_fp8_enabled=bool, is_first_fp8_module=bool),
        "_CAPTURE_TIME_HOOK_NAMES": CAPTURE_TIME_KEYS,
        "_tree_flatten": tree_flatten,
        "_tree_unflatten": tree_unflatten,
        "_graph_context_wrapper": torch.cuda.graph,
        "graph_pool_handle": torch.cuda.graph_pool_handle,
        "graph_safe_rng_available": lambda: False,
        "make_weak_ref": lambda tensors: tensors,
        **{
            name: type(name, (), {})
            for name in ("TransformerEngineBaseModule", "BasicOperation", "Sequential")
        },
    }
    exec(compile(ast.Module(body, []), str(path), "exec", annotations.compiler_flag), scope)
    return scope


def loops_of_te(monkeypatch: pytest.MonkeyPatch, renamed: str = "") -> Callable[..., Any]:
    """TE's own warmup, capture and replays, on the double of ``torch.cuda`` that is there."""
    scope = functions_of_te(monkeypatch, renamed)

    def run(request: CaptureRequest) -> Any:
        options, canonical = options_of(request), scope["_canonicalize_capture_time_hooks"]
        options["capture_time_hooks"] = canonical(len(request.callables), request.hooks)
        return scope["_make_graphed_callables"](request.callables, request.args, **options)

    return run
