"""Layers compiled once without a GPU, loaded on two, captured and replayed, bit for bit.

    python -m tests.functional.compiled_layers DIR --save
    torchrun --nproc-per-node 2 -m tests.functional.compiled_layers DIR

The second exits with 1 if anything differs on a rank from eager training.
"""

import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist

from megatron_cg.compiled.save import save
from megatron_cg.consensus.exchange import Agreement
from tests.unit.compiled.regions import REPLAYS, captured, llama


def main(folder: str, save_only: bool) -> None:
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    if save_only:
        save(llama, folder, name="llama", world_size=2)
        return
    rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(rank)
    dist.init_process_group("nccl")
    found = captured(Path(folder), "llama", llama, Agreement(), f"cuda:{rank}")
    dist.destroy_process_group()
    if found != {"compiled": [True, 0], "graphs": [True, REPLAYS]}:
        raise SystemExit(f"rank {rank}: {found}")


if __name__ == "__main__":
    main(sys.argv[1], "--save" in sys.argv)
