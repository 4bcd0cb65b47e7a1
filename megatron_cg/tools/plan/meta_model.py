"""The run's model under the real Megatron-FSDP, on the meta device.

Relied on: megatron-core 0.19.2: ``gpt_config_from_args``, ``hybrid_config_from_args``,
``ModelConfig.get_builder_cls``, ``build_distributed_models``, ``get_megatron_ddp_config`` and
``num_microbatches_calculator``, as ``examples/pretrain_gpt.py`` uses them.
"""

from __future__ import annotations

import contextlib
import gc
import io
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from megatron_cg.fsdp.fsdp_model import find_megatron_fsdp
from megatron_cg.tools.cpu.fakes import replaced
from megatron_cg.tools.plan.fake_machine import process_groups


@contextmanager
def built_model(args: Any) -> Iterator[tuple[nn.Module, Any]]:
    """The wrapped model of rank 0, in training mode, with raw parameters; and its MegatronFSDP.

    Enter it inside ``simulated_gpus``; the process groups live as long as the block.
    """
    from megatron.core import num_microbatches_calculator as microbatches
    from megatron.core.distributed.fsdp.mcore_fsdp_adapter import FullyShardedDataParallel
    from megatron.core.transformer.moe import moe_logging
    from megatron.training.argument_utils import gpt_config_from_args, hybrid_config_from_args
    from megatron.training.training import get_megatron_ddp_config
    from megatron.training.utils import is_hybrid_model

    tracker = "_MOE_METRICS_TRACKER"  # of losses by layer, kept for the whole process
    with process_groups(args) as groups, replaced(moe_logging, tracker, None):
        microbatches.unset_num_microbatches_calculator()
        microbatches.init_num_microbatches_calculator(
            0, None, args.global_batch_size, args.micro_batch_size, args.data_parallel_size, False
        )
        try:
            # Megatron-FSDP refuses parameters without memory, but here none has any. It also sends
            # RNG states from one rank to the others, which do not exist, and collects garbage.
            with (
                contextlib.redirect_stdout(io.StringIO()),
                replaced(FullyShardedDataParallel, "sync_rng_states_across_tp_group", _nothing),
                replaced(gc, "collect", _nothing),
                replaced(torch.Tensor, "is_meta", property(lambda _tensor: False)),
            ):
                make = hybrid_config_from_args if is_hybrid_model(args) else gpt_config_from_args
                config = make(args)
                (model,) = config.get_builder_cls()(config).build_distributed_models(
                    groups,
                    get_megatron_ddp_config(args),
                    use_megatron_fsdp=True,
                    data_parallel_random_init=False,
                )
            fsdp: Any = find_megatron_fsdp(model)
            fsdp._replace_param_with_raw_if_needed()
            yield model.train(), fsdp
        finally:
            microbatches.unset_num_microbatches_calculator()


def _nothing(*_args: Any) -> None:
    """Replaces what has no effect on a plan."""
