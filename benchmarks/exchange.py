"""What the exchange of tokens costs in a graph, beside NCCL's all-to-all of the tokens alone.

    torchrun --nproc-per-node 2 -m benchmarks.exchange --out exchange.jsonl

One line for each way: GPU ms of one exchange on rank 0 (median), and what a rank sends. All ways
include the gather that sorts rows by expert, and deliver the same rows. ``nccl`` is one
``all_to_all_single`` with counts that the host knows, of the rows that are routed: what Megatron's
dispatcher does after its host read. ``slots`` is the exchange that graphs of whole MoE layers hold,
with room for any routing, or for a multiple of the average if no rank exceeds it. ``peer`` is that
of ``--cg-moe-exchange peer``. ``nvshmem`` is torch's ``all_to_all_vdev``, whose counts are on the
device, in a graph too.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megatron_cg.experts.install import largest_slot
from megatron_cg.experts.slots import Collective, PeerMemory, exchange, find_places

WARMUP, CALLS = 5, 50
BOUND = 1.25
"""As ``--cg-moe-rows``."""
MIB = 2**20


def gpu_ms(run: Callable[[], object]) -> float:
    """The median time of a call on the GPU, in ms, on this rank."""
    for _ in range(WARMUP):
        run()
    events = [torch.cuda.Event(enable_timing=True) for _ in range(CALLS + 1)]
    torch.cuda.synchronize()
    dist.barrier()
    events[0].record()
    for event in events[1:]:
        run()
        event.record()
    torch.cuda.synchronize()
    times: list[float] = [begin.elapsed_time(end) for begin, end in pairwise(events)]
    return statistics.median(times)


def captured(run: Callable[[], torch.Tensor]) -> Callable[[], torch.Tensor]:
    """A call that replays a graph of ``run``, and returns what is always in the same memory."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        run()
    torch.cuda.synchronize()
    dist.barrier()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
        result = run()

    def replay(_addressed: object = run) -> torch.Tensor:  # ``run`` holds what the graph addresses.
        graph.replay()
        return result

    return replay


def routed(args: argparse.Namespace, experts: int, seed: int) -> torch.Tensor:
    """Rows from each rank to each local expert of each rank: int64 ``[ranks, ranks, experts]``."""
    ranks = dist.get_world_size()
    drawn = torch.Generator().manual_seed(seed)
    spread = torch.randn(ranks * experts, generator=drawn) * args.skew
    counts = []
    for rank in range(ranks):
        drawn.manual_seed(seed * ranks + rank + 1)
        noise = torch.rand(args.tokens, ranks * experts, generator=drawn).log().neg().log().neg()
        chosen = (spread + noise).topk(args.topk, dim=1).indices
        counts.append(chosen.flatten().bincount(minlength=ranks * experts).view(ranks, experts))
    return torch.stack(counts)


class Tokens:
    """What this rank sends and receives, and in which order the experts get it."""

    def __init__(self, args: argparse.Namespace, counts: torch.Tensor) -> None:
        rank, self.ranks = dist.get_rank(), dist.get_world_size()
        self.sent = args.tokens * args.topk
        self.rows = torch.randn(self.sent, args.hidden, device="cuda").to(torch.bfloat16)
        self.row_bytes = args.hidden * self.rows.element_size()
        self.here, self.there = counts[rank].sum(1), counts[:, rank]
        self.worst = largest_slot(self.sent, args.topk, counts.shape[2])
        chunks = torch.arange(int(self.there.sum())).split(self.there.flatten().tolist())
        by_source = [chunks[i :: counts.shape[2]] for i in range(counts.shape[2])]
        self.order = torch.cat([chunk for expert in by_source for chunk in expert]).cuda()
        """Of each row as experts get it: its place among the rows as ranks send them."""


def by_nccl(tokens: Tokens) -> Callable[[], torch.Tensor]:
    """One collective with counts that the host knows, and the gather that sorts by expert."""
    to_each, from_each = tokens.here.tolist(), tokens.there.sum(1).tolist()
    received = tokens.rows.new_empty(sum(from_each), tokens.rows.shape[1])

    def run() -> torch.Tensor:
        dist.all_to_all_single(received, tokens.rows, from_each, to_each)
        return received.index_select(0, tokens.order)

    return run


def by_slots(tokens: Tokens, slot: int, *, peers: bool = False) -> Callable[[], torch.Tensor]:
    """What graphs of whole MoE layers hold."""
    group = dist.group.WORLD
    assert group is not None
    transport = PeerMemory(group) if peers else Collective(group)
    here = find_places(tokens.here.unsqueeze(1).cuda(), slot, tokens.sent)
    there = find_places(tokens.there.cuda(), slot, tokens.ranks * slot)
    return captured(lambda: exchange(tokens.rows, here, there, transport))


def by_nvshmem(tokens: Tokens, slot: int) -> Callable[[], torch.Tensor]:
    """Counts on the device; rows arrive without padding, in memory that all ranks can reach."""
    from torch.distributed import _symmetric_memory as symmetric

    assert dist.group.WORLD is not None
    name = dist.group.WORLD.group_name
    width, room = tokens.rows.shape[1], tokens.ranks * slot
    # NVSHMEM takes "cuda" and "cuda:0" for two devices.
    memory: Any = partial(symmetric.empty, device=tokens.rows.device)
    outbox = memory(tokens.sent, width, dtype=torch.bfloat16)
    inbox = memory(room, width, dtype=torch.bfloat16)
    splits = memory(tokens.ranks, dtype=torch.int64).copy_(tokens.here)
    found = memory(2, tokens.ranks, dtype=torch.int64)
    order = torch.zeros(room, dtype=torch.int64, device="cuda")
    order[: len(tokens.order)] = tokens.order

    def run() -> torch.Tensor:
        outbox.copy_(tokens.rows)
        torch.ops.symm_mem.all_to_all_vdev(outbox, inbox, splits, found, name)
        received: torch.Tensor = inbox.index_select(0, order)
        return received

    return captured(run)


def measure(args: argparse.Namespace, seed: int) -> list[dict[str, Any]]:
    """All ways for one routing. Raises RuntimeError if one of them delivers other rows."""
    counts = routed(args, args.experts, seed)
    tokens = Tokens(args, counts)
    average, most = tokens.sent / tokens.ranks, int(counts.sum(2).max())
    makers: dict[str, tuple[Callable[[], Callable[[], torch.Tensor]], float]] = {
        "nccl": (partial(by_nccl, tokens), tokens.sent),
        "slots": (partial(by_slots, tokens, tokens.worst), tokens.ranks * tokens.worst),
        "peer": (partial(by_slots, tokens, tokens.worst, peers=True), tokens.sent),
    }
    bound = min(int(BOUND * average), tokens.worst)
    if most <= bound:
        makers[f"slots of {BOUND}"] = partial(by_slots, tokens, bound), tokens.ranks * bound
    if args.nvshmem:
        makers["nvshmem"] = partial(by_nvshmem, tokens, tokens.worst), tokens.sent
    expected, found = None, []
    for name, (make, sent) in makers.items():
        run = make()
        rows = run()[: len(tokens.order)].clone()
        expected = rows if expected is None else expected
        if not torch.equal(rows, expected):
            raise RuntimeError(f"{name} delivers other rows than nccl")
        found.append(
            {
                "way": name,
                "gpu_ms": gpu_ms(run),
                "mib_sent": sent * tokens.row_bytes / MIB,
                "most_of_average": most / average,
            }
        )
    return found


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure in the processes of torchrun."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("exchange.jsonl"))
    parser.add_argument("--nvshmem", action="store_true", help="measure all_to_all_vdev too")
    parser.add_argument("--skew", type=float, default=0.0, help="spread of the experts' scores")
    for name, default in {"tokens": 4096, "topk": 8, "hidden": 2048, "experts": 32}.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    args = parser.parse_args(arguments)
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    device = torch.device("cuda", torch.cuda.current_device())
    if args.nvshmem:
        from torch.distributed import _symmetric_memory as symmetric

        symmetric.set_backend("NVSHMEM")
    dist.init_process_group("nccl", device_id=device)
    settings = {name: value for name, value in vars(args).items() if name not in {"out", "nvshmem"}}
    settings |= {"gpu": torch.cuda.get_device_name(), "gpus": dist.get_world_size()}
    for line in measure(args, seed=1):
        if dist.get_rank() == 0:
            print(json.dumps(settings | line), flush=True)
            with args.out.open("a") as file:
                print(json.dumps(settings | line), file=file)
    dist.barrier()
    torch.cuda.synchronize()
    os._exit(0)  # Graphs with collectives live; destroying their groups would wait for them.


if __name__ == "__main__":
    main()
