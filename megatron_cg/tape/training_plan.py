"""Training plans for the CPU. A separate module, so that a launcher need not import Megatron."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class CpuModelConfig:
    """Shape and precision of a Llama-like model: RMSNorm, SwiGLU, rotary positions.

    Each token uses ``topk`` of the ``experts``; without any, the model is dense. ``graph_modules``
    are Megatron's ``cuda_graph_modules``; empty means the whole layer. ``grouped`` turns Megatron's
    spec of a MoE layer into one with grouped experts; without it they compute one by one.
    ``expert_parallel`` ranks share the experts, and ``tensor_parallel`` ranks each layer.
    ``options`` go to TransformerConfig, ``fsdp_options`` to DistributedDataParallelConfig.
    """

    layers: int = 3
    hidden_size: int = 32
    ffn_hidden_size: int = 64
    heads: int = 4
    vocabulary: int = 256
    sequence_length: int = 16
    experts: int = 0
    topk: int = 2
    grouped: Callable[[Any], Any] | None = None
    expert_parallel: int = 1
    tensor_parallel: int = 1
    bf16: bool = True
    dropout: float = 0.0
    seed: int = 1234
    graph_modules: tuple[str, ...] = ("attn",)
    options: Mapping[str, object] = field(default_factory=dict)
    fsdp_options: Mapping[str, object] = field(default_factory=dict)

    @property
    def under_v2(self) -> bool:
        """Whether it is Megatron-FSDP v2, of megatron-core 0.20, that shards the model."""
        return self.fsdp_options.get("megatron_fsdp_version") == 2


@dataclass(frozen=True)
class TrainingPlan:
    """One run. ``graphs`` captures after ``warmup_steps`` eager steps; else all steps are eager.

    A step is ``microbatches`` passes of ``micro_batch_size`` sequences in each process.
    """

    model: CpuModelConfig = field(default_factory=CpuModelConfig)
    steps: int = 6
    warmup_steps: int = 3
    graphs: bool = False
    microbatches: int = 1
    micro_batch_size: int = 2
    learning_rate: float = 1e-3
