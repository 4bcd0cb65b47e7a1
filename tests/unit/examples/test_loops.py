"""The examples of loops: on megatron-core's Python API, of one's own, and transformers' Trainer.

The second is run where other packages cannot be imported, the third is started by torchrun as for
users. ``make test`` installs transformers into a folder beside site-packages.
"""

import importlib.util
import os
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import megatron_cg
from megatron_cg.arguments.schema import GraphArguments
from megatron_cg.capture.session import open_sessions
from megatron_cg.errors import ConfigurationError, HookError
from megatron_cg.tape.training_plan import CpuModelConfig
from megatron_cg.upstream.symbols import installed_version
from tests.unit.interpreted import ROOT, run

SCRIPT = Path(__file__).resolve().parents[3] / "examples" / "python_api.py"


@pytest.fixture
def example(one_rank: None) -> Iterator[Any]:
    """The script as a module, and Megatron's globals as they were."""
    if installed_version("transformer-engine") is not None:
        pytest.skip("Megatron's optimizer takes TE's kernels where TE is, and they need a GPU")
    from megatron.core import num_microbatches_calculator as calculator

    spec = importlib.util.spec_from_file_location("python_api", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    yield module
    calculator.unset_num_microbatches_calculator()


def train(example: Any, *words: str) -> None:
    from megatron.core import num_microbatches_calculator as calculator
    from megatron.core import parallel_state

    parallel_state.destroy_model_parallel()
    calculator.unset_num_microbatches_calculator()
    sys.argv[1:] = words
    example.train()


def test_it_has_the_same_losses_with_and_without_graphs(
    example: Any, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", [str(SCRIPT)])
    assert len(SCRIPT.read_text().splitlines()) < 100
    train(example, "--eager")
    eager = capsys.readouterr().out
    train(example)
    megatron_cg.disable()
    graphed = capsys.readouterr().out
    steps = [line for line in graphed.splitlines() if line.startswith("step ")]
    assert len(steps) == example.STEPS and steps == eager.splitlines()
    assert "4 captured, 40 replayed, 0 eager, 0 mismatched" in graphed
    assert open_sessions() == 0


@pytest.fixture
def model(one_rank: None) -> Any:
    from megatron_cg.tape.train import build

    return build(CpuModelConfig(layers=1, fsdp_options={"fsdp_double_buffer": False}))


def test_a_model_that_cannot_be_graphed_is_refused_for_every_reason(model: Any) -> None:
    from megatron_cg.integrations.megatron.helper import check_model

    model.config.gradient_accumulation_fusion = True
    with pytest.raises(ConfigurationError) as error:
        check_model(model, None, GraphArguments(), "tape")
    found = [violation.rule for violation in error.value.violations]
    assert found == ["double-buffer", "gradient-accumulation-fusion"]
    model.config.cuda_graph_impl = "none"
    with pytest.raises(HookError, match="cuda_graph_impl of the model's config is none"):
        check_model(model, None, GraphArguments(), "tape")
    with pytest.raises(HookError, match="Linear is not under Megatron-FSDP"):
        check_model(torch.nn.Linear(1, 1), None, GraphArguments(), "tape")


BLOCKER = """
import sys

class Blocker:
    names = {"megatron", "megatron_fsdp"}

    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in self.names:
            raise ModuleNotFoundError(f"blocked: {name}", name=name)

sys.meta_path.insert(0, Blocker())
"""
"""Python runs it as it starts, in the processes that the example starts too."""
EXAMPLE = str(ROOT / "examples" / "standalone_transformer.py")
FLAGS = "--compare --steps 4 --warmup 2 --layers 2 --hidden 16 --sequence 8 --sharding"
FORKED = """
import runpy, sitecustomize, sys
import torch._dynamo, torch.distributed.fsdp
from megatron_cg.tape import launch

launch.START = "fork"
example, *flags = sys.argv[1:]
for sharding in flags.pop().split(","):
    if sharding.startswith("megatron-fsdp"):
        sitecustomize.Blocker.names.discard("megatron_fsdp")
    print("\\nwith", sharding, flush=True)
    runpy.run_path(example)["main"]([*flags, sharding])
"""
"""The example with each sharding, whose processes need not import everything anew.

``megatron_fsdp`` is blocked until the first sharding that is made of it.
"""
TOGETHER = ("ddp", "megatron-fsdp", "megatron-fsdp-v2")
AS_A_USER = "fsdp2"
"""This one is started by its own command, which starts the processes as for users."""


@pytest.fixture(scope="module")
def printed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """What the example printed with each sharding, or how it failed."""
    folder = tmp_path_factory.mktemp("blocked")
    (folder / "sitecustomize.py").write_text(BLOCKER)
    blocked = partial(run, PYTHONPATH=os.pathsep.join([str(folder), str(ROOT)]))
    ended = blocked("-c", FORKED, EXAMPLE, *FLAGS.split(), ",".join(TOGETHER))
    found = dict.fromkeys(TOGETHER, ended.stderr)
    for part in ended.stdout.split("\nwith ")[1:]:
        name, _, text = part.partition("\n")
        found[name] = text + (ended.stderr if ended.returncode else "")
    ended = blocked(EXAMPLE, *FLAGS.split(), AS_A_USER)
    found[AS_A_USER] = ended.stdout if ended.returncode == 0 else ended.stderr
    return found


@pytest.mark.parametrize("sharding", [*TOGETHER, AS_A_USER])
def test_it_trains_the_same_numbers_without_megatron_core(
    printed: dict[str, str], sharding: str
) -> None:
    if sharding.startswith("megatron-fsdp"):
        pytest.importorskip("megatron_fsdp")
    text = printed[sharding]
    assert "losses of 4 steps and all parameter shards: bitwise equal" in text, text
    # 2 graphs; 2 layers x 2 steps x 2 microbatches.
    assert "'captured': 2, 'replayed': 8, 'eager': 0, 'mismatched': 0" in text


TRAINER = str(ROOT / "examples" / "transformers_trainer.py")
CASES = {
    "": "FSDPLlamaForCausalLM",
    "--sharding ddp --checkpointing": "DistributedDataParallel",
    "--model qwen3_moe": "FSDPQwen3MoeForCausalLM",
    "--model qwen3_moe --sharding ddp": "DistributedDataParallel",
}
"""The flags of each run, and the class of the model that Trainer has made."""
RUNS = """
import runpy, sys
import torch
from accelerate.state import AcceleratorState
from megatron_cg import ConfigurationError, graph_units

path, *cases = sys.argv[1:]
example = runpy.run_path(path)
for case in cases:
    AcceleratorState._reset_state(True)  # as in a process of its own
    print("==", case, flush=True)
    example["main"]([*case.split(), "--compare", "--steps", "4", "--warmup", "1"])

config = example["transformers"].LlamaConfig(**example["CONFIGS"]["llama"])
model = example["transformers"].LlamaForCausalLM(config)
tokens = torch.zeros(1, 4, dtype=torch.int64)
print("== a cache")
try:
    with graph_units(model, "model.layers.*", backend="tape", warmup_steps=1) as graphs:
        for _ in range(2):
            with graphs.step():
                model(tokens, labels=tokens).loss.backward()
except ConfigurationError as error:
    print(error, flush=True)

print("== recorded outputs")
config._attn_implementation = "eager"
model = example["transformers"].LlamaForCausalLM(config)
with graph_units(model, "model.layers.*", backend="tape", warmup_steps=1) as graphs:
    for step in range(6):
        asked = {"output_attentions": step == 5, "use_cache": False}
        if step == 3:
            model(tokens, output_attentions=True)
        with graphs.step():
            model(tokens, labels=tokens, **asked).loss.backward()
    print(dict(graphs.counters), flush=True)
torch.distributed.barrier()  # The other rank may not have made its group yet.
torch.distributed.destroy_process_group()
"""
"""All runs in the processes of one torchrun: to start them takes longer than to train."""


@pytest.fixture(scope="module")
def by_trainer() -> dict[str, str]:
    """What rank 0 by_trainer in each run, and of a model that is called with its cache."""
    folders = [str(ROOT), str(Path(sys.prefix, "transformers")), os.environ.get("PYTHONPATH", "")]
    words = ["--standalone", "--nproc-per-node", "2", "--local-ranks-filter", "0"]
    words += ["--no-python", sys.executable]
    words = ["-m", "torch.distributed.run", *words, "-c", RUNS, TRAINER, *CASES]
    ended = run(*words, PYTHONPATH=os.pathsep.join(folders))
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return dict(part.split("\n", 1) for part in ended.stdout.split("== ")[1:])


@pytest.mark.parametrize("case", CASES)
def test_it_trains_the_same_numbers(by_trainer: dict[str, str], case: str) -> None:
    """With 2 layers and 2 microbatches; there is a checkpoint and an evaluation after step 2."""
    assert "losses, gradient norms and weights: bitwise equal" in by_trainer[case]
    counters = "{'captured': 2, 'replayed': 12, 'eager': 4, 'mismatched': 0, "
    assert f"{CASES[case]}: {counters}" in by_trainer[case]


def test_a_cache_is_refused_in_one_sentence(by_trainer: dict[str, str]) -> None:
    named = "each of the units model.layers.0, model.layers.1"
    assert f"1 reason:\n  1. [unit-arguments] {named}: argument" in by_trainer["a cache"]
    assert "call the model with use_cache=False" in by_trainer["a cache"]


def test_hooks_of_transformers_that_record_nothing_do_not_matter(
    by_trainer: dict[str, str],
) -> None:
    """One call before step 3 has put them there; it and step 5 need them."""
    counts = "'captured': 2, 'replayed': 8, 'eager': 4, 'mismatched': 4,"
    assert counts in by_trainer["recorded outputs"]
