"""What a run trains, on which data and in which layout. Compared runs must agree on it.

An attribute of Megatron's namespace that a release lacks is recorded as None.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_cg.upstream.symbols import Symbol

if TYPE_CHECKING:
    from megatron_cg.tools.cpu.training_plan import TrainingPlan

_ARGS = Symbol("megatron-core", "megatron.training.global_vars:get_args", "the run's arguments")
RELIES_ON = (_ARGS,)

Setup = dict[str, dict[str, Any]]
"""By group (``model``, ``parallel``, ``data``, ``training``), then by name."""

_NAMES: Mapping[str, tuple[str, ...]] = {
    "model": (
        *("num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads"),
        *("num_query_groups", "kv_channels", "seq_length", "padded_vocab_size"),
        *("untie_embeddings_and_output_weights", "position_embedding_type", "rotary_base"),
        *("rotary_percent", "normalization", "layernorm_epsilon", "swiglu", "squared_relu"),
        *("add_bias_linear", "add_qkv_bias", "qk_layernorm", "attention_dropout"),
        *("hidden_dropout", "init_method_std", "num_experts", "moe_ffn_hidden_size"),
        *("moe_layer_freq", "moe_shared_expert_intermediate_size", "moe_router_topk"),
        *("moe_router_score_function", "moe_router_load_balancing_type", "moe_aux_loss_coeff"),
        *("moe_expert_capacity_factor", "multi_latent_attention", "q_lora_rank", "kv_lora_rank"),
        *("mtp_num_layers", "hybrid_layer_pattern", "mamba_state_dim", "mamba_head_dim"),
        *("bf16", "fp16", "fp8", "fp8_recipe", "fp8_param_gather", "fp4"),
    ),
    "parallel": (
        *("tensor_model_parallel_size", "sequence_parallel", "pipeline_model_parallel_size"),
        *("context_parallel_size", "expert_model_parallel_size", "expert_tensor_parallel_size"),
        *("use_megatron_fsdp", "data_parallel_sharding_strategy"),
        "num_distributed_optimizer_instances",
    ),
    "data": ("mock_data", "split", "tokenizer_type", "tokenizer_model"),
    "training": (
        *("seed", "train_iters", "micro_batch_size", "global_batch_size", "rampup_batch_size"),
        *("optimizer", "lr", "min_lr", "lr_decay_style", "lr_warmup_iters", "weight_decay"),
        *("clip_grad", "adam_beta1", "adam_beta2", "adam_eps"),
    ),
}
_WHOLE, _END = 64 << 20, 1 << 20
"""A file up to this many bytes is read whole; of a longer one, this much at each end."""


def of_megatron() -> Setup:
    """The setup of the run in this process; empty if Megatron has no arguments."""
    try:
        args = _ARGS.find()()
    except AssertionError:
        # A custom training loop: it calls Megatron's functions and parses no flags.
        return {}
    setup = {
        group: {name: _plain(getattr(args, name, None)) for name in names}
        for group, names in _NAMES.items()
    }
    # Only one rank reads them: thousands would read the same files at once.
    if os.environ.get("RANK", "0") == "0":
        setup["data"]["data_path"] = [_content(word) for word in args.data_path or ()]
    return setup


def of_tape(plan: TrainingPlan) -> Setup:
    """The setup of a run on the CPU."""
    model = asdict(plan.model)
    options = model.pop("fsdp_options")
    # The captured scopes may differ.
    del model["graph_modules"]
    strategy = "data_parallel_sharding_strategy"
    names = ("microbatches", "micro_batch_size", "learning_rate")
    return {
        "model": model,
        "parallel": {strategy: options.get(strategy)},
        "data": {"tokens": plan.tokens and _content(str(plan.tokens))},
        "training": {name: getattr(plan, name) for name in names},
    }


def differences(one: Mapping[str, Any], two: Mapping[str, Any]) -> list[str]:
    """How the setups of two records differ, as ``"model: hidden_size 64 and 128"``.

    Both arguments are records of rank 0: only rank 0 knows the data. The version of this package
    may differ, because it changes no number of an eager run.
    """
    own = {"megatron-cg": None}
    groups = {
        "ranks": ({"world_size": one["world_size"]}, {"world_size": two["world_size"]}),
        "versions": (one["versions"] | own, two["versions"] | own),
        "machine": ({"device": one["device"]}, {"device": two["device"]}),
    }
    for group in (*one["setup"], *two["setup"]):
        if group in one["setup"] and group in two["setup"]:
            groups[group] = one["setup"][group], two["setup"][group]
    return [
        f"{group}: {name} {_shown(values, name)} and {_shown(others, name)}"
        for group, (values, others) in groups.items()
        for name in dict.fromkeys([*values, *others])
        if values.get(name) != others.get(name)
    ]


def _shown(values: Mapping[str, Any], name: str) -> str:
    value = values.get(name)
    return "none" if value is None else str(value)


def _plain(value: Any) -> Any:
    """The value in a form that JSON returns unchanged."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, Sequence):
        return [_plain(item) for item in value]
    return str(value)


def _content(prefix: str) -> str:
    """Identifies a dataset by size and content; a word that is no dataset stays as it is."""
    path = Path(f"{prefix}.bin")
    try:
        size = path.stat().st_size
        found = hashlib.sha256()
        for part in _parts(path, size):
            found.update(part)
    except OSError:
        return prefix
    return f"{size:,} bytes with SHA-256 {found.hexdigest()[:16]}"


def _parts(path: Path, size: int) -> Iterator[bytes]:
    with path.open("rb") as file:
        if size <= _WHOLE:
            yield file.read()
        else:
            yield file.read(_END)
            file.seek(-_END, 2)
            yield file.read(_END)
