"""Graphs go before the process groups and the interpreter, and never hide why a run ended."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed import distributed_c10d

import megatron_cg
from megatron_cg.capture.session import Phase, close_all_sessions
from megatron_cg.integrations import teardown
from megatron_cg.tape.tape_backend import TapeBackend
from megatron_cg.tape.training_plan import CpuModelConfig
from tests.unit.counted import expect
from tests.unit.interpreted import ROOT, python
from tests.unit.trainers import layers_of, new_trainer

pytestmark = pytest.mark.fault


class Forced(Exception):
    """Raised on purpose."""


@pytest.fixture
def trainer(one_rank: None) -> Iterator[Any]:
    made = new_trainer(CpuModelConfig(layers=2, graph_modules=("attn",)))
    made.step()
    made.capture(TapeBackend())
    yield made
    close_all_sessions()


@pytest.fixture
def destroyed(trainer: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[Any, Phase]]]:
    """Enabled; which groups were destroyed, and in which phase the session was then."""
    seen: list[tuple[Any, Phase]] = []

    def destroy(group: Any = None) -> None:
        seen.append((group, trainer.session.phase))

    for module in (torch.distributed, distributed_c10d):
        monkeypatch.setattr(module, "destroy_process_group", destroy)
    monkeypatch.setattr(distributed_c10d, "_abort_process_group", destroy)
    megatron_cg.enable()
    yield seen
    megatron_cg.disable()
    assert torch.distributed.destroy_process_group is destroy
    assert distributed_c10d.destroy_process_group is destroy
    assert distributed_c10d._abort_process_group is destroy


def broken(*_args: Any) -> None:
    raise Forced("the GPU is in an error state")


def is_eager(trainer: Any) -> bool:
    return all("forward" not in vars(layer) for layer in layers_of(trainer))


@pytest.mark.parametrize(
    ("module", "end"),
    [
        (torch.distributed, "destroy_process_group"),
        (distributed_c10d, "destroy_process_group"),
        (distributed_c10d, "_abort_process_group"),
    ],
)
@pytest.mark.parametrize("by_name", [False, True])
def test_graphs_are_closed_before_the_default_group(
    module: Any, end: str, by_name: bool, trainer: Any, destroyed: list[tuple[Any, Phase]]
) -> None:
    groups = (torch.distributed.group.WORLD,) if by_name else ()
    getattr(module, end)(*groups)
    assert [phase for _, phase in destroyed] == [Phase.CLOSED]
    assert is_eager(trainer)


def test_another_group_leaves_the_graphs(trainer: Any, destroyed: list[tuple[Any, Phase]]) -> None:
    group = torch.distributed.new_group([0])
    torch.distributed.destroy_process_group(group)
    distributed_c10d._abort_process_group(group)
    assert destroyed == [(group, Phase.REPLAYING)] * 2
    trainer.step()
    expect(trainer.session.counters, replayed=2)


def test_the_group_is_destroyed_also_when_closing_fails(
    trainer: Any,
    destroyed: list[tuple[Any, Phase]],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(TapeBackend, "synchronize", broken)
    torch.distributed.destroy_process_group()
    assert [phase for _, phase in destroyed] == [Phase.CLOSED]
    assert is_eager(trainer)
    assert "not all CUDA graphs could be released" in caplog.text
    assert "in an error state" in caplog.text


@pytest.mark.parametrize("end", ["destroy_process_group", "_abort_process_group"])
def test_a_gpu_that_never_rests_keeps_its_graphs_and_their_communicators(
    end: str,
    trainer: Any,
    destroyed: list[tuple[Any, Phase]],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    leaves: list[str] = []
    monkeypatch.setattr(teardown, "_gave_up", False)
    waits: list[float] = []
    monkeypatch.setattr(teardown, "_comes_to_rest", waits.append)
    monkeypatch.setattr(teardown, "exit_without_waiting", lambda: leaves.append(end))
    getattr(distributed_c10d, end)()
    assert not teardown.close_for_the_end() and len(waits) == 1
    assert (destroyed, leaves, trainer.session.phase) == ([], [end], Phase.REPLAYING)
    assert "a collective that another rank did not join" in caplog.text


@pytest.mark.parametrize("after", [broken, lambda *_: None], ids=["error state", "good order"])
def test_disabling_after_an_error_keeps_that_error(
    trainer: Any, after: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(TapeBackend, "synchronize", after)
    with pytest.raises(ZeroDivisionError) as error:
        try:
            raise ZeroDivisionError
        finally:
            megatron_cg.disable()
    assert error.value.__context__ is None
    assert trainer.session.phase is Phase.CLOSED and is_eager(trainer)


SCRIPT = """
import atexit, sys, tempfile
import torch

def report():
    print("at exit:", trainer.session.phase.value)

atexit.register(report)

import megatron_cg
from megatron_cg.tape.tape_backend import TapeBackend
from megatron_cg.tape.fakes import cpu_fakes

megatron_cg.enable()
store = "file://" + tempfile.mkdtemp() + "/store"
torch.distributed.init_process_group("gloo", init_method=store, rank=0, world_size=1)
fakes = cpu_fakes()
fakes.__enter__()
from megatron_cg.tape.train import Trainer
from megatron_cg.tape.training_plan import CpuModelConfig, TrainingPlan

trainer = Trainer(TrainingPlan(CpuModelConfig(layers=1)))
trainer.step()
trainer.capture(TapeBackend())
trainer.step()
if {broken}:
    def broken(self):
        raise RuntimeError("error of closing")
    TapeBackend.synchronize = broken
{end}
"""


ENDS = {
    "raise KeyError('why it ended')": True,
    "sys.exit(3)": False,
    "torch.distributed.destroy_process_group()": False,
    "megatron_cg.disable(); trainer.capture(TapeBackend())": False,
}
"""How the script ends, and whether its graphs cannot be closed."""
IN_FORKS = """
import os, sys
import torch
import megatron.core.distributed.fsdp.mcore_fsdp_adapter
import megatron.core.models.gpt
import megatron.training.training

for script in sys.argv[1:]:
    child = os.fork()
    if not child:
        for stream, name in ((1, "out"), (2, "err")):
            file = os.open(f"{script}.{name}", os.O_WRONLY | os.O_CREAT)
            os.dup2(file, stream)
        break
    ended = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    with open(f"{script}.code", "w") as code:
        code.write(str(ended))
else:
    sys.exit()
exec(compile(open(script).read(), script, "exec"))
"""
"""Runs each script to the end of an interpreter, in forks of one that has imported Megatron."""


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[int, str, str]]:
    folder = tmp_path_factory.mktemp("ends")
    scripts = {end: folder / f"{number}.py" for number, end in enumerate(ENDS)}
    for end, script in scripts.items():
        script.write_text(SCRIPT.format(end=end, broken=ENDS[end]))
    environment = {"PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    environment["TORCHDYNAMO_DISABLE"] = "1"  # A third of the time that Megatron's import takes.
    done = python(IN_FORKS, *scripts.values(), **environment)
    assert done.returncode == 0, done.stderr

    def read(script: Path, name: str) -> str:
        return script.with_name(f"{script.name}.{name}").read_text()

    return {
        end: (int(read(script, "code")), read(script, "out"), read(script, "err"))
        for end, script in scripts.items()
    }


@pytest.mark.parametrize(
    ("end", "code", "phase"),
    list(zip(ENDS, (1, 3, 0, 0), ("closed", "closed", "closed", "replaying"), strict=True)),
)
def test_the_end_of_the_process_closes_graphs_and_keeps_its_reason(
    end: str, code: int, phase: str, ended: dict[str, tuple[int, str, str]]
) -> None:
    exit_code, printed, errors = ended[end]
    assert exit_code == code, errors
    assert f"at exit: {phase}" in printed
    assert ("error of closing" in printed + errors) is ENDS[end]
    assert ("KeyError: 'why it ended'" in errors) is (code == 1)
