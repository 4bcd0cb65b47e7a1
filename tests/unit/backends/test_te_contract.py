"""TE's contract for capture-time hooks, read from the installed transformer-engine itself.

TE's compiled extension takes minutes to build and is not needed for this: the functions that
state the contract are pure Python, so they are taken out of ``graph.py`` by their syntax tree and
run as they are.
"""

import ast
from typing import Any

import pytest

from megatron_cg.fsdp.roles import unit_hooks
from megatron_cg.replay.unit import Unit
from tests.unit.te_sources import source_of_te

CONTRACT = ("_canonicalize_capture_time_hooks", "_run_capture_time_hooks")


@pytest.fixture(scope="module")
def graph_source() -> ast.Module:
    return ast.parse(source_of_te("graph.py").read_text())


@pytest.fixture(scope="module")
def contract(graph_source: ast.Module) -> dict[str, Any]:
    wanted: list[ast.stmt] = []
    for node in graph_source.body:
        names = [t.id for t in getattr(node, "targets", []) if isinstance(t, ast.Name)]
        if getattr(node, "name", None) in CONTRACT or "_CAPTURE_TIME_HOOK_NAMES" in names:
            wanted.append(node)
    scope: dict[str, Any] = {"torch": __import__("torch")}
    exec("from typing import Dict, List, Optional", scope)
    exec(compile(ast.Module(wanted, []), "graph.py", "exec"), scope)
    return scope


def hooks_of_both_layers(model: Any) -> tuple[list[Any], list[Any]]:
    from megatron_cg.tools.cpu.cpu_model import transformer_layers

    model.module._replace_param_with_raw_if_needed()
    layers: list[Any] = list(transformer_layers(model))
    units = [Unit(f"layer {i}", layer, tuple(layer.children())) for i, layer in enumerate(layers)]
    return layers, [unit_hooks(unit).capture_time for unit in units]


def test_te_runs_our_hooks_in_every_phase(contract: dict[str, Any], dense_model: Any) -> None:
    layers, hooks = hooks_of_both_layers(dense_model)
    assert contract["_canonicalize_capture_time_hooks"](len(layers), hooks) == hooks
    states = []
    for phase in ("forward_pre_hooks", "forward_hooks", "backward_pre_hooks", "backward_hooks"):
        contract["_run_capture_time_hooks"](hooks, 0, phase, layers[0])
        states.append(layers[0]._training_state.name)
    assert states == ["FORWARD", "IDLE", "PRE_BACKWARD", "IDLE"]


def test_te_captures_a_backward_pass_that_a_reentrant_checkpoint_can_be_in(
    graph_source: ast.Module,
) -> None:
    """torch refuses it in a pass that names its inputs; see ``full_recompute.py``."""
    calls = [
        node
        for node in ast.walk(graph_source)
        if isinstance(node, ast.Call) and ast.unparse(node.func).startswith("torch.autograd.")
    ]
    passes = [call for call in calls if ast.unparse(call.func) == "torch.autograd.backward"]
    assert len(passes) >= 3 and not any(
        "inputs" in {keyword.arg for keyword in call.keywords} for call in passes
    )
    assert not any(ast.unparse(call.func) == "torch.autograd.grad" for call in calls)
