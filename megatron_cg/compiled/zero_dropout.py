"""Removes dropout that drops nothing, as an eager pass does.

Note [Dropout that drops nothing]
    With p = 0, or in evaluation, ATen's ``dropout`` returns its input. torch's decomposition for
    tracing returns a clone of it instead (``torch._decomp``, torch 2.11 to 2.15). After a softmax,
    that keeps the attention probabilities a second time until the backward pass: for 32 heads and
    4,096 tokens, 1 GiB a layer in BF16. Values are the same.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.fx


def remove_zero_dropout(graph_module: torch.fx.GraphModule) -> None:
    """Let users of such a dropout read its input. Takes Dynamo's graph, and changes it in place."""
    for inner in graph_module.modules():
        if not isinstance(inner, torch.fx.GraphModule):
            continue
        for node in inner.graph.nodes:
            if node.target is torch.nn.functional.dropout and _drops_nothing(
                *node.args, **node.kwargs
            ):
                node.replace_all_uses_with(node.args[0] if node.args else node.kwargs["input"])
                inner.graph.erase_node(node)
        inner.recompile()


def _drops_nothing(input: Any, p: Any = 0.5, training: Any = True, inplace: Any = False) -> bool:
    """Takes what ``torch.nn.functional.dropout`` takes."""
    return isinstance(p, float | int) and (p == 0 or training is False)
