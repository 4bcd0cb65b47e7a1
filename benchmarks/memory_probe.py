"""Where a run's memory goes, stage by stage; run by the launcher instead of the script.

With two GPUs, an eager run and one with graphs, and their table:

    megatron-cg align --preset qwen3-moe --scopes attn moe_router moe_preprocess --steps 12 \
        --script benchmarks/memory_probe.py --work-dir memory \
        -- --expert-model-parallel-size 2 --global-batch-size 4 --manual-gc
    python -m benchmarks.memory_probe compare memory

The record also gets what the capture took, so that a plan of the same flags can be checked:

    megatron-cg plan qwen3-moe --scopes ... --json -- ... > plan.json
    python -m benchmarks.memory_probe plan plan.json memory

A stage is what lies between two points, and its peak is its own. Before capture come eager steps;
in each step the gradients' cast divides forward and backward passes from the optimizer. Without a
GPU only memory that Python's tensors hold can be counted, and no peak.

Relied on, of this package: ``Session.capturing`` and ``capture``, ``Recorder.add_step`` and
``finish``; of megatron-core 0.19.2: ``MegatronFSDP.finish_grad_sync``, which casts gradients after
the last backward pass of a step; of TE 2.20.2: ``pre_warmup_hook`` and ``post_warmup_hook``.
"""

from __future__ import annotations

import gc
import json
import os
import runpy
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial, wraps
from pathlib import Path
from typing import Any

import torch

from benchmarks.graph_memory import KEY as GRAPH_MEMORY
from benchmarks.graph_memory import check, measured_capture
from megatron_cg.backends.te.te_backend import TransformerEngineBackend
from megatron_cg.capture.session import Session
from megatron_cg.errors import MegatronCGError
from megatron_cg.memory.usage import report
from megatron_cg.telemetry.record import Recorder, note
from megatron_cg.telemetry.record_schema import read_run
from megatron_cg.tools.align.run import example_script
from megatron_cg.upstream.patch import put_over
from megatron_cg.upstream.symbols import lookup

KEY = "memory"
"""Under which a record holds ``{"stages": [...], "holders": {...}}``.

A stage has ``name``, ``step`` (steps that were over when it ended), ``allocated`` and ``reserved``
when it ended, ``peak_allocated`` and ``peak_reserved`` in it; bytes, and None for what cannot be
known. Holders are reports of ``megatron_cg.memory.usage`` by stage, of the run with graphs.
"""

PASSES, CAST, OPTIMIZER = "forward and backward", "gradients cast", "optimizer"
BEFORE, SAMPLES = "before capture", "capture: samples"
WARMUP, GRAPHS = "capture: warmup", "capture: graphs"
CAPTURE = (SAMPLES, WARMUP, GRAPHS)
_MEASURES = ("allocated", "reserved", "peak_allocated", "peak_reserved")


@contextmanager
def probing() -> Iterator[None]:
    """Measure in the block; every record that is finished in it gets what was measured."""
    probe = _Probe()
    fsdp = lookup(
        "megatron-core",
        "megatron.core.distributed.fsdp.src.megatron_fsdp.megatron_fsdp:MegatronFSDP",
        "the model's wrapper",
    )
    with ExitStack() as undo:
        for owner, name, wrap in (
            (Session, "capturing", probe.of_a_capture),
            (Session, "capture", probe.of_the_warmup),
            (TransformerEngineBackend, "capture", probe.of_the_graphs),
            (fsdp, "finish_grad_sync", probe.of_the_cast),
            (Recorder, "add_step", probe.of_a_step),
            (Recorder, "finish", probe.of_the_end),
        ):
            undo.callback(put_over(owner, name, wrap(getattr(owner, name))))
        yield


class _Probe:
    def __init__(self) -> None:
        self._stages: list[dict[str, Any]] = []
        self._holders: dict[str, Any] = {}
        self._steps = 0
        self._session: Session | None = None

    def end(self, name: str) -> None:
        """Note the stage that ends here, and begin another."""
        values = _on_gpu() if torch.cuda.is_available() else _on_cpu()
        row: dict[str, Any] = {"name": name, "step": self._steps}
        self._stages.append(row | dict(zip(_MEASURES, values, strict=True)))

    def of_a_capture(self, old: Callable[..., AbstractContextManager[None]]) -> Any:
        @contextmanager
        @wraps(old)
        def capturing(session: Session) -> Iterator[None]:
            self.end(BEFORE)
            with old(session):
                yield
            self.end(GRAPHS)
            self._session = session
            self._hold(GRAPHS)

        return capturing

    def of_the_graphs(self, old: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(old)
        def capture(backend: Any, layers: Sequence[Any], args: Any, **options: Any) -> Any:
            if not torch.cuda.is_available():
                return old(backend, layers, args, **options)
            graphs, metrics = measured_capture(partial(old, backend), layers, args, **options)
            note(GRAPH_MEMORY, metrics)
            return graphs

        return capture

    def of_the_warmup(self, old: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(old)
        def capture(session: Session, *args: Any, **options: Any) -> Any:
            stages = {"pre_warmup_hook": SAMPLES, "post_warmup_hook": WARMUP}
            for hook, name in stages.items():
                options[hook] = self._ending(name, options.get(hook))
            return old(session, *args, **options)

        return capture

    def of_the_cast(self, old: Callable[..., None]) -> Callable[..., None]:
        @wraps(old)
        def finish_grad_sync(fsdp: Any, *args: Any, **kwargs: Any) -> None:
            self.end(PASSES)
            old(fsdp, *args, **kwargs)
            self.end(CAST)
            if self._session is not None and CAST not in self._holders:
                self._hold(CAST)

        return finish_grad_sync

    def of_a_step(self, old: Callable[..., None]) -> Callable[..., None]:
        @wraps(old)
        def add_step(recorder: Recorder, *args: Any, **kwargs: Any) -> None:
            self._steps += 1
            self.end(OPTIMIZER)
            old(recorder, *args, **kwargs)

        return add_step

    def of_the_end(self, old: Callable[..., None]) -> Callable[..., None]:
        @wraps(old)
        def finish(recorder: Recorder, model: list[Any]) -> None:
            recorder.note(KEY, {"stages": self._stages, "holders": self._holders})
            old(recorder, model)
            # The allocator's own peak began anew with each stage.
            for name in ("peak_allocated", "peak_reserved"):
                peaks = [row[name] for row in self._stages if row[name] is not None]
                if peaks:
                    recorder.note(f"{name}_bytes", max(peaks))

        return finish

    def _ending(self, name: str, hook: Callable[[], None] | None) -> Callable[[], None]:
        def end() -> None:
            if hook is not None:
                hook()
            self.end(name)

        return end

    def _hold(self, name: str) -> None:
        assert self._session is not None
        made = report(self._session)
        self._holders[name] = made.as_dict()
        if int(os.environ.get("RANK", "0")) == 0:
            print(f"memory after {name}:\n{made.text()}", flush=True)


def _on_gpu() -> tuple[int | None, ...]:
    torch.cuda.synchronize()
    values = (
        torch.cuda.memory_allocated(),
        torch.cuda.memory_reserved(),
        torch.cuda.max_memory_allocated(),
        torch.cuda.max_memory_reserved(),
    )
    torch.cuda.reset_peak_memory_stats()
    return values


def _on_cpu() -> tuple[int | None, ...]:
    storages = {
        found.untyped_storage()._cdata: found.untyped_storage().nbytes()
        for found in gc.get_objects()
        if type(found) in (torch.Tensor, torch.nn.Parameter)
    }
    return (sum(storages.values()), None, None, None)


def peaks(record: Mapping[str, Any], settle: int = 1) -> dict[str, tuple[int, int]]:
    """Highest (allocated, reserved) by stage. Pure.

    Args:
        record: one rank's, from a run under this probe on a GPU.
        settle: steps at the run's beginning and after its capture that are not counted: the first
            makes the optimizer's states, and buffers that stay.
    """
    stages = record[KEY]["stages"]
    captured = next((row["step"] for row in stages if row["name"] == GRAPHS), 0)
    found: dict[str, tuple[int, int]] = {}
    for row in stages:
        over = row["step"] - (1 if row["name"] == OPTIMIZER else 0)
        in_step = row["name"] in (PASSES, CAST, OPTIMIZER)
        if row["peak_allocated"] is None or (in_step and over < captured + settle):
            continue
        allocated, reserved = found.get(row["name"], (0, 0))
        here = (row["peak_allocated"], row["peak_reserved"])
        found[row["name"]] = (max(allocated, here[0]), max(reserved, here[1]))
    return found


def comparison(eager: Mapping[str, Any], graphed: Mapping[str, Any]) -> str:
    """A table of one rank's two records: each stage in MiB, and its ratio to eager's peak. Pure."""
    without, with_graphs = peaks(eager), peaks(graphed)
    if not without or not with_graphs:
        return "These runs had no GPU, whose allocator alone knows peaks."
    top = [max(peak[index] for peak in without.values()) for index in (0, 1)]
    lines = [f"{'stage':<24}{'eager':>20}{'graphs':>20}{'/ eager peak':>18}   allocated, reserved"]
    for name in (PASSES, CAST, OPTIMIZER, BEFORE, *CAPTURE):
        if name in with_graphs:
            ratios = [with_graphs[name][index] / top[index] for index in (0, 1)]
            both = [_mib(found.get(name)) for found in (without, with_graphs)]
            shown = f"{ratios[0]:.3f}, {ratios[1]:.3f}"
            lines.append(f"{name:<24}{both[0]:>20}{both[1]:>20}{shown:>18}")
    return "\n".join(lines)


def _mib(peak: tuple[int, int] | None) -> str:
    return ", ".join(f"{value / 2**20:,.0f}" for value in peak) if peak else "-"


def main(argv: Sequence[str] | None = None) -> None:
    """Run the example under the probe, or show what alignments found; see the module."""
    words = list(sys.argv[1:] if argv is None else argv)
    try:
        if _read(words):
            return
    except (MegatronCGError, OSError, ValueError) as error:
        sys.exit(f"memory_probe: {error}")
    with probing():
        runpy.run_path(str(example_script()), run_name="__main__")


def _read(words: Sequence[str]) -> bool:
    """Print what was asked for of earlier runs; False if ``words`` are those of a run."""
    if words[:1] == ["compare"] and len(words) == 2:
        eager, graphed = (
            read_run(Path(words[1]) / name / "record") for name in ("eager", "graphs")
        )
        for rank in sorted(graphed):
            print(f"rank {rank}\n{comparison(eager[rank], graphed[rank])}")
        return True
    if words[:1] == ["plan"] and len(words) == 3:
        plan = json.loads(Path(words[1]).read_text(encoding="utf-8"))
        for rank, record in sorted(read_run(Path(words[2]) / "graphs" / "record").items()):
            print(f"rank {rank}\n{check(plan, record)}")
        return True
    return False


if __name__ == "__main__":
    main()
