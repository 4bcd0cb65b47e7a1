"""Every preset against Megatron's own parser, rules and configuration classes."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from megatron_cg.tools.align.presets import load_preset, preset_names
from megatron_cg.tools.align.run import BASE_FLAGS, Plan, graph_flags


@pytest.mark.parametrize("graphs", [False, True], ids=["eager", "graphs"])
@pytest.mark.parametrize("name", preset_names())
def test_megatron_takes_the_flags(name: str, graphs: bool, accepted: Callable[..., Any]) -> None:
    preset = load_preset(name)
    model = tuple(preset.arguments())
    plan = Plan(Path("pretrain_gpt.py"), preset.nproc, model, 12, preset.scopes)
    flags = graph_flags(plan)
    ours = flags.index("--cg-verify-steps")
    del flags[ours : ours + 2]  # this package's parser takes it out
    words = [*model, *BASE_FLAGS, "--mock-data", "--train-iters", "12"]
    words += ["--tokenizer-type", "NullTokenizer", *(flags if graphs else [])]
    args, config = accepted(words, preset.nproc)
    assert config.num_layers == args.num_layers > 0
    assert args.deterministic_mode and args.data_parallel_sharding_strategy == "optim_grads_params"
    captured = [module.name for module in config.cuda_graph_modules]
    assert captured == (list(preset.scopes) if graphs else [])
    assert (config.cuda_graph_impl == "transformer_engine") is graphs
