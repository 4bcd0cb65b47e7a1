"""Places that order something, and why no run of these tests shows that they are needed.

They are listed by file and text of the call, so an excuse does not depend on line numbers.
"""

from __future__ import annotations

Reasons = dict[str, dict[tuple[str, ...], str]]
_OWN: Reasons = {
    "megatron_cg/consensus/exchange.py": {
        ("work.wait(*(() if timeout is None else (timeout,)))",): (
            "the host waits for a vote, in a gloo group on CPU tensors"
        )
    },
    "megatron_cg/consensus/arrival.py": {
        ("store.wait(list(keys.values()), arrival)", "store.wait([met], arrival)"): (
            "the host waits for other ranks, in the store of the default group"
        )
    },
    "megatron_cg/tools/align/processes.py": {
        (
            "self.process.wait(max(0.0, self._deadline - time.monotonic()))",
            "self.process.wait(_STOP_SECONDS)",
            "self.process.wait()",
            "run.wait()",
        ): "the host waits for a process",
        ("run.record", "runs[0].record", "runs[-1].record"): "where a run's record is",
    },
    "megatron_cg/telemetry/record_shards.py": {
        ("torch.cuda.synchronize()",): "at the end of a run, before shards are copied to the host"
    },
    "megatron_cg/backends/driver/capture.py": {
        ("run.record(recorder)",): "it records tapes or graphs"
    },
    "megatron_cg/backends/native/cuda_recorder.py": {
        ("torch.cuda.synchronize()",): "around the warmup of a capture; no step is under way"
    },
    "megatron_cg/backends/cuda_cleanup.py": {
        ("torch.cuda.synchronize()",): "after the warmup of a capture; no step is under way"
    },
    "megatron_cg/backends/base.py": {
        ("torch.cuda.synchronize()",): "graphs are not destroyed while they run; no step follows"
    },
    "megatron_cg/fsdp/megatron_fsdp_v2.py": {
        ("context.current_stream().wait_stream(context.allgather_stream)",): (
            "between two steps, as graphs of Megatron-FSDP v2 begin or end; the traces have v1"
        )
    },
    "megatron_cg/backends/tape/tape_recording.py": {
        ("value.wait()",): "of the tape; no GPU has it"
    },
    "megatron_cg/capture/session.py": {
        ("self._backend.synchronize()", "self._backend.synchronize"): (
            "graphs are not destroyed while they run; no step follows"
        )
    },
    "megatron_cg/integrations/megatron/teardown.py": {
        ("stream.record_event()",): "at the end, whether the device comes to rest; nothing follows"
    },
    "megatron_cg/moe/peer_memory.py": {
        ("torch.cuda.synchronize()",): (
            "before memory is freed, as a capture or its graphs end; no step is under way"
        )
    },
    "megatron_cg/moe/row_bound.py": {
        ("self._shared.record()", "self._shared.synchronize()"): (
            "the host waits for a copy to pinned memory, and then reads that memory; a trace has "
            "what kernels read"
        )
    },
    "megatron_cg/moe/dispatcher.py": {
        ("shared.wait_current_stream()",): (
            "the traces have no shared experts; test_dispatcher.py has the order of their stages"
        )
    },
    "megatron_cg/moe/shared_expert.py": {
        ("torch.cuda.current_stream().wait_stream(shared.stream)",): (
            "a capture ends only after its streams have joined; the traces have no shared experts"
        )
    },
    "megatron_cg/tools/bench/bench_command.py": {("run.wait()",): "the host waits for a process"},
}
_BUFFERS = "megatron/core/distributed/fsdp/src/megatron_fsdp/param_and_grad_buffer.py"
_UPSTREAM: Reasons = {
    _BUFFERS: {
        ("torch.cuda.synchronize()",): (
            "as a model is built, or as a buffer of NCCL's user memory is made"
        ),
        ("reduce_scatter_view_out_event.wait()",): (
            "of reductions that are not asynchronous, which no run uses"
        ),
    }
}


def _by_place(reasons: Reasons) -> dict[tuple[str, str], str]:
    return {
        (file, text): why
        for file, calls in reasons.items()
        for texts, why in calls.items()
        for text in texts
    }


OWN, UPSTREAM = _by_place(_OWN), _by_place(_UPSTREAM)
"""Reasons by file and text of the call: of this package, and of Megatron-FSDP."""
#: ``op.wait()`` stands three times in Megatron-FSDP; one of them is seen.
UPSTREAM_PARTLY = {
    (_BUFFERS, "op.wait()"): "gathers that no run uses, and reductions that do not overlap"
}
