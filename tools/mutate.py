"""Change one thing of a module at a time, and see whether the tests near it notice.

``python -m tools.mutate`` takes the modules of :data:`NEAR`, makes the mutants of each
(``tools.mutations``), runs the tests named beside the module with each, and prints those that
survive as they are found. Modules take turns, and the mutants of each are in a random order with a
fixed seed: a run that is cut (Ctrl-C) has tried a sample of each.

A mutant is never on the disk. It is compiled in a process forked from one that has imported torch
and Megatron, and once more in the server that forks the processes of a test (``tools.mutant``).
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import importlib.machinery
import multiprocessing
import os
import random
import sys
import time
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tools.mutations import Mutant, mutants

ROOT = Path(__file__).resolve().parents[1]
PACKAGE, TESTS = ROOT / "megatron_cg", "tests/unit"
SEED = 20
BASELINE_SECONDS = 300.0
VARIABLE = "MEGATRON_CG_MUTANT"
"""Set for a trial's processes: the module, a colon, the mutant's number."""
_TAPE = (
    "backends/tape/test_mutants_of_memory.py backends/tape/test_contract.py "
    "backends/tape/test_replay.py "
    "backends/tape/test_fakes.py backends/tape/test_training.py backends/test_every_backend.py"
)
_OUTPUTS = "integrations/standalone/test_unused_outputs.py"
_NATIVE = (
    "backends/test_every_backend.py backends/test_native.py backends/test_native_refusals.py "
    "backends/test_native_training.py backends/test_cuda_cleanup.py"
)
_HOOKS = "hooks fsdp/test_hooks_of_real_models.py"
_REPLAY = (
    "capture/test_session.py replay/test_order_of_passes.py replay/test_verify.py "
    "replay/guard/test_faults.py"
)
NEAR: dict[str, str] = {
    "capture/accumulators.py": "capture/test_accumulators.py capture/test_session.py "
    "backends/tape/test_training.py",
    "consensus/exchange.py": "consensus/test_mutants_of_agreement.py consensus/test_agreement.py",
    "backends/cuda_cleanup.py": _NATIVE,
    "backends/driver/capture.py": f"{_OUTPUTS} {_TAPE} {_NATIVE}",
    "backends/driver/checks.py": _NATIVE,
    "backends/driver/copies.py": _NATIVE,
    "backends/driver/graphed.py": f"{_OUTPUTS} {_TAPE} {_NATIVE}",
    "backends/native/cuda_recorder.py": _NATIVE,
    "backends/native/native_backend.py": f"{_NATIVE} integrations/test_call_arguments.py",
    "backends/native/native_refusals.py": _NATIVE,
    "backends/rng_tracker.py": f"{_TAPE} {_NATIVE}",
    "backends/tape/tape_backend.py": _TAPE,
    "backends/tape/tape_recorder.py": _TAPE,
    "backends/te/te_if_loaded.py": f"{_NATIVE} backends/test_te_backend.py",
    "replay/replay_function.py": f"{_NATIVE} backends/test_te_replay.py",
    "backends/tape/tape_host.py": "backends/tape/test_contract.py backends/tape/test_training.py",
    "backends/tape/tape_memory.py": _TAPE,
    "backends/tape/tape_recording.py": f"{_TAPE} backends/tape/test_collectives.py",
    "consensus/boundary.py": "consensus/test_boundary.py consensus/test_decision.py "
    "capture/test_session.py runs/test_one_rank_failures.py",
    "capture/transaction.py": "capture/test_session.py memory/test_capture_memory.py "
    "capture/test_broken_captures.py capture/test_in_place.py "
    "capture/test_token_counts.py runs/test_some_layers.py backends/tape/test_training.py",
    "integrations/megatron/packs.py": "integrations/megatron/test_packs.py "
    "runs/test_packed_sequences.py",
    "memory/release.py": "memory/test_capture_memory.py capture/test_broken_captures.py",
    "upstream/copies.py": "upstream/test_copies.py integrations/standalone/test_copies.py",
    "replay/eager_passes.py": "replay/test_eager_passes.py replay/test_order_of_passes.py",
    "moe/peer_memory.py": "moe/test_peer_memory.py moe/test_slots.py",
    "moe/slots.py": "moe/test_slots.py",
    "fastpath/gradients/buckets.py": "fastpath/test_buckets.py fastpath/test_bucketing.py",
    "fastpath/params/gather.py": "fastpath/test_deferred_prefetch.py fastpath/test_gather.py "
    "fastpath/test_fast_path.py",
    "fastpath/gradients/bucketing.py": "fastpath/test_bucketing.py fastpath/test_fast_path.py "
    "fastpath/test_order.py",
    "fastpath/gradients/detached_weights.py": "fastpath/test_detached.py "
    "fastpath/test_fast_path.py",
    "integrations/standalone/call.py": "integrations/standalone/test_call.py "
    "integrations/standalone/test_arguments.py",
    "precompile/zero_dropout.py": "precompile/test_zero_dropout.py",
    "fastpath/params/deferred_prefetch.py": "fastpath/test_deferred_prefetch.py "
    "fastpath/test_fast_path.py",
    "fastpath/install_parts.py": "fastpath/test_parts.py "
    "fastpath/test_fast_path.py fastpath/test_unknown_bodies.py fastpath/test_pass_edges.py",
    "fastpath/params/unshard.py": "fastpath/test_parts.py "
    "fastpath/test_cached_lists.py fastpath/test_fast_path.py",
    "fastpath/gradients/views.py": "fastpath/test_views.py fastpath/test_parts.py "
    "fastpath/test_fast_path.py",
    "fastpath/optimizer/main_weights.py": "fastpath/test_main_weights.py "
    "fastpath/test_main_gradients.py fastpath/test_fast_path.py",
    "fsdp/fsdp_model.py": "fsdp/test_fsdp_model.py capture/test_session.py "
    "runs/test_some_layers.py backends/tape/test_training.py",
    "fsdp/roles.py": _HOOKS,
    "fsdp/transform.py": _HOOKS,
    "replay/guarded_graph.py": f"{_REPLAY} upstream/test_copies.py "
    "integrations/standalone/test_graphs.py runs/test_moved_buffers.py",
    "replay/in_flight.py": "replay/test_in_flight.py replay/test_order_of_passes.py",
    "replay/guard/addresses.py": "replay/guard capture/test_observer.py runs/test_moved_buffers.py",
    "replay/guard/inputs.py": "replay/guard",
    "replay/guard/mismatch.py": "replay/guard",
    "replay/depends_on.py": "replay/test_depends_on.py replay/guard capture/test_observer.py",
    "capture/guarded_capture.py": "capture/test_session.py capture/test_broken_captures.py "
    "runs/test_one_rank_failures.py replay/guard integrations/standalone/test_graphs.py "
    "fsdp/test_accumulation_fusion.py",
    "capture/observer.py": "capture/test_session.py capture/test_observer.py "
    "capture/test_in_place.py fsdp/test_accumulation_fusion.py replay/guard",
    "capture/hook_order.py": "hooks capture/test_hook_order.py",
    "hooks/snapshot.py": _HOOKS,
    "consensus/process_exit.py": "consensus/test_leaving.py runs/test_one_rank_failures.py",
    "integrations/megatron/attach.py": f"{_REPLAY} upstream/test_copies.py",
    "backends/driver/schedule.py": "backends/tape/test_contract.py "
    "consensus/test_mutants_of_pure_modules.py",
    "capture/session.py": "capture/test_session.py runs/test_life.py "
    "capture/test_broken_captures.py runs/test_one_rank_failures.py",
    "capture/static_inputs.py": "capture/test_static_inputs.py "
    "capture/test_session.py replay/guard backends/tape/test_training.py",
    "upstream/patch.py": "upstream/test_undo.py integrations/megatron/test_patches.py "
    "capture/test_session.py",
    "consensus/decision.py": "consensus/test_decision.py consensus/test_mutants_of_pure_modules.py",
    "replay/verify.py": "replay/test_verify.py",
    "replay/mismatch_policy.py": "replay/test_mismatch_policy.py test_fault_table.py",
}
"""For each module, below the package, the tests below ``tests/unit`` that are run."""


KILLED, SURVIVED, OVERDUE = "killed", "survived", "overdue"


@dataclass(frozen=True)
class Trial:
    """One run of the tests near a module, with a mutant of it or, where None, as it is.

    A mutant that takes more than ``seconds`` is overdue, which counts as killed.
    """

    name: str
    mutant: Mutant | None
    seconds: float

    @property
    def file(self) -> Path:
        """The module."""
        return (PACKAGE / self.name).resolve()

    @property
    def tests(self) -> list[str]:
        """What pytest is given."""
        return [f"{TESTS}/{test}" for test in NEAR[self.name].split()]

    def start(self) -> int:
        """The process of the trial, leader of a group of its own."""
        child = os.fork()
        if child == 0:
            try:
                os.setsid()
                os._exit(_run(self))
            finally:
                os._exit(70)
        return child


def ended(trials: Turns, jobs: int) -> Iterator[tuple[Trial, str, float]]:
    """Each trial, how it ended and after how many seconds; ``jobs`` run at once."""
    running: dict[int, tuple[Trial, float]] = {}
    while True:
        while len(running) < jobs and (trial := trials.take()) is not None:
            running[trial.start()] = trial, time.monotonic()
        if not running:
            return
        found, status = os.waitpid(-1, os.WNOHANG)
        if found:
            _kill_group(found)  # what the tests started does not outlive them
            trial, begun = running.pop(found)
            end = OVERDUE if os.WIFSIGNALED(status) else KILLED
            end = SURVIVED if status == 0 else end
            yield trial, end, time.monotonic() - begun
            continue
        for child, (trial, begun) in running.items():
            if time.monotonic() > begun + trial.seconds:
                _kill_group(child)
        time.sleep(0.05)


def _kill_group(leader: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(leader, 9)


def _run(trial: Trial) -> int:
    import pytest

    sink = os.open(os.devnull, os.O_WRONLY)
    os.dup2(sink, 1)
    os.dup2(sink, 2)
    if trial.mutant is not None:
        os.environ[VARIABLE] = f"{trial.name}:{trial.mutant.number}"
        install(trial.file, trial.mutant)

    class Servers:
        @pytest.hookimpl(trylast=True)
        def pytest_configure(self) -> None:
            multiprocessing.set_forkserver_preload(["tools.mutant"])

    words = ["-x", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", "-W", "ignore", *trial.tests]
    return int(pytest.main(words, plugins=[Servers()]))


def install(file: Path, mutant: Mutant) -> None:
    """From now on an import of ``file`` in this process gives the mutant."""
    code = compile(mutant.tree, str(file), "exec")
    loader: Any = importlib.machinery.SourceFileLoader
    original = loader.get_code

    def get_code(found: Any, name: str) -> Any:
        return code if Path(found.path).resolve() == file else original(found, name)

    loader.get_code = get_code


class Turns:
    """The trials to come: each module as it is, then, where that passes, its mutants in turn."""

    def __init__(self, names: Iterable[str]) -> None:
        self._lines: dict[str, set[int]] = {}
        for name in names:
            module, _, line = name.partition(":")
            self._lines.setdefault(module, set()).update([int(line)] if line else [])
        self._lists = deque([Trial(name, None, BASELINE_SECONDS)] for name in self._lines)

    def take(self) -> Trial | None:
        """The next trial, if there is one now."""
        if not self._lists:
            return None
        trials = self._lists.popleft()
        trial = trials.pop()
        if trials:
            self._lists.append(trials)
        return trial

    def admit(self, baseline: Trial, end: str, took: float, most: int | None) -> None:
        """The mutants of a module, or a sample, in an order that a cut run can be judged by."""
        if end != SURVIVED:
            print(f"{baseline.name}: not tried: its tests fail without any change", flush=True)
            return
        source = (PACKAGE / baseline.name).read_text(encoding="utf-8")
        seconds = 30 + 4 * took
        lines = self._lines[baseline.name]
        every = [
            Trial(baseline.name, one, seconds)
            for one in mutants(source)
            if not lines or one.line in lines
        ]
        self._lists.append(random.Random(SEED).sample(every, min(len(every), most or len(every))))


def main(words: Sequence[str] | None = None) -> int:
    """Try the mutants of the modules that are named, or of all."""
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument(
        "modules", nargs="*", help="below megatron_cg, also MODULE:LINE; none: NEAR"
    )
    parser.add_argument("--most", type=int, help="mutants of one module; more are sampled")
    parser.add_argument(
        "--jobs", type=int, default=1, help="trials that run at once; 1 if not given"
    )
    asked = parser.parse_args(words)
    os.chdir(ROOT)
    # What is imported here is shared by all; nothing of this package may be.
    import megatron.core.distributed.fsdp
    import megatron.core.models.gpt  # noqa: F401
    import pytest  # noqa: F401

    gc.collect()
    gc.freeze()
    queue = Turns(asked.modules or NEAR)
    counts: dict[str, Counter[str]] = {}
    try:
        for trial, end, took in ended(queue, asked.jobs):
            if trial.mutant is None:
                queue.admit(trial, end, took, asked.most)
                continue
            counts.setdefault(trial.name, Counter())[end] += 1
            if end == SURVIVED:
                print(f"  {trial.name}:{trial.mutant.line}: {trial.mutant.change}", flush=True)
    finally:
        for name, count in sorted(counts.items()):
            print(
                f"{name}: {count.total()} tried, {count[KILLED] + count[OVERDUE]} killed "
                f"({count[OVERDUE]} by their time), {count[SURVIVED]} survived",
                flush=True,
            )
    return 0


if __name__ == "__main__":
    sys.exit(main())
