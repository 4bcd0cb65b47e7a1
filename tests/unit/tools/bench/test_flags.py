"""Every run of the benchmark is accepted by Megatron's real parser and rules, and by ours."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from megatron_cg.tools.align.presets import load_preset
from megatron_cg.tools.align.token_data import TokenStream
from megatron_cg.tools.bench.runs.bench_schedule import configurations_for
from megatron_cg.tools.bench.runs.commands import Settings, script_words
from megatron_cg.tools.bench.runs.configurations import (
    EAGER_FAST_PATH,
    EXPERTS,
    GRAPHS,
    KNOWN,
    ON_REQUEST,
    PEER_EXPERTS,
    PLAIN,
    TORCH_EAGER,
)
from megatron_cg.tools.bench.runs.shapes import SHAPES, is_moe
from megatron_cg.tools.cpu.grouped_linear import in_place_of_te

pytestmark = pytest.mark.usefixtures("hopper", "te_gemm")
MOE = "qwen3-moe"
DATA = TokenStream(Path("data/text"), "", is_bytes=True)
PAIRS = [
    (shape, configuration)
    for shape in SHAPES
    for configuration in configurations_for(load_preset(shape), None, scaling=False)
]
PAIRS += [
    (shape, name)
    for shape in ("llama", "qwen3-moe", "deepseek-v3")
    for name in configurations_for(load_preset(shape), list(ON_REQUEST), scaling=False)
]


@pytest.fixture
def te_gemm() -> Iterator[None]:
    """Transformer Engine's grouped GEMM, which a run on GPUs has."""
    with in_place_of_te():
        yield


def parsed(settings: Settings, configuration: str, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Megatron's arguments, validated; raises as the run would."""
    from megatron.training import arguments as megatron

    words = script_words(settings, configuration, DATA.flags(Path("cache")))
    monkeypatch.setattr("sys.argv", ["measured.py", *words])
    monkeypatch.setenv("WORLD_SIZE", str(settings.nproc))
    args = megatron.parse_args()
    megatron.validate_args(args)
    return args


def accepted(
    settings: Settings, configuration: str, monkeypatch: pytest.MonkeyPatch
) -> tuple[Any, Any]:
    """Megatron's arguments and the model's configuration; raises as the run would."""
    from megatron.training.argument_utils import core_transformer_config_from_args

    args = parsed(settings, configuration, monkeypatch)
    return args, core_transformer_config_from_args(args)


@pytest.mark.parametrize(("shape", "configuration"), PAIRS)
def test_every_configuration_of_every_shape_is_accepted(
    shape: str, configuration: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = Settings(load_preset(shape), nproc=2)
    args, config = accepted(settings, configuration, monkeypatch)
    one = KNOWN[configuration]
    assert args.train_iters == settings.windows.steps
    assert args.use_megatron_fsdp is one.fsdp and args.use_distributed_optimizer
    assert (args.ckpt_format == "fsdp_dtensor") is one.fsdp
    own = configuration == EAGER_FAST_PATH
    assert args.fsdp_double_buffer is (own or (one.fsdp and one.graphs != "none"))
    assert args.manual_gc and not args.deterministic_mode and args.log_interval > args.train_iters
    assert not args.check_for_nan_in_loss_and_grad
    assert args.global_batch_size == 4 and args.micro_batch_size == 1
    assert args.expert_model_parallel_size == (2 if is_moe(settings.preset) else 1)
    captured = [module.name for module in config.cuda_graph_modules]
    scopes = one.captured(settings.chosen_scopes)
    assert captured == (list(scopes) if one.graphs == "partial" else [])
    assert ("moe" in captured) is (one.torch_gemm and one.graphs == "partial")
    assert args.cg_grouped_gemm == ("torch" if one.torch_gemm else "te")
    assert args.cg_backend == ("native" if one.native else "te")
    impl = {"none": "none", "partial": "transformer_engine", "full": "full_iteration"}
    assert config.cuda_graph_impl == impl[one.graphs]
    assert args.cuda_graph_warmup_steps == 3
    assert args.cg_no_fsdp_fast_path is (configuration == PLAIN)


@pytest.mark.parametrize(
    ("shape", "changes", "expected"),
    [
        *((shape, {"layers": 32}, {"num_layers": 32}) for shape in SHAPES),
        *((shape, {"layers": 4}, {"num_layers": 4}) for shape in ("deepseek-v3", "mamba-hybrid")),
        (MOE, {"microbatches": 8}, {"global_batch_size": 16}),
        (MOE, {"nproc": 1}, {"global_batch_size": 2, "expert_model_parallel_size": 1}),
        (MOE, {"nproc": 4}, {"global_batch_size": 8, "expert_model_parallel_size": 2}),
    ],
)
def test_every_size_of_a_scaling_run_is_accepted(
    shape: str,
    changes: dict[str, Any],
    expected: dict[str, int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    settings = replace(Settings(load_preset(shape), nproc=2), **changes)
    args, config = accepted(settings, GRAPHS, monkeypatch)
    assert {name: getattr(args, name) for name in expected} == expected
    assert config.num_layers == args.num_layers


def test_what_was_left_out_can_be_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = Settings(
        load_preset("llama"),
        nproc=2,
        check_for_nan=True,
        rope_fusion=True,
        extra=("--seq-length", "2048", "--max-position-embeddings", "2048"),
    )
    args = parsed(settings, GRAPHS, monkeypatch)
    assert args.check_for_nan_in_loss_and_grad and args.seq_length == 2048
    assert args.apply_rope_fusion


def test_flags_about_graphs_are_for_configurations_with_graphs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    extra = ("--cg-moe-rows", "1.25", "--seed", "7")
    settings = Settings(load_preset(MOE), nproc=2, extra=extra)
    graphs, eager = (parsed(settings, name, monkeypatch) for name in (EXPERTS, TORCH_EAGER))
    assert graphs.cg_moe_rows == 1.25 and eager.cg_moe_rows is None
    assert graphs.seed == eager.seed == 7


def test_the_exchange_by_peer_memory_differs_in_nothing_else(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    settings = Settings(load_preset(MOE), nproc=2)
    nccl, peer = (vars(parsed(settings, name, monkeypatch)) for name in (EXPERTS, PEER_EXPERTS))
    assert {name for name in nccl if nccl[name] != peer[name]} == {"cg_moe_exchange"}
    assert peer["cg_moe_exchange"] == "peer"
