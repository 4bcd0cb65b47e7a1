"""A run on the CPU: real Megatron-FSDP over gloo, a tape instead of the CUDA graph.

``python -m megatron_cg.tools.align.tape_run PLAN PROCESSES DIRECTORY`` makes one; PLAN is JSON.
"""

import json
import sys
import time
from contextlib import closing
from functools import partial
from pathlib import Path

if __name__ == "__main__":
    # Where TE is, Megatron would build its layers from kernels that a CPU lacks. None makes its
    # import fail (docs.python.org, "The module cache").
    sys.modules["transformer_engine"] = None  # type: ignore[assignment]

import torch
from megatron.core import parallel_state

from megatron_cg.consensus.exchange import Agreement
from megatron_cg.extensions import allow_full_recompute
from megatron_cg.replay.mismatch_policy import ReplayPolicy
from megatron_cg.tape import launch
from megatron_cg.tape.tape_backend import TapeBackend
from megatron_cg.tape.train import Trainer
from megatron_cg.tape.training_plan import CpuModelConfig, TrainingPlan
from megatron_cg.telemetry import record_to
from megatron_cg.tools.align.run import VERIFY_STEPS
from megatron_cg.tools.record.record import Recorder
from megatron_cg.upstream.patch import undone_after


def train(plan: TrainingPlan, directory: Path) -> None:
    """Run ``plan`` in this process and write its record to ``directory/rank<N>.jsonl``.

    The record's file is written also when training fails, with the error's name and text.
    """
    recorder = Recorder(directory)
    recorder.begin()
    try:
        full = plan.model.options.get("recompute_granularity") == "full"
        with (
            undone_after(allow_full_recompute() if full else lambda: None),
            undone_after(record_to(recorder)),
            closing(Trainer(plan)) as trainer,
        ):
            for number in range(plan.steps):
                if plan.graphs and number == plan.warmup_steps:
                    policy = ReplayPolicy(verify_steps=VERIFY_STEPS)
                    trainer.capture(TapeBackend(), Agreement(), policy=policy)
                start = time.perf_counter()
                loss, norm = trainer.step()
                losses = {"lm loss": torch.tensor(loss, dtype=torch.float64)}
                recorder.add_step(losses, norm, False, start)
            if trainer.session is not None:
                recorder.note("graphs", trainer.session.counters.as_dict())
            recorder.finish([trainer.model])
    except BaseException as error:
        recorder.fail(error)
        raise
    finally:
        parallel_state.destroy_model_parallel()


def main(text: str, processes: str, directory: str) -> None:
    """Train in processes that are connected by gloo; each writes its record.

    The processes are forked from this one, which has imported Megatron for all of them. That saves
    5 s of CPU time per process. An import starts no thread of torch or gloo.
    """
    fields = json.loads(text)
    plan = TrainingPlan(CpuModelConfig(**fields.pop("model")), **fields)
    launch.START = "fork"
    launch.run_processes(partial(train, plan, Path(directory)), int(processes))


if __name__ == "__main__":
    main(*sys.argv[1:])
