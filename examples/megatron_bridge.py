"""Megatron-Bridge 0.6.2 with CUDA graphs of layers: its own ``pretrain``, and five lines.

    torchrun --nproc-per-node 2 examples/megatron_bridge.py [--eager]

``recipe`` is written as the recipes of Megatron-Bridge are: a small Llama, mock data, two GPUs. It
needs no file and no network. Both runs draw the same weights, and Bridge's log has their losses.
"""

import sys
from typing import Any

from megatron.bridge import AutoBridge
from megatron.bridge.recipes.common import _pretrain_common
from megatron.bridge.training.gpt_step import forward_step
from megatron.bridge.training.pretrain import pretrain
from transformers import LlamaConfig

import megatron_cg  # 1

LAYERS, SEQUENCE, VOCABULARY = 4, 512, 4096


def recipe() -> Any:
    """A ``ConfigContainer`` of Bridge's: its common defaults, and what is special to this model."""
    cfg = _pretrain_common()
    llama = LlamaConfig(
        num_hidden_layers=LAYERS, hidden_size=512, intermediate_size=1024, vocab_size=VOCABULARY,
        num_attention_heads=8, num_key_value_heads=2, max_position_embeddings=SEQUENCE,
        tie_word_embeddings=False, architectures=["LlamaForCausalLM"],
    )  # fmt: skip
    cfg.model = AutoBridge.from_hf_config(llama).to_megatron_provider(load_weights=False)
    small(cfg)
    return cfg


def small(cfg: Any) -> None:
    """Let a recipe train a few steps on mock data, without files, on two GPUs."""
    cfg.model.seq_length = cfg.dataset.seq_length = SEQUENCE
    cfg.model.vocab_size = None  # The tokenizer's, which adds a token of its own.
    cfg.tokenizer.tokenizer_type, cfg.tokenizer.vocab_size = "NullTokenizer", VOCABULARY - 1
    cfg.dataset.num_workers, cfg.dataset.split = 1, "99,1,0"
    cfg.train.train_iters, cfg.train.micro_batch_size, cfg.train.global_batch_size = 12, 2, 8
    cfg.validation.eval_iters = 0
    cfg.scheduler.lr_warmup_iters, cfg.scheduler.lr_decay_iters = 0, cfg.train.train_iters
    cfg.logger.log_interval, cfg.logger.tensorboard_dir = 1, None
    cfg.logger.log_timers_to_tensorboard = False
    cfg.checkpoint.save = cfg.checkpoint.load = None
    # Megatron-FSDP, as in Bridge's docs/training/megatron-fsdp.md:
    cfg.ddp.use_megatron_fsdp = True
    cfg.ddp.data_parallel_sharding_strategy = "optim_grads_params"
    cfg.checkpoint.ckpt_format = "fsdp_dtensor"


def prepare(cfg: Any) -> None:
    """What graphs need of a recipe. The eager run has it too, so that both draw the same numbers.

    - Graphs read unsharded parameters where they lay at the capture: both buffers keep them there.
    - Transformer Engine's tracker of random numbers draws others than Megatron's.
    - Weight gradients have no place under Megatron-FSDP until its hooks give them one.
    """
    cfg.ddp.fsdp_double_buffer = cfg.ddp.fsdp_db_use_persist_buf_on_alloc_fail = True  # 2
    cfg.model.use_te_rng_tracker, cfg.model.gradient_accumulation_fusion = True, False  # 3


def graph(cfg: Any, *scopes: str) -> None:
    """Ask for graphs of these parts of each layer. Recipes of Bridge's set ``cuda_graph_scope``."""
    cfg.model.cuda_graph_impl, cfg.model.cuda_graph_scope = "transformer_engine", list(scopes)  # 4


def main() -> None:
    """Train twelve steps, of which three are eager."""
    megatron_cg.enable()  # 5
    cfg = recipe()
    prepare(cfg)
    if "--eager" not in sys.argv:
        graph(cfg, "attn", "mlp")
    pretrain(cfg, forward_step)


if __name__ == "__main__":
    main()
