"""The page on Megatron-Bridge, which is not installed: its code parses, our names in it exist."""

from __future__ import annotations

import ast
import re
from inspect import signature
from pathlib import Path

import megatron_cg

PAGE = Path(__file__).resolve().parents[3] / "examples" / "megatron_bridge.md"


def test_what_it_takes_from_this_package_is_there() -> None:
    text = PAGE.read_text()
    assert "**Not run by this project.**" in text
    tree = ast.parse(text.partition("```python\n")[2].partition("```")[0])
    ours = {
        node.attr
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute)
        and isinstance(node.value, ast.Name)
        and node.value.id == "megatron_cg"
    }
    assert ours == {"enable"} and "`megatron_cg.GraphedLayers`" in text
    assert ours <= set(megatron_cg.__all__)


def test_the_helper_that_it_makes_is_the_one_that_becomes_ours() -> None:
    """With the class and arguments that the page names for Megatron-Bridge's loop."""
    from megatron.core.transformer.cuda_graphs import TECudaGraphHelper

    parameters = set(signature(TECudaGraphHelper).parameters)
    (call,) = re.findall(r"`TECudaGraphHelper\((.*?)\)`", PAGE.read_text())
    named = {word.partition("=")[0] for word in call.split(", ")}
    assert named <= parameters and {"model", "optimizers"} <= named
