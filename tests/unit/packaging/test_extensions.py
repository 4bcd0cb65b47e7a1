"""The core without one of its extensions, deleted from a copy of the package; what imports load."""

import importlib
import shutil
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import megatron_cg
from megatron_cg.extensions import EXTENSIONS
from megatron_cg.tools.align.run import arguments, data_flags, example_script
from megatron_cg.tools.launch_line import read_line
from megatron_cg.tools.plan.settings import settings_of
from tests.functional.cases import CASES, FEATURES, LARGE, PACKED, Case
from tests.functional.conftest import plan_of
from tests.unit.interpreted import python, run

TRAINS = """
from megatron_cg.consensus.exchange import Agreement
from megatron_cg.tape import launch
from megatron_cg.tape.training_plan import CpuModelConfig, TrainingPlan

def trained(graphs):
    from megatron.core import parallel_state
    from megatron_cg.tape.tape_backend import TapeBackend
    from megatron_cg.tape.train import Trainer

    plan = TrainingPlan(CpuModelConfig(experts=EXPERTS, graph_modules=SCOPES), graphs=graphs)
    trainer = Trainer(plan)
    steps = []
    for step in range(plan.steps):
        if graphs and step == plan.warmup_steps:
            trainer.capture(TapeBackend(), Agreement())
        steps.append([number.hex() for number in trainer.step()])
    replayed = graphs and trainer.session.counters.replayed
    trainer.close()
    parallel_state.destroy_model_parallel()
    return steps, replayed

def body():
    eager, graphs = trained(False), trained(True)
    assert eager[0] == graphs[0] and graphs[1] > 0, (eager, graphs)

launch.START = "fork"
launch.run_processes(body, 1)
"""
SETTINGS = """
import importlib.util
import megatron_cg
from megatron_cg.errors import ArgumentError

assert importlib.util.find_spec("megatron_cg.NAME") is None
for setting, value in SETTINGS.items():
    try:
        megatron_cg.enable(**{setting: value})
    except ArgumentError as error:
        assert "megatron_cg/NAME, which is not installed" in str(error), error
    else:
        raise AssertionError(setting)
megatron_cg.enable()
megatron_cg.enable(verify_steps=3)
megatron_cg.disable()
"""
LINE = "torchrun --nproc-per-node 2 pretrain_gpt.py --num-layers 2 --hidden-size 64 "
LINE += "--num-attention-heads 4 --seq-length 32 --max-position-embeddings 32 --bf16 "
LINE += "--micro-batch-size 1 --global-batch-size 2 --train-iters 4 --lr 1e-3 --mock-data "
LINE += "--tokenizer-type NullTokenizer --vocab-size 128 --transformer-impl transformer_engine"
EXAMPLES: dict[str, dict[str, Any]] = {
    "experts": {"grouped_gemm": "torch", "moe_rows": 2.0, "moe_stash": 2.0, "moe_exchange": "peer"},
    "native": {"backend": "native"},
    "tape": {"backend": "tape"},
    "tools": {"record": "somewhere"},
}
CLI = ("-m", "megatron_cg.tools.cli.main")
USES = {
    "compiled": ("-c", "from megatron_cg import compile_together"),
    "fully_shard": ("-c", "from megatron_cg.extensions import sharding_by_v2 as s; s(None)"),
    "recompute": ("-c", "import megatron_cg as m; m.enable(full_recompute=True)"),
    "tape": (*CLI, "align", "--backend", "tape"),
    "tools": ("-c", "from megatron_cg.extensions import command_line; command_line()"),
    "units": ("-c", "from megatron_cg import graph_units"),
}
"""What needs the extension besides settings."""


def printed(*words: str, fails: bool = False, **where: Any) -> str:
    ended = run(*words, **where)
    assert bool(ended.returncode) is fails, ended.stdout + ended.stderr
    return ended.stderr if fails else ended.stdout


@pytest.mark.parametrize("name", EXTENSIONS)
def test_the_core_works_without(name: str, tmp_path: Path) -> None:
    """Its commands start, its settings are refused by name, and graphs equal eager training."""
    package = Path(megatron_cg.__file__).parent
    without = shutil.ignore_patterns("__pycache__")
    shutil.copytree(package, tmp_path / "megatron_cg", ignore=without)
    shutil.rmtree(tmp_path / "megatron_cg" / name)
    # The installed package may be this checkout: its finder would find the folder there.
    (tmp_path / "sitecustomize.py").write_text(
        "import sys\nsys.meta_path[:] = [f for f in sys.meta_path if 'Editable' not in repr(f)]\n"
    )
    started = partial(printed, folder=tmp_path, PYTHONPATH=str(tmp_path), CUDA_VISIBLE_DEVICES="")
    assert "SCRIPT" in started("-m", "megatron_cg", "--help")
    if name != "tools":
        started(*CLI, "align", "--help")
        assert "--cuda-graph-impl transformer_engine" in started(*CLI, "plan", "--", *LINE.split())
    if name in USES:
        said = started(*USES[name], fails=True)
        assert f"the extension megatron_cg/{name}, which is not installed" in said
        assert "ModuleNotFoundError" not in said
    script = SETTINGS.replace("SETTINGS", repr(EXAMPLES.get(name, {}))).replace("NAME", name)
    if name != "tape":
        experts, scopes = (4, ("attn", "moe_router")) if name == "experts" else (0, ("attn",))
        script += TRAINS.replace("EXPERTS", repr(experts)).replace("SCOPES", repr(scopes))
    started("-c", script)


def test_the_names_are_listed_and_there() -> None:
    assert set(dir(megatron_cg)) >= set(megatron_cg.__all__)
    assert all(getattr(megatron_cg, name) for name in megatron_cg.__all__)
    with pytest.raises(AttributeError, match="has no attribute 'GraphedLayer'"):
        megatron_cg.GraphedLayer  # noqa: B018


@pytest.mark.parametrize(
    ("statement", "loaded"),
    [("import megatron_cg", set()), ("from megatron_cg import graph_units", {"torch", "numpy"})],
)
def test_a_name_loads_what_it_needs_alone(statement: str, loaded: set[str]) -> None:
    ended = python(f"{statement}\nimport sys; print(*sys.modules)")
    assert {"torch", "megatron", "numpy"} & {*ended.stdout.split()} == loaded


FOLDER = Path(__file__).parents[2] / "functional"


@pytest.mark.parametrize("name", sorted(file.stem for file in FOLDER.glob("test_*.py")))
def test_functional_tests_can_be_imported_without_a_gpu(name: str) -> None:
    importlib.import_module(f"tests.functional.{name}")


@pytest.mark.parametrize("case", [*CASES, *PACKED, *FEATURES, *LARGE], ids=lambda case: case.name)
def test_no_rule_refuses_a_functional_case(case: Case) -> None:
    plan = plan_of(case, Path("folder"), example_script())
    words = arguments(
        plan, graphs=True, data=data_flags(Path("text"), Path("cache")), record=FOLDER
    )
    assert settings_of(read_line(words), case.gpus, megatron=False).broken == ()
