"""What a graph of the optimizer's step needs (``--optimizer-cuda-graph``)."""

from __future__ import annotations

from collections.abc import Iterator

from megatron_cg.arguments.rule import Rule
from megatron_cg.arguments.schema import Environment, GraphArguments, RunArguments
from megatron_cg.errors import Violation

_GRAPH = "--optimizer-cuda-graph"


def optimizer_graph(
    run: RunArguments, graph: GraphArguments, environment: Environment
) -> Iterator[Violation]:
    """Nothing that the step reads may move, change on the host, or be read there."""
    if not run.optimizer_cuda_graph:
        return
    for found, reason, remedy in _against_it(run):
        yield Violation(
            "optimizer-graph", f"{_GRAPH} with {found}", reason, f"{remedy}, or drop {_GRAPH}"
        )


def _against_it(run: RunArguments) -> Iterator[tuple[str, str, str]]:
    """What was found, why it is wrong, and what to type instead."""
    if run.megatron_fsdp_main_grads_dtype != "fp32":
        yield (
            f"--megatron-fsdp-main-grads-dtype {run.megatron_fsdp_main_grads_dtype}",
            "Megatron-FSDP then casts each gradient for the optimizer to a new place in each step, "
            "and the graph would read the places of the step it was captured in",
            "add --megatron-fsdp-main-grads-dtype fp32",
        )
    if run.optimizer != "adam" or run.optimizer_cpu_offload:
        offload = " --optimizer-cpu-offload" if run.optimizer_cpu_offload else ""
        yield (
            f"--optimizer {run.optimizer}{offload}",
            "only FusedAdam keeps its learning rate and step on the GPU; a graph of another "
            "optimizer would apply those of the step it was captured in",
            "type --optimizer adam without --optimizer-cpu-offload",
        )
    if run.weight_decay_incr_style != "constant":
        yield (
            f"--weight-decay-incr-style {run.weight_decay_incr_style}",
            "weight decay is a number on the host, and the graph would apply that of the step it "
            "was captured in",
            "type --weight-decay-incr-style constant",
        )
    if run.log_num_zeros_in_grad:
        yield (
            "--log-num-zeros-in-grad",
            "the step then reads the number of zeros on the host, which a capture cannot do",
            "drop --log-num-zeros-in-grad",
        )
    if run.fp8_param_gather:
        yield (
            "--fp8-param-gather",
            "the step then quantizes weights, and no run has shown that a replay finds their "
            "scales where they were",
            "drop --fp8-param-gather",
        )
    if not run.overlap_param_gather and run.data_parallel_sharding_strategy != "optim_grads_params":
        yield (
            f"--data-parallel-sharding-strategy {run.data_parallel_sharding_strategy} without "
            "--overlap-param-gather",
            "Megatron-FSDP then gathers all weights inside the optimizer's step, and notes in "
            "Python that they are there, which a replay does not",
            "add --overlap-param-gather",
        )
    if run.loss_scale:
        yield (
            f"--loss-scale {run.loss_scale:g}",
            "the step then reads on the host whether a gradient is infinite, which a capture "
            "cannot do",
            "drop --loss-scale",
        )
    if run.timing_log_level > 0:
        yield (
            f"--timing-log-level {run.timing_log_level}",
            "timers inside of the step then wait for the GPU, which a capture cannot do, and a "
            "replay would not run them",
            "type --timing-log-level 0",
        )


RULES: tuple[Rule, ...] = (optimizer_graph,)
