"""Every preset against Megatron's own parser, rules and configuration classes."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron_cg.tools.align.command import BASE_FLAGS, Plan, graph_flags
from megatron_cg.tools.align.presets import PresetError, load_preset, parse_preset, preset_names

GOOD = """
description: a model
scopes: [attn]
nproc: 2
flags: {num-layers: 2, swiglu: true, qk-layernorm: false, moe-aux-loss-coeff: [0.1, 0.2]}
tape: {layers: 1, hidden: 8, heads: 2, ffn: 8, vocab: 16, seq: 8}
"""


@pytest.mark.parametrize("graphs", [False, True], ids=["eager", "graphs"])
@pytest.mark.parametrize("name", preset_names())
def test_megatron_takes_the_flags(
    name: str, graphs: bool, hopper_machine: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    from megatron.training.argument_utils import core_transformer_config_from_args
    from megatron.training.arguments import parse_args, validate_args

    preset = load_preset(name)
    model = tuple(preset.arguments())
    plan = Plan(Path("pretrain_gpt.py"), preset.nproc, model, 12, preset.scopes)
    words = [*model, *BASE_FLAGS, "--mock-data", "--train-iters", "12"]
    words += ["--tokenizer-type", "NullTokenizer", *(graph_flags(plan) if graphs else [])]
    monkeypatch.setenv("WORLD_SIZE", str(preset.nproc))
    monkeypatch.setattr("sys.argv", ["pretrain_gpt.py", *words])

    args = parse_args()
    validate_args(args)
    config = core_transformer_config_from_args(args)

    assert config.num_layers == args.num_layers > 0
    assert args.deterministic_mode and args.data_parallel_sharding_strategy == "optim_grads_params"
    captured = [module.name for module in config.cuda_graph_modules]
    assert captured == (list(preset.scopes) if graphs else [])
    assert (config.cuda_graph_impl == "transformer_engine") is graphs


@pytest.mark.parametrize("family", ["llama", "qwen3-moe", "deepseek-v3"])
def test_there_is_a_tiny_and_a_real_size(family: str) -> None:
    tiny, real = load_preset(f"{family}-tiny"), load_preset(family)
    assert tiny.flags["hidden-size"] < 1024 <= real.flags["hidden-size"]  # type: ignore[operator]
    assert tiny.tape is not None and real.tape is not None


def test_flags_become_a_command_line() -> None:
    words = parse_preset("x", GOOD).arguments()
    assert words == "--num-layers 2 --swiglu --moe-aux-loss-coeff 0.1 0.2".split()


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("nproc: 2", "", "nproc is missing"),
        ("nproc: 2", "nproc: two", "nproc is 'two', not of type int"),
        ("nproc: 2", "nproc: true", "nproc is True, not of type int"),
        ("nproc: 2", "nproc: 2\nngpu: 2", "ngpu is not known"),
        ("layers: 1, ", "", "tape.layers is missing"),
        ("seq: 8", "seq: 8, depth: 3", "tape.depth is not known"),
        ("swiglu", "--swiglu", "flags.--swiglu: write Megatron's flag without its dashes"),
        ("[0.1, 0.2]", "{a: 1}", "flags.moe-aux-loss-coeff: {'a': 1} is not a value"),
        ("[0.1, 0.2]", "[]", "flags.moe-aux-loss-coeff: [] is not a value, nor a list"),
    ],
)
def test_a_wrong_preset_is_refused(old: str, new: str, message: str) -> None:
    assert old in GOOD
    with pytest.raises(PresetError) as caught:
        parse_preset("x", GOOD.replace(old, new))
    assert f"preset x: {message}" in str(caught.value)


def test_all_problems_are_named_at_once() -> None:
    with pytest.raises(PresetError) as caught:
        parse_preset("x", "scopes: attn\nflags: {}")
    text = str(caught.value)
    assert "description is missing" in text and "nproc is missing" in text
    assert "scopes is 'attn', not of type list" in text


@pytest.mark.parametrize("text", ["", "[1]", "a: [", "just words"])
def test_what_is_no_mapping_is_refused(text: str) -> None:
    with pytest.raises(PresetError, match="preset x is not"):
        parse_preset("x", text)


def test_an_unknown_name_lists_the_known() -> None:
    with pytest.raises(PresetError, match=r"there is no preset 'nope'; there are .*llama-tiny"):
        load_preset("nope")


def test_a_value_of_zero_is_a_value() -> None:
    assert load_preset("llama").arguments()[-4:] == [
        *("--attention-dropout", "0.0"),
        *("--hidden-dropout", "0.0"),
    ]
