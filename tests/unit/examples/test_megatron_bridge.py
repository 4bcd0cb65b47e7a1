"""The page on Megatron-Bridge, which is not installed: its code parses, our names in it exist."""

from __future__ import annotations

import ast
from importlib import import_module
from pathlib import Path

PAGE = Path(__file__).resolve().parents[3] / "examples" / "megatron_bridge.md"


def test_what_it_takes_from_this_package_is_there() -> None:
    text = PAGE.read_text()
    assert "**Not run by us.**" in text
    tree = ast.parse(text.partition("```python\n")[2].partition("```")[0])
    ours = [
        (node.module, alias.name)
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and str(node.module).startswith("megatron_cg")
        for alias in node.names
    ]
    assert len(ours) == 3
    for module, name in ours:
        assert hasattr(import_module(str(module)), name)


def test_the_loop_that_it_follows_is_ours_too() -> None:
    from megatron_cg.megatron.helper import FsdpCudaGraphHelper
    from megatron_cg.megatron.steps import StepRoutine

    assert "live" in vars(FsdpCudaGraphHelper)
    for name in ("before_step", "after_step", "vote", "close"):
        assert callable(getattr(StepRoutine, name)) and f".{name}(" in PAGE.read_text()
