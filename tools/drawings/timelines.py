"""The timelines: one layer eagerly, in capture and replayed, and the life of a run.

Hooks by what they do: ``unshard`` is ``_pre_forward_param_unshard`` or, before the backward pass,
``_pre_backward_param_unshard``; ``reshard`` is ``_post_forward``, and after the backward pass
``_post_backward_release_module`` (megatron-fsdp 0.6.1, ``_register_fsdp_hooks``).
"""

from __future__ import annotations

from tools.drawings.svg import Drawing
from tools.drawings.timeline import Phase, Span, Wait, timeline

_HOST, _COMPUTE, _GATHER, _REDUCE = "host (Python)", "compute stream", "gather stream", "reduce"
_FORWARD, _BACKWARD = Phase(2, 48, "forward of layer i"), Phase(52, 98, "backward of layer i")


def _kernels(start: float, end: float) -> list[Span]:
    """Kernels with the gaps between them in which the GPU waits for the next launch."""
    count = int((end - start) // 4)
    return [
        Span(_COMPUTE, start + 4 * number, start + 4 * number + 2.4, "", "gpu")
        for number in range(count)
    ]


def eager() -> Drawing:
    """One layer under Megatron-FSDP without graphs."""
    return timeline(
        "Eager: Python launches every kernel of the layer",
        (_HOST, _COMPUTE, _GATHER, _REDUCE),
        (_FORWARD, _BACKWARD),
        (
            Span(_HOST, 2, 12, "hook:\nunshard i", "hook"),
            Span(_HOST, 12, 39, "forward: Python,\na launch for each kernel", "host"),
            Span(_HOST, 39, 48, "hook:\nreshard i", "hook"),
            Span(_HOST, 52, 62, "handler:\nunshard i", "hook"),
            Span(_HOST, 62, 87, "backward: launches,\na hook for each parameter", "host"),
            Span(_HOST, 87, 98, "handler:\nreduce i", "hook"),
            *_kernels(15, 43),
            *_kernels(65, 93),
            Span(_GATHER, 2, 13, "gather i", "gather"),
            Span(_GATHER, 16, 34, "prefetch i+1", "gather"),
            Span(_GATHER, 52, 63, "gather i", "gather"),
            Span(_GATHER, 66, 84, "prefetch i-1", "gather"),
            Span(_REDUCE, 91.5, 98, "scatter", "reduce"),
        ),
        waits=(
            Wait(_GATHER, 13.5, _COMPUTE),
            Wait(_GATHER, 63.5, _COMPUTE),
            Wait(_COMPUTE, 92, _REDUCE),
        ),
        notes=(
            "Not to scale. Gaps on the compute stream are time in which the GPU waits for the host "
            "to launch.",
        ),
    )


def capture() -> Drawing:
    """One layer while Transformer Engine captures it."""
    te, stream, off = "Transformer\nEngine, on the host", "capture stream", "on the layers"
    return timeline(
        "Capture: hooks run outside of the recording, each in the phase it was written for",
        (te, stream, _GATHER, off),
        (
            Phase(2, 28, "three warmups"),
            Phase(31, 63, "forward is captured"),
            Phase(66, 98, "backward is captured"),
        ),
        (
            Span(te, 2, 28, "the same, and\nnothing is recorded", "host"),
            Span(te, 31, 41, "forward_\npre_hooks", "hook"),
            Span(te, 41, 53, "forward,\nonce", "host"),
            Span(te, 53, 63, "forward_\nhooks", "hook"),
            Span(te, 66, 76, "backward_\npre_hooks", "hook"),
            Span(te, 76, 88, "backward,\nonce", "host"),
            Span(te, 88, 98, "backward_\nhooks", "hook"),
            *(Span(stream, 4 + 4 * n, 6.4 + 4 * n, "", "gpu") for n in range(6)),
            Span(stream, 41, 53, "recorded,\nnot run", "graph"),
            Span(stream, 76, 88, "recorded,\nnot run", "graph"),
            Span(_GATHER, 31, 40, "gather i", "gather"),
            Span(_GATHER, 66, 75, "gather i", "gather"),
            Span(
                off,
                2,
                98,
                "taken off and put back afterwards: the layers' hooks, the parameters' hooks;\n"
                "put back too: RNG, FP8 state, gradients, buffers, the stream",
                "note",
            ),
        ),
        notes=(
            "The two wrappers among FSDP's hooks are withheld from TE; it is given the handlers "
            "inside them.",
        ),
    )


def replay() -> Drawing:
    """One layer with its graph instead of forward."""
    return timeline(
        "Replay: the same hooks around one launch",
        (_HOST, _COMPUTE, _GATHER, _REDUCE),
        (_FORWARD, _BACKWARD),
        (
            Span(_HOST, 2, 12, "hook:\nunshard i", "hook"),
            Span(_HOST, 12, 19, "guard", "guard"),
            Span(_HOST, 19, 29, "copy in,\nlaunch", "host"),
            Span(_HOST, 29, 39, "hook:\nreshard i", "hook"),
            Span(_HOST, 52, 62, "handler:\nunshard i", "hook"),
            Span(_HOST, 62, 69, "guard", "guard"),
            Span(_HOST, 69, 76, "launch", "host"),
            Span(_HOST, 76, 87, "gradients\nto buckets", "host"),
            Span(_HOST, 87, 98, "handler:\nreduce i", "hook"),
            Span(_COMPUTE, 21, 42, "forward graph,\nkernels without gaps", "graph"),
            Span(_COMPUTE, 71, 90, "backward graph", "graph"),
            Span(_GATHER, 2, 13, "gather i", "gather"),
            Span(_GATHER, 16, 34, "prefetch i+1", "gather"),
            Span(_GATHER, 52, 63, "gather i", "gather"),
            Span(_GATHER, 66, 84, "prefetch i-1", "gather"),
            Span(_REDUCE, 90.5, 98, "scatter", "reduce"),
        ),
        waits=(
            Wait(_GATHER, 13.5, _COMPUTE),
            Wait(_GATHER, 63.5, _COMPUTE),
            Wait(_COMPUTE, 91, _REDUCE),
        ),
        notes=(
            "Not to scale. The guard compares addresses, inputs, modes and hooks with what they "
            "were at capture.",
        ),
    )


def run() -> Drawing:
    """The life of a run, from warmup steps to the end."""
    steps, votes = "training", "all ranks"
    return timeline(
        "A run: eager steps, one capture, replays, and graphs released before process groups",
        (steps, votes),
        (
            Phase(2, 30, "--cuda-graph-warmup-steps 3"),
            Phase(32, 46, "between two steps"),
            Phase(48, 80, "graphs"),
            Phase(82, 98, "end, in any way"),
        ),
        (
            *(Span(steps, 2 + 9.5 * n, 11 + 9.5 * n, f"step {n + 1}", "host") for n in range(3)),
            Span(steps, 32, 46, "capture", "graph"),
            Span(steps, 48, 57, "step 4", "graph"),
            Span(steps, 57.5, 68.5, "evaluation:\neager", "host"),
            Span(steps, 69, 80, "step 5 …", "graph"),
            Span(steps, 82, 90, "graphs\nreset", "hook"),
            Span(steps, 90.5, 98, "groups\ngo", "note"),
            Span(votes, 29, 37, "can all?", "guard"),
            Span(votes, 41, 50, "all whole?", "guard"),
            Span(votes, 55, 80, "after each step: keep,\ncapture again, or give up", "guard"),
        ),
    )
