"""A model's Megatron-FSDP wrapper, and its parameters made whole for the time of a capture.

Relied on: megatron-core 0.19.2 and megatron-fsdp 0.6.1, class ``MegatronFSDP``:
``_replace_param_with_raw_if_needed``, ``is_param_fsdp_distributed``, ``synchronize_param_gather``,
``start_param_sync``, ``all_gather_pipeline`` and the attribute ``_training_state`` of every module
below it; class ``AllGatherPipeline``: ``param_gather_event_map`` and ``wait_bucket_ready``.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from megatron_cg.fsdp.recognise import fsdp_package_of
from megatron_cg.fsdp.symbols import in_both
from megatron_cg.versions import changed

_NEEDED = (
    "_replace_param_with_raw_if_needed",
    "is_param_fsdp_distributed",
    "synchronize_param_gather",
    "start_param_sync",
    "param_and_grad_buffer",
    "all_gather_pipeline",
)
RELIES_ON = (
    *in_both(
        "megatron_fsdp:MegatronFSDP", "the wrapped model", attributes=(*_NEEDED, "_training_state")
    ),
    *in_both(
        "param_and_grad_buffer:AllGatherPipeline",
        "what gathers weights",
        attributes=("param_gather_event_map", "wait_bucket_ready"),
    ),
)


def find_megatron_fsdp(model: nn.Module) -> nn.Module | None:
    """The ``MegatronFSDP`` that ``model`` is or contains (either package's), or None.

    Raises UpstreamChangedError when it lacks a member that capture relies on.
    """
    for module in model.modules():
        kind = type(module)
        if kind.__name__ != "MegatronFSDP":
            continue
        distribution = fsdp_package_of(kind.forward)
        if distribution is None:
            continue
        for name in _NEEDED:
            if not hasattr(module, name):
                raise changed(distribution, f"MegatronFSDP.{name}", "a member of the wrapped model")
        return module
    return None


@contextmanager
def raw_parameters(fsdp: Any) -> Iterator[None]:
    """Let the modules hold their raw parameters, as during a forward pass, and undo it after.

    Between steps Megatron-FSDP puts sharded DTensors in the place of the parameters. A graph has
    to be captured on the raw ones: these are what a replay hands to autograd, and the
    post-accumulate-grad hooks sit on them.

    On leaving, all-gathers that capture prefetched are waited for and their buckets released (a
    bucket left in flight would make the next step's reset warn and wait), and the parameters are
    sharded or raw as they were found.
    """
    was_distributed = bool(fsdp.is_param_fsdp_distributed)
    fsdp._replace_param_with_raw_if_needed()
    try:
        yield
    finally:
        # What its reset does itself, but not without a warning that lists every bucket.
        pipeline = fsdp.all_gather_pipeline
        for bucket, bwd in list(pipeline.param_gather_event_map):
            pipeline.wait_bucket_ready(bucket, bwd)
        fsdp.synchronize_param_gather()
        if not was_distributed:
            fsdp.start_param_sync()


@contextmanager
def training_states(modules: Iterable[nn.Module]) -> Iterator[None]:
    """Put Megatron-FSDP's ``_training_state`` of every module back as it was."""
    saved = [
        (module, module._training_state) for module in modules if hasattr(module, "_training_state")
    ]
    try:
        yield
    finally:
        for module, state in saved:
            module._training_state = state
