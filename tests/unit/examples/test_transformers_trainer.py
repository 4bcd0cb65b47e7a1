"""The example for transformers' Trainer, started by torchrun as for users.

``make test`` installs transformers into a folder beside site-packages.
"""

import os
import sys
from pathlib import Path

import pytest

from tests.unit.interpreted import ROOT, run

EXAMPLE = str(ROOT / "examples" / "transformers_trainer.py")
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
def printed() -> dict[str, str]:
    """What rank 0 printed in each run, and of a model that is called with its cache."""
    folders = [str(ROOT), str(Path(sys.prefix, "transformers")), os.environ.get("PYTHONPATH", "")]
    words = ["--standalone", "--nproc-per-node", "2", "--local-ranks-filter", "0"]
    words += ["--no-python", sys.executable]
    words = ["-m", "torch.distributed.run", *words, "-c", RUNS, EXAMPLE, *CASES]
    ended = run(*words, PYTHONPATH=os.pathsep.join(folders))
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return dict(part.split("\n", 1) for part in ended.stdout.split("== ")[1:])


@pytest.mark.parametrize("case", CASES)
def test_it_trains_the_same_numbers(printed: dict[str, str], case: str) -> None:
    """With 2 layers and 2 microbatches; there is a checkpoint and an evaluation after step 2."""
    assert "losses, gradient norms and weights: bitwise equal" in printed[case]
    counters = "{'captured': 2, 'replayed': 12, 'eager': 4, 'mismatched': 0, "
    assert f"{CASES[case]}: {counters}" in printed[case]


def test_a_cache_is_refused_in_one_sentence(printed: dict[str, str]) -> None:
    named = "each of the units model.layers.0, model.layers.1"
    found = f"{named} gets a Cache of transformers as cache:"
    assert f"1 reason:\n  1. [unit-cache] {found}" in printed["a cache"]
    assert "call the model with use_cache=False" in printed["a cache"]


def test_hooks_of_transformers_that_record_nothing_do_not_matter(printed: dict[str, str]) -> None:
    """One call before step 3 has put them there; it and step 5 need them."""
    counts = "'captured': 2, 'replayed': 8, 'eager': 4, 'mismatched': 4,"
    assert counts in printed["recorded outputs"]
