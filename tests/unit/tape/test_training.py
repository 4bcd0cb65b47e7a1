"""The fakes, of which nothing stays; trainings without a GPU, one process and two alike."""

import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from megatron.core import parallel_state, utils
from megatron.core.tensor_parallel import random
from megatron.core.tensor_parallel.random import CudaRNGStatesTracker
from torch.distributed.device_mesh import DeviceMesh

from megatron_cg.backends.base import CaptureRequest
from megatron_cg.tape import fakes
from megatron_cg.tape.fakes import cpu_fakes
from megatron_cg.tape.launch import run_processes
from megatron_cg.tape.tape_backend import TapeBackend
from megatron_cg.tape.train import batches
from megatron_cg.tape.training_plan import CpuModelConfig, TrainingPlan
from megatron_cg.tools.align.tape_run import train
from megatron_cg.tools.record.compare import read_run

CPU = torch.device("cpu")


def everything() -> dict[str, object]:
    """Every attribute the fakes touch, as each owner's own dictionary has it."""
    found = {f"torch.{name}": vars(torch)[name] for name in fakes.FACTORIES}
    found |= {f"Tensor.{name}": vars(torch.Tensor).get(name) for name in fakes.METHODS}
    found |= {f"cuda.{name}": value for name, value in vars(torch.cuda).items() if name[0] != "_"}
    found |= {"mesh": DeviceMesh.__init__, "group": vars(DeviceMesh)["from_group"]}
    found |= {"fork": CudaRNGStatesTracker.fork, "module": vars(torch.nn.Module)["cuda"]}
    found |= {"te version": utils._te_version, "te": sys.modules.get("transformer_engine")}
    return found


def test_all_is_undone_also_after_an_exception() -> None:
    before = everything()
    with cpu_fakes():
        inside = everything()
    assert everything() == before
    with pytest.raises(KeyboardInterrupt), cpu_fakes():
        raise KeyboardInterrupt
    assert everything() == before
    changed = {name for name in before if inside[name] is not before[name]}
    assert {"torch.empty", "Tensor.to", "cuda.Stream", "mesh", "group", "fork"} <= changed


def test_cuda_leads_to_the_cpu_also_in_a_hook_that_autograd_calls() -> None:
    devices: list[torch.device] = []

    def hook(grad: torch.Tensor) -> None:
        devices.append(torch.empty(2, device="cuda").device)
        devices.append(grad.new_zeros(2, device=torch.device("cuda", 0)).device)
        devices.append(grad.to("cuda").device)
        devices.append(grad.cuda().device)

    with cpu_fakes():
        x = torch.ones(2, device=torch.cuda.current_device(), requires_grad=True)
        x.register_hook(hook)
        (x * 2).sum().backward()
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            assert stream.record_event().query()
        torch.nn.Linear(2, 2).cuda()
    assert devices == [CPU] * 4


def test_layers_can_be_made_on_meta_beside_memory_of_the_device() -> None:
    with cpu_fakes(), torch.device("meta"):
        assert torch.zeros(2).is_meta and torch.nn.Linear(2, 2).weight.is_meta
        assert torch.zeros(2, device="cuda").device == CPU
    with torch.device("meta"):
        assert torch.zeros(2).is_meta


def test_a_fork_draws_from_its_own_state_and_the_outer_one_goes_on() -> None:
    with cpu_fakes():
        tracker = CudaRNGStatesTracker()
        tracker.add("inner", 7)
        torch.manual_seed(1)
        alone = torch.rand(4)
        torch.manual_seed(1)
        first = torch.rand(2)
        with tracker.fork("inner"):
            one = torch.rand(2)
        assert torch.equal(torch.cat([first, torch.rand(2)]), alone)
        with tracker.fork("inner"):
            two = torch.rand(2)
        torch.manual_seed(7)
        assert torch.equal(torch.cat([one, two]), torch.rand(4))
        with pytest.raises(KeyError, match="other is not added"), tracker.fork("other"):
            pass


class Forking(torch.nn.Module):
    def __init__(self, tracker: CudaRNGStatesTracker) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(64))
        self.tracker = tracker

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        outer = torch.nn.functional.dropout(x * self.weight, 0.5)
        with self.tracker.fork("inner"):
            return torch.nn.functional.dropout(outer, 0.5)


def test_a_tape_takes_the_tracker_along_and_capture_leaves_it_as_it_was(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tracker = CudaRNGStatesTracker()
    monkeypatch.setattr(random, "_CUDA_RNG_STATE_TRACKER", tracker)
    monkeypatch.setattr(random, "_CUDA_RNG_STATE_TRACKER_INITIALIZED", True)
    module, x, backend = Forking(tracker), torch.ones(64), TapeBackend()

    def three(call: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
        return torch.cat([call(x * scale).clone() for scale in (1.0, 2.0, 3.0)] + [torch.rand(4)])

    with cpu_fakes():
        torch.manual_seed(3)
        tracker.add("inner", 7)
        start, state = dict(tracker.states_), torch.get_rng_state()
        eager = three(module)
        tracker.set_states(dict(start))
        torch.set_rng_state(state)
        with backend.preserved([module]):
            sample = torch.ones(64, requires_grad=True)
            (graph,) = backend.capture(CaptureRequest((module,), [(sample,)]))
        assert torch.equal(tracker.states_["inner"], start["inner"])
        assert torch.equal(three(graph), eager)


SHARED = TrainingPlan(CpuModelConfig(layers=1, bf16=False), 4)


def test_the_number_of_processes_does_not_matter_but_for_rounding(tmp_path: Path) -> None:
    """The collectives that the fakes lead to gloo sum what they should."""
    alone = replace(SHARED, micro_batch_size=2 * SHARED.micro_batch_size)
    run_processes(partial(train, SHARED, tmp_path / "shared"))
    run_processes(partial(train, alone, tmp_path / "alone"), processes=1)
    pair = [read_run(tmp_path / name)[0]["steps"] for name in ("shared", "alone")]
    assert len(pair[0]) == SHARED.steps
    for left, right in zip(*pair, strict=True):
        assert left["grad_norm"] == pytest.approx(right["grad_norm"], rel=1e-5)
        loss, other = left["losses"]["lm loss"], right["losses"]["lm loss"]
        assert loss == pytest.approx(other, rel=1e-6)


def test_labels_are_the_next_tokens_and_the_text_begins_again(one_rank: None) -> None:
    parallel_state.initialize_model_parallel()
    model = CpuModelConfig(sequence_length=10_000)
    endless = batches(TrainingPlan(model, micro_batch_size=2))
    taken = [next(endless) for _ in range(4)]
    tokens = torch.cat([tokens.flatten() for tokens, _ in taken])
    labels = torch.cat([labels.flatten() for _, labels in taken])
    begin = next(
        n for n in range(10_000, 80_000, 10_000) if torch.equal(tokens[:50], tokens[n:][:50])
    )
    assert torch.equal(tokens[1:begin], labels[: begin - 1])
    assert torch.equal(tokens[: 80_000 - begin], tokens[begin:])
