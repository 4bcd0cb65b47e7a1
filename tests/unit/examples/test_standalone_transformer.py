"""The example for loops without megatron-core, run where other packages cannot be imported."""

import os
from functools import partial

import pytest

from tests.unit.interpreted import ROOT, run

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
