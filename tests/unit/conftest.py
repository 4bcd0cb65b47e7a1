"""What the unit tests share: one process, the real Megatron-FSDP on the CPU."""

import gc
import importlib.util
import multiprocessing
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from packaging.version import Version

from megatron_cg.tape import launch
from megatron_cg.tools.align.run import DETERMINISTIC_ENVIRONMENT
from megatron_cg.upstream.symbols import installed_version

LONGEST = (
    "runs/test_random_models.py units/test_sharded.py random_units/test_random_units.py "
    "ordering/test_order.py experts/test_training.py experts/test_repeats.py "
    "tape/test_own_loop.py fastpath/test_fast_path.py runs/test_life.py "
    "examples/test_loops.py recompute/test_full_recompute.py fastpath/test_gather.py "
    "runs/test_one_rank_failures.py"
).split()
"""The files that take longest. They begin first, so that none is left to one worker at the end."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files in the order of :data:`LONGEST`, then the others; each in its own order."""
    folder = Path(__file__).parent
    places = {folder / name: place for place, name in enumerate(LONGEST)}
    items.sort(key=lambda item: places.get(item.path, len(places)))


def pytest_collection_finish() -> None:
    """No collection of garbage visits what the test files have imported."""
    gc.freeze()


def pytest_unconfigure() -> None:
    gc.collect()
    gc.freeze()


def pytest_configure(config: pytest.Config) -> None:
    """Processes that train come from a server that has imported what they need.

    That takes 0.1 s instead of 5. Those of ``align`` and ``bench`` are started as for users.
    """
    if hasattr(config.option, "loadscopereorder"):
        config.option.loadscopereorder = False  # xdist would begin with files of the most tests.
    imported = ["megatron_cg.tape.launch", "megatron_cg.tape.fakes"]
    # Where Transformer Engine is, some of them keep it out of Megatron, before that is imported.
    if importlib.util.find_spec("transformer_engine") is None:
        imported += ["megatron_cg.tape.train", "megatron.core.models.gpt"]
        imported += ["tests.unit.quick_build"]
    # Inductor would import torch in two more processes to find out which vectors the CPU has.
    os.environ.setdefault("TORCHINDUCTOR_VEC_ISA_OK", "0")
    # The default of 700 objects is for small heaps: collections took a fifth of the imports' time.
    gc.set_threshold(50_000, 20, 50)
    # Of a second one models this small gain nothing, and it takes a core from the other worker.
    torch.set_num_threads(1)
    launch.START = "forkserver"
    multiprocessing.set_forkserver_preload(imported)


@pytest.fixture
def cuda() -> Iterator[Any]:
    """The double of ``torch.cuda``."""
    from tests.unit.backends.cuda_double import cuda_double

    with cuda_double() as double:
        yield double


@pytest.fixture(autouse=True, scope="module")
def nothing_left() -> Iterator[None]:
    """A file whose tests leave graphs or changes of other packages fails itself.

    Otherwise tests of other files that count them fail, and only in some orders of files.
    """
    yield
    from megatron_cg.capture import session
    from megatron_cg.upstream import patch

    left = session.open_sessions(), patch.applied()
    session.close_all_sessions()
    assert left == (0, [])


def let_models_go() -> None:
    """Free what tests leave of Megatron-FSDP's models, and with them their groups' threads.

    Such a model never goes by itself: its gradient hooks, which autograd's nodes hold, refer to it
    and are no cycle that Python can see. With some 60 gloo groups a model, thousands of threads
    would pile up.
    """
    from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding

    for found in gc.get_objects():
        if type(found).__name__ == "MegatronFSDP":
            for parameter in found.param_and_grad_buffer.params:
                (parameter._post_accumulate_grad_hooks or {}).clear()
    RotaryEmbedding.forward.cache_clear()
    gc.collect()


TE = "transformer-engine"
REQUIREMENT = Path(__file__, "../../../requirements/contract.txt").resolve().read_text()
TE_VERSION = REQUIREMENT.rpartition(f"{TE}==")[2].strip()
"""The release that the functional tests run with."""


@pytest.fixture
def deterministic() -> Iterator[None]:
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(before)


@pytest.fixture
def hopper_machine(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What Megatron's rules ask of the machine: a GPU of compute capability 9.0."""
    capability = SimpleNamespace(major=9, minor=0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda *_: capability)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))
    # Set and taken away again, so that what Megatron itself sets is undone too.
    for name in (*DETERMINISTIC_ENVIRONMENT, "CUDA_DEVICE_MAX_CONNECTIONS"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    monkeypatch.setenv("RANK", "0")
    deterministic = torch.are_deterministic_algorithms_enabled()
    yield
    torch.use_deterministic_algorithms(deterministic)


@pytest.fixture
def hopper(hopper_machine: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    import megatron_cg

    # Megatron and we read which TE is installed; a run on GPUs has it, this environment need not.
    monkeypatch.setattr("megatron.core.utils._te_version", Version(TE_VERSION))
    monkeypatch.setattr(
        "megatron_cg.arguments.schema.installed_version",
        lambda name: TE_VERSION if name == TE else installed_version(name),
    )
    megatron_cg.enable()
    yield
    megatron_cg.disable()


@pytest.fixture
def accepted(hopper_machine: None, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """What Megatron's parser, rules and configuration make of flags: the arguments and a config."""

    def accept(words: Sequence[str], ranks: int = 2) -> tuple[Any, Any]:
        from megatron.training import arguments
        from megatron.training.argument_utils import core_transformer_config_from_args

        monkeypatch.setattr("sys.argv", ["pretrain_gpt.py", *words])
        monkeypatch.setenv("WORLD_SIZE", str(ranks))
        args = arguments.parse_args()
        arguments.validate_args(args)
        return args, core_transformer_config_from_args(args)

    return accept


@pytest.fixture(scope="module")
def imported() -> None:
    """Megatron; no collection of garbage visits it, or what earlier files imported, again."""
    from megatron.core.models import gpt  # noqa: F401

    gc.collect()
    gc.freeze()


@contextmanager
def group_of_one(folder: Path) -> Iterator[None]:
    """A gloo group of this process alone, under the CPU fakes."""
    from megatron_cg.tape.fakes import cpu_fakes

    with cpu_fakes():
        torch.distributed.init_process_group(
            "gloo", init_method=f"file://{folder}/store", rank=0, world_size=1
        )
        try:
            yield
        finally:
            torch.distributed.destroy_process_group()
            let_models_go()


@pytest.fixture
def one_rank(imported: None, tmp_path: Path) -> Iterator[None]:
    from megatron.core import parallel_state
    from megatron.core.transformer.moe.moe_logging import destroy_moe_metrics_tracker

    with group_of_one(tmp_path):
        destroy_moe_metrics_tracker()  # of a test with another number of layers
        yield
        parallel_state.destroy_model_parallel()


@pytest.fixture
def replays_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """No replay is verified, the first included: what graphs do by themselves is seen."""
    found = None, 0
    monkeypatch.setattr("megatron_cg.replay.guarded_graph.verify", lambda *_args, **_named: found)


@pytest.fixture
def dense_model(one_rank: None) -> Any:
    from megatron_cg.tape.train import build
    from megatron_cg.tape.training_plan import CpuModelConfig

    return build(CpuModelConfig(layers=2, graph_modules=("attn", "mlp")))
