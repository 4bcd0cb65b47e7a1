"""Megatron-Bridge's own ``pretrain``: ``python -m tests.functional.bridge_client RUN.json``.

The file has a ``Run`` of ``test_bridge.py``. Each process writes ``rank<N>.json`` into its folder:
losses and gradient norms of all steps and of evaluations, to the last bit, the counts of graphs,
and the error if there was one.
"""

import json
import os
import sys
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

import megatron_cg
from megatron_cg.capture.session import open_sessions

RUN: dict[str, Any] = json.loads(Path(sys.argv[1]).read_text()) if __name__ == "__main__" else {}
if RUN.get("early"):
    megatron_cg.enable(**RUN["enable"])

from megatron.bridge import AutoBridge  # noqa: E402
from megatron.bridge.data.builders.gpt_sft import GPTSFTDatasetConfig  # noqa: E402
from megatron.bridge.data.packing import PackedSequenceSpecs  # noqa: E402
from megatron.bridge.peft.lora import LoRA  # noqa: E402
from megatron.bridge.recipes.qwen.h100 import qwen3_moe  # noqa: E402
from megatron.bridge.recipes.utils import environment_utils as of_recipes  # noqa: E402
from megatron.bridge.training.callbacks import Callback  # noqa: E402
from megatron.bridge.training.finetune import finetune  # noqa: E402
from megatron.bridge.training.gpt_step import forward_step  # noqa: E402
from megatron.bridge.training.pretrain import pretrain  # noqa: E402
from transformers import Qwen3MoeConfig  # noqa: E402

from megatron_cg.examples import megatron_bridge as example  # noqa: E402


def recipe_of_experts() -> Any:
    """Bridge's recipe of Qwen3-MoE, made small, for two GPUs, without DeepEP and the Hub."""
    qwen = Qwen3MoeConfig(
        num_hidden_layers=example.LAYERS, hidden_size=512, intermediate_size=1024, head_dim=64,
        num_attention_heads=8, num_key_value_heads=2, vocab_size=example.VOCABULARY,
        num_experts=8, num_experts_per_tok=2, moe_intermediate_size=512, norm_topk_prob=True,
        max_position_embeddings=example.SEQUENCE, tie_word_embeddings=False,
        architectures=["Qwen3MoeForCausalLM"],
    )  # fmt: skip
    bridge = AutoBridge.from_hf_config(qwen)
    qwen3_moe.AutoBridge = SimpleNamespace(from_hf_pretrained=lambda *_, **__: bridge)
    cfg = qwen3_moe.qwen3_30b_a3b_pretrain_8gpu_h100_bf16_config()
    example.small(cfg)
    model = cfg.model
    model.tensor_model_parallel_size = model.pipeline_model_parallel_size = 1
    model.expert_model_parallel_size, model.sequence_parallel = 1, False
    model.moe_token_dispatcher_type, model.moe_flex_dispatcher_backend = "alltoall", None
    return cfg


def tune(cfg: Any, folder: Path, adapter: bool) -> None:
    """Train on packs of ``folder``: an adapter of its Hugging Face model, or a whole model.

    Bridge 0.6.2 cannot load a Hugging Face model that Megatron-FSDP has sharded already. It loads
    one for an adapter earlier; a whole model comes from a checkpoint of Megatron-FSDP.
    """
    length = cfg.model.seq_length
    specs = PackedSequenceSpecs(
        packed_sequence_size=length, packed_train_data_path=folder / "packs.npy",
        packed_metadata_path=folder / "packs.json", pad_cu_seqlens=True,
    )  # fmt: skip
    cfg.dataset = GPTSFTDatasetConfig(
        seq_length=length, dataset_root=folder, enable_offline_packing=True, num_workers=1,
        offline_packing_specs=specs, dataset_kwargs={"pad_to_max_length": True},
        do_validation=False, do_test=False,
    )  # fmt: skip
    cfg.model.vocab_size, cfg.tokenizer.use_tokenizer_vocab_size = example.VOCABULARY, False
    cfg.tokenizer.tokenizer_type, cfg.tokenizer.tokenizer_model = "HuggingFaceTokenizer", folder
    cfg.train.micro_batch_size, cfg.model.apply_rope_fusion = 1, True
    if adapter:
        cfg.peft, cfg.checkpoint.pretrained_checkpoint = LoRA(dim=8), str(folder)


def configure(run: dict[str, Any]) -> Any:
    cfg = recipe_of_experts() if run["experts"] else example.recipe()
    example.prepare(cfg)
    cfg.model.deterministic_mode = True
    cfg.model.cross_entropy_loss_fusion = cfg.model.apply_rope_fusion = False
    cfg.env_vars = {}
    if run["tuned"]:
        tune(cfg, Path(run["tuned"]), run["adapter"])
    if run["scopes"] is not None:
        example.graph(cfg, *run["scopes"])
    for path, value in run["fields"].items():
        owner, (*parents, name) = cfg, path.split(".")
        for parent in parents:
            owner = getattr(owner, parent)
        setattr(owner, name, torch.float32 if value == "float32" else value)
    return cfg


class Numbers(Callback):
    def __init__(self) -> None:
        self.steps: dict[int, list[str]] = {}
        self.evaluations: list[dict[str, str]] = []

    def on_train_step_end(self, context: Any) -> None:
        numbers = (context.loss_dict["lm loss"], context.grad_norm)
        self.steps[context.state.train_state.step + 1] = [float(x).hex() for x in numbers]

    def on_eval_end(self, context: Any) -> None:
        losses = context.total_loss_dict.items()
        self.evaluations.append({name: float(value).hex() for name, value in losses})


def raising(at: int) -> Any:
    """Bridge's ``forward_step``, of which one call raises."""
    calls = count()

    def step(state: Any, data_iterator: Any, model: Any, return_schedule_plan: bool = False) -> Any:
        if next(calls) == at:
            print(f"rank {os.environ['RANK']}: {open_sessions()} sessions open", flush=True)
            raise RuntimeError("forced")
        return forward_step(state, data_iterator, model, return_schedule_plan)

    return step


def train(run: dict[str, Any], folder: Path) -> None:
    recipes = {name: str(value) for name, value in of_recipes.COMMON_RECIPE_ENV_VARS.items()}
    assert run["environment"] in ({}, recipes) and run["environment"].items() <= os.environ.items()
    if not run["early"]:
        megatron_cg.enable(**run["enable"])
    numbers, failed, rank = Numbers(), "", os.environ["RANK"]
    try:
        step = raising(run["fails_at"]) if int(rank) in run["fails"] else forward_step
        (finetune if run["tuned"] else pretrain)(configure(run), step, callbacks=[numbers])
    except BaseException as error:
        failed = f"{type(error).__name__}: {error}"
        raise
    finally:
        print(f"rank {rank}: {open_sessions()} sessions open after pretrain()", flush=True)
        graphs = [counters.as_dict() for counters in megatron_cg.counters()]
        megatron_cg.disable()
        told = {**vars(numbers), "error": failed, "graphs": graphs}
        told["expandable"] = any(part["is_expandable"] for part in torch.cuda.memory_snapshot())
        (folder / f"rank{rank}.json").write_text(json.dumps(told))


if __name__ == "__main__":
    train(RUN, Path(sys.argv[1]).parent)
