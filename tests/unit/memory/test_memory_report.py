"""Who holds what: storages counted once, by holder; the allocator's pools from its snapshot."""

from __future__ import annotations

import ast
import logging
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

from megatron_cg.backends.tape.tape_backend import TapeBackend
from megatron_cg.memory.pools import held_addresses, pools
from megatron_cg.memory.usage import (
    GRAD_INPUTS,
    GRAD_OUTPUTS,
    INPUTS,
    OUTPUTS,
    Tally,
    log_report,
    optimizer_tensors,
    report,
    static_tensors,
)
from megatron_cg.tools.cpu.training_plan import CpuModelConfig
from tests.unit.memory.held import held
from tests.unit.te_sources import source_of_te
from tests.unit.trainers import trainer_of

MIB = 2**20


def block(address: int, size: int, state: str) -> dict[str, Any]:
    return {"address": address, "size": size, "state": state}


def segment(address: int, pool: tuple[int, int], stream: int, *blocks: Any) -> dict[str, Any]:
    made, at = [], address
    for size, state in blocks:
        made.append(block(at, size, state))
        at += size
    return {
        "address": address,
        "total_size": at - address,
        "allocated_size": sum(b["size"] for b in made if b["state"] == "active_allocated"),
        "stream": stream,
        "segment_pool_id": pool,
        "blocks": made,
    }


SNAPSHOT = [
    segment(0, (0, 0), 0, (2 * MIB, "active_allocated"), (3 * MIB, "inactive")),
    segment(100 * MIB, (0, 1), 7, (16 * MIB, "inactive"), (4 * MIB, "active_allocated")),
    segment(200 * MIB, (0, 1), 7, (20 * MIB, "inactive")),
    segment(300 * MIB, (0, 0), 9, (1 * MIB, "active_pending_free")),
]


def test_pools_are_summed_up_by_pool_and_stream_the_largest_first() -> None:
    graphs, main, side = pools(SNAPSHOT)
    assert (graphs.pool, graphs.stream, graphs.segments) == ((0, 1), 7, 2)
    assert (graphs.reserved, graphs.allocated) == (40 * MIB, 4 * MIB)
    assert graphs.largest_free == 20 * MIB and graphs.is_graphs
    assert (main.reserved, main.largest_free, main.is_graphs) == (5 * MIB, 3 * MIB, False)
    assert (side.stream, side.largest_free) == (9, 0)
    assert "40.0 MiB reserved in 2 segments, 4.0 MiB allocated" in graphs.text()


def test_an_address_is_held_inside_of_blocks_in_use_only() -> None:
    is_held = held_addresses(SNAPSHOT)
    assert is_held(0) and is_held(2 * MIB - 1) and not is_held(2 * MIB)
    assert not is_held(100 * MIB) and is_held(117 * MIB) and not is_held(120 * MIB)
    assert is_held(300 * MIB) and not is_held(299 * MIB)


def test_a_storage_is_counted_once_for_its_first_holder() -> None:
    table = torch.zeros(1024)
    tally = Tally()
    tally.add("model", "table", [table])
    tally.add("graph", INPUTS, [table[:10], None, torch.zeros(8)])
    first, second = tally.rows()
    assert (first.held, first.tensors) == (4096, 1)
    assert (second.held, second.tensors) == (32, 1)


def test_memory_that_the_allocator_may_give_away_is_told_apart() -> None:
    kept, weak = torch.zeros(4), torch.zeros(16)
    tally = Tally(lambda address: address == kept.data_ptr())
    tally.add("graph", OUTPUTS, [kept, weak])
    (row,) = tally.rows()
    assert (row.held, row.addressed) == (16, 64)


class Helpers:
    def __init__(self, release: Any) -> None:
        self.release_static_state = release


def graphed_like_te(surface: Any, outputs: Any, grad_outputs: Any, grad_inputs: Any) -> Any:
    static_input_surface, static_outputs = surface, outputs
    static_grad_outputs, static_grad_inputs = grad_outputs, grad_inputs

    def release_static_state() -> None:
        nonlocal static_input_surface, static_outputs, static_grad_outputs, static_grad_inputs
        static_input_surface = static_outputs = ()
        static_grad_outputs = static_grad_inputs = ()

    helpers = Helpers(release_static_state)

    def new_fwd() -> Any:
        return helpers

    return new_fwd


def test_what_te_keeps_is_read_from_its_closures() -> None:
    tensors = [torch.zeros(n) for n in range(1, 5)]
    graph = graphed_like_te(*((tensor,) for tensor in tensors))
    found = static_tensors(graph)
    assert [found[kind][0] for kind in (INPUTS, OUTPUTS, GRAD_OUTPUTS, GRAD_INPUTS)] == tensors
    graph().release_static_state()
    assert all(value == () for value in static_tensors(graph).values())


def test_te_still_has_the_closures_that_are_read() -> None:
    functions = {
        node.name: node
        for node in ast.walk(ast.parse(source_of_te("graph.py").read_text()))
        if isinstance(node, ast.FunctionDef)
    }
    release = functions["release_static_state"]
    owned = {name for n in ast.walk(release) if isinstance(n, ast.Nonlocal) for name in n.names}
    assert {"static_input_surface", "static_outputs"} <= owned
    assert {"static_grad_outputs", "static_grad_inputs"} <= owned
    used = {n.id for n in ast.walk(functions["new_fwd"]) if isinstance(n, ast.Name)}
    assert "helpers" in used


def test_optimizer_states_are_found_through_megatrons_wrappers() -> None:
    layer = nn.Linear(4, 4, bias=False)
    adam = torch.optim.Adam(layer.parameters())
    layer(torch.ones(4)).sum().backward()
    adam.step()

    class Megatron:
        def __init__(self, **attributes: Any) -> None:
            vars(self).update(attributes)

    chained = Megatron(chained_optimizers=[Megatron(optimizer=adam)])
    found = sum(t.nbytes for t in optimizer_tensors(chained))
    assert found == sum(t.nbytes for t in optimizer_tensors(adam)) >= 2 * 64


@pytest.fixture
def trainer(one_rank: None) -> Iterator[Any]:
    with trainer_of(CpuModelConfig(layers=2, graph_modules=("attn", "mlp"))) as made:
        made.step()
        yield made


def test_a_session_is_walked_from_graphs_to_buffers(
    trainer: Any, caplog: pytest.LogCaptureFixture
) -> None:
    session = trainer.capture(TapeBackend())
    found = report(session)
    shape = trainer.plan.model
    tokens = shape.sequence_length * trainer.plan.micro_batch_size
    hidden = tokens * shape.hidden_size * 2
    inputs = [row for row in found.rows if row.kind == INPUTS]
    assert [row.holder for row in inputs] == ["layer 0", "layer 1"]
    # A layer's own hidden states and mask; parameters are FSDP's and not counted here.
    mask = shape.sequence_length**2
    assert inputs[1].held >= hidden + mask and inputs[1].held < 3 * (hidden + mask)
    assert held(found, OUTPUTS) >= 2 * hidden
    store = trainer._fsdp.param_and_grad_buffer
    numel = sum(group.main_grad_buffer.data_size for group in store.parameter_groups)
    assert held(found, "weights") == held(found, "main gradients") == 2 * numel
    assert held(found, "main weights") == 4 * numel
    text = found.text()
    assert "graphs" in text and "layer 1" not in text
    with caplog.at_level(logging.INFO, "megatron_cg.memory.usage"):
        log_report(session, "after capture")
    assert not caplog.records
    with caplog.at_level(logging.DEBUG, "megatron_cg.memory.usage"):
        log_report(session, "after capture")
    assert "memory after capture" in caplog.text and "static inputs" in caplog.text


def test_closed_graphs_hold_nothing(trainer: Any) -> None:
    session = trainer.capture(TapeBackend())
    graphs = [graph for unit in session._units for graph in unit.layer.cuda_graphs]
    assert any(any(tensors) for tensors in map(static_tensors, graphs))
    session.close()
    assert all(not list(kind) for graph in graphs for kind in static_tensors(graph).values())
    assert held(report(session), INPUTS) == 0
