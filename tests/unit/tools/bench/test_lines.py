"""How a launch line is edited, and that Megatron's own parser and rules accept what comes out."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from megatron_cg.errors import MegatronCGError
from megatron_cg.tools.align.presets import load_preset, preset_names
from megatron_cg.tools.align.run import BASE_FLAGS, Plan, graph_flags
from megatron_cg.tools.bench.bench_command import (
    CONFIGURATIONS,
    chosen,
    edited,
    given_line,
    preset_line,
    read_log,
)
from tests.unit.grouped_linear import in_place_of_te

FSDP = "--use-megatron-fsdp --data-parallel-sharding-strategy optim_grads_params"
MEASURED = (
    "--eval-iters 0 --exit-interval 9 --log-interval 1 --log-throughput --log-memory-interval 9"
)
DENSE = "--cuda-graph-modules attn mlp"
WHOLE = "--cg-grouped-gemm torch --cuda-graph-modules attn moe"
BASE = "--cuda-graph-impl transformer_engine --no-create-attention-mask-in-dataloader"
OURS = (
    f"{BASE} --fsdp-double-buffer --fsdp-db-use-persist-buf-on-alloc-fail "
    "--no-gradient-accumulation-fusion"
)


EXPERTS, WEIGHTS = "--num-experts 8", "--fp8-param-gather"
SHARED = f"{EXPERTS} --expert-model-parallel-size 2"
PARTS = "--cuda-graph-modules attn moe_router moe_preprocess"
CUBLAS, TE = "--cg-grouped-gemm cublas", "--cg-grouped-gemm te"
ONE = "--cuda-graph-modules attn --cg-layers attn:0"


@pytest.mark.parametrize(
    ("flags", "name", "expected"),
    [
        ("--save x --wandb-project y --bf16", "eager", "--bf16"),
        (f"{ONE} --bf16", "eager", "--bf16"),
        ("--bf16", "graphs", f"--bf16 {OURS} {DENSE}"),
        (EXPERTS, "graphs", f"{EXPERTS} {OURS} {WHOLE}"),
        (SHARED, "graphs", f"{SHARED} {OURS} {WHOLE} --cg-moe-exchange peer"),
        (
            f"{EXPERTS} --fp8-format hybrid",
            "graphs",
            f"{EXPERTS} --fp8-format hybrid {OURS} {PARTS}",
        ),
        (ONE, "graphs", f"{OURS} {ONE}"),
        (WEIGHTS, "graphs", f"{WEIGHTS} {OURS} --keep-fp8-transpose-cache {DENSE}"),
        (f"{EXPERTS} --cg-moe-rows 1.5", "graphs", f"{EXPERTS} {OURS} {WHOLE} --cg-moe-rows 1.5"),
        (
            "--use-distributed-optimizer --megatron-fsdp-version 2",
            "graphs",
            f"--megatron-fsdp-version 2 {BASE} --no-gradient-accumulation-fusion {DENSE}",
        ),
        (EXPERTS, "eager-gemm", f"{EXPERTS} --cg-grouped-gemm torch"),
        (f"{EXPERTS} {CUBLAS} --cg-moe-exchange peer", "eager-gemm", f"{EXPERTS} {CUBLAS}"),
        (f"{EXPERTS} {TE}", "graphs", f"{EXPERTS} {OURS} {PARTS} {TE}"),
        (
            f"{EXPERTS} --fp8-format hybrid {CUBLAS}",
            "graphs",
            f"{EXPERTS} --fp8-format hybrid {OURS} --cuda-graph-modules attn moe {CUBLAS}",
        ),
    ],
)
def test_flags_are_edited_for_each_configuration(flags: str, name: str, expected: str) -> None:
    line = given_line(["torchrun", "train.py", *FSDP.split(), *flags.split()])
    assert " ".join(edited(line, name, steps=9).words) == f"{FSDP} {expected} {MEASURED}"


def test_flags_of_fsdp_are_not_for_ddp() -> None:
    flags = f"{FSDP} --ckpt-format fsdp_dtensor --init-model-with-meta-device --bf16".split()
    made = edited(given_line(["torchrun", "train.py", *flags]), "ddp", steps=9)
    kept = f"--bf16 --use-distributed-optimizer {BASE} {DENSE}"
    assert " ".join(made.words) == f"{kept} {MEASURED}" and made.variables == {}
    split = given_line(["torchrun", "train.py", *flags, "--context-parallel-size", "2"])
    connections = [edited(split, name, steps=9).variables for name in ("ddp", "graphs")]
    assert connections == [{"CUDA_DEVICE_MAX_CONNECTIONS": "1"}, {}]


@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize("name", CONFIGURATIONS)
@pytest.mark.parametrize("preset", ["qwen3-moe", "deepseek-v3", "mixtral", "llama"])
def test_megatron_and_our_rules_accept_every_line_of_a_preset(
    preset: str, name: str, accepted: Callable[..., Any]
) -> None:
    line = preset_line(load_preset(preset), Path("data/text"), nproc=2, microbatches=2, steps=50)
    if preset == "llama" and name == "eager-gemm":
        with pytest.raises(MegatronCGError, match="no --num-experts"):
            chosen(name, line)
        return
    with in_place_of_te():
        args, _ = accepted(edited(line, name, steps=50).words)
    assert (args.exit_interval, args.global_batch_size, args.log_throughput) == (50, 4, True)
    assert args.use_megatron_fsdp == CONFIGURATIONS[name].fsdp
    assert (args.cuda_graph_impl == "none") == name.startswith("eager")


@pytest.mark.parametrize("graphs", [False, True], ids=["eager", "graphs"])
@pytest.mark.parametrize("name", preset_names())
def test_megatron_takes_the_flags_of_a_preset(
    name: str, graphs: bool, accepted: Callable[..., Any]
) -> None:
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


def test_steps_after_those_that_settle_are_read_from_the_log() -> None:
    line = (
        " iteration {0:8d}/     100 | elapsed time per iteration (ms): {0:.1f} | global batch "
        "size:     2 | lm loss: 2.500000E+00 |\n"
    )
    text = "".join(map(line.format, (1, 2, 3, 4)))
    assert read_log(text, settle=2, steps=2)["step_ms"] == [3, 4]
    with pytest.raises(MegatronCGError, match="smaller"):
        read_log(text, settle=2, steps=3)
