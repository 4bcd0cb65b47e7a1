"""Megatron's real parser: our group in it, and what we read from its namespace."""

from __future__ import annotations

import argparse
import copy
import dataclasses
import logging
import sys

import pytest
from megatron.core.transformer.enums import CudaGraphModule

from megatron_cg.arguments import Environment, GraphArguments, RunArguments
from megatron_cg.arguments.megatron import (
    add_arguments,
    read,
    read_graph,
    read_run,
    validate,
    wants_graphs,
)
from megatron_cg.errors import ConfigurationError, UpstreamChangedError
from tests.unit.arguments.good_configuration import (
    GOOD_ARGV,
    GOOD_ENVIRONMENT,
    GOOD_RUN,
    megatron_parser,
    parse,
)


def test_help_shows_our_group() -> None:
    text = megatron_parser().format_help()
    group = text[text.index("\nmegatron_cg:") :]
    for flag in ("--cg-layers SCOPE:RANGES", "--cg-on-failure {error,eager}", "--cg-record DIR"):
        assert flag in group
    assert "attn:0-23 moe_router:4-" in " ".join(group.split())


def test_help_texts_of_megatron_that_argparse_cannot_format_are_mended() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--bare", help="headroom of 10%)")
    parser.add_argument("--right", default=3, help="%(default)s of 10%%")
    parser.add_argument("--none")
    with pytest.raises(ValueError, match="unsupported format character"):
        parser.format_help()
    text = add_arguments(parser).format_help()
    assert "headroom of 10%)" in text
    assert "3 of 10%\n" in text


def test_our_flags_are_read() -> None:
    line = "--cg-layers attn:0-3,8 moe_router:4- --cg-on-failure eager --cg-record r"
    line += " --cg-on-mismatch recapture --cg-verify-interval 100 --cg-no-fsdp-fast-path"
    assert read(parse(*line.split()))[1] == GraphArguments(
        cg_layers=("attn:0-3,8", "moe_router:4-"),
        cg_on_failure="eager",
        cg_on_mismatch="recapture",
        cg_verify_interval=100,
        cg_no_fsdp_fast_path=True,
        cg_record="r",
    )
    assert read(parse())[1] == GraphArguments()


def test_without_our_group_our_flags_have_their_defaults() -> None:
    assert read_graph(argparse.Namespace()) == GraphArguments()


def test_our_defaults_are_those_of_megatrons_parser() -> None:
    assert read_run(parse()) == RunArguments()


def test_the_good_arguments_are_the_good_run() -> None:
    namespace = parse(*GOOD_ARGV)
    assert read_run(namespace) == GOOD_RUN
    assert wants_graphs(namespace)


@pytest.mark.parametrize(
    ("argv", "field", "expected"),
    [
        ("--use-nccl-ub", "fsdp_double_buffer", True),
        ("--megatron-fsdp-max-pool-double-buffer", "fsdp_double_buffer", True),
        ("--fsdp-double-buffer", "fsdp_double_buffer", True),
        ("--cuda-graph-modules attn mlp", "cuda_graph_modules", ("attn", "mlp")),
        ("--cuda-graph-scope attn", "cuda_graph_modules", ("attn",)),
        ("--cuda-graph-modules full_iteration", "cuda_graph_impl", "full_iteration"),
        ("--external-cuda-graph", "cuda_graph_impl", "transformer_engine"),
        ("--enable-cuda-graph", "cuda_graph_impl", "local"),
        ("--num-layers 7", "num_layers", 7),
        ("--encoder-num-layers 6", "num_layers", 6),
        ("--num-layers 7 --hybrid-layer-pattern M*|M-/MM", "num_layers", 4),
        ("--hybrid-override-pattern M*", "hybrid_layer_pattern", "M*"),
        ("--moe-layer-freq 2", "moe_layer_freq", 2),
        ("--moe-layer-freq [0]+[1]*2", "moe_layer_freq", (0, 1, 1)),
        (
            "--moe-router-load-balancing-type sinkhorn",
            "moe_router_load_balancing_type",
            ("sinkhorn",),
        ),
        (
            "--moe-router-load-balancing-type aux_loss global_aux_loss",
            "moe_router_load_balancing_type",
            ("aux_loss", "global_aux_loss"),
        ),
        ("--spec some.module some_function", "custom_layers", True),
        ("--heterogeneous-layers-config-path c.json", "custom_layers", True),
        ("--recompute-activations", "recompute_granularity", "selective"),
        ("--moe-layer-recompute", "recompute_granularity", "selective"),
        ("--moe-layer-recompute", "recompute_modules", ("core_attn", "moe")),
        ("--recompute-modules mlp moe", "recompute_modules", ("mlp", "moe")),
        ("--cpu-offloading-num-layers 2", "cpu_offloading", True),
        ("--fp8-format hybrid", "fp8", "hybrid"),
        ("--tensor-model-parallel-size 2", "expert_tensor_parallel_size", 2),
        (
            "--tensor-model-parallel-size 4 --expert-tensor-parallel-size 2",
            "expert_tensor_parallel_size",
            2,
        ),
    ],
)
def test_derived_settings(argv: str, field: str, expected: object) -> None:
    run = read_run(parse(*argv.split()))
    assert getattr(run, field) == expected
    assert getattr(RunArguments(), field) != expected


@pytest.mark.parametrize(
    ("argv", "ranks"),
    [
        ("", 8),
        ("--tensor-model-parallel-size 2", 4),
        ("--context-parallel-size 2", 8),
        ("--expert-model-parallel-size 8", 8),
        ("--num-experts 8 --expert-model-parallel-size 4", 2),
        ("--num-experts 8 --expert-model-parallel-size 2 --tensor-model-parallel-size 4", 1),
        ("--num-experts 8 --expert-model-parallel-size 2 --expert-tensor-parallel-size 1", 4),
        ("--num-distributed-optimizer-instances 4", 2),
    ],
)
def test_ranks_that_share_gradients(argv: str, ranks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    from megatron.training.arguments import parse_args

    monkeypatch.setenv("WORLD_SIZE", "8")
    monkeypatch.setattr(sys, "argv", ["script", *argv.split()])
    assert read_run(parse_args()).gradient_ranks == ranks
    assert read_run(parse(*argv.split())).gradient_ranks is None


@pytest.mark.parametrize(
    "argv",
    [
        "--cuda-graph-modules full",
        "--cuda-graph-modules attn moe_router",
        "--cuda-graph-modules full_iteration",
        "--cuda-graph-impl transformer_engine --cuda-graph-modules mamba",
    ],
)
def test_the_namespace_reads_the_same_after_megatrons_normalisation(argv: str) -> None:
    from megatron.training import arguments

    before = parse(*argv.split())
    after = copy.copy(before)
    arguments._normalize_cuda_graph_modules_args(after)
    for deleted in ("cuda_graph_scope_deprecated", "recompute_activations"):
        delattr(after, deleted)
    assert after.cuda_graph_modules is not before.cuda_graph_modules
    assert read_run(after) == read_run(before)


@pytest.mark.parametrize(
    ("modules", "expected"),
    [
        (None, ()),
        ("attn,mlp", ("attn", "mlp")),
        (["attn", CudaGraphModule.mlp], ("attn", "mlp")),
        (CudaGraphModule.moe, ("moe",)),
    ],
    ids=str,
)
def test_every_form_of_scopes_that_megatron_takes(
    modules: object, expected: tuple[str, ...]
) -> None:
    namespace = parse()
    namespace.cuda_graph_modules = modules
    assert read_run(namespace).cuda_graph_modules == expected


@pytest.mark.parametrize("name", ["nccl_ub", "moe_layer_freq", "bf16", "cuda_graph_modules"])
def test_a_missing_attribute_of_megatron_is_named(name: str) -> None:
    namespace = parse(*GOOD_ARGV)
    delattr(namespace, name)
    with pytest.raises(UpstreamChangedError, match=rf"megatron-core .*args\.{name}"):
        validate(namespace, GOOD_ENVIRONMENT)


@pytest.mark.parametrize("argv", ["", "--use-megatron-fsdp"])
def test_a_run_without_graphs_needs_no_attribute_of_megatron(argv: str) -> None:
    namespace = parse(*argv.split())
    for name in ("nccl_ub", "moe_layer_freq", "bf16"):
        delattr(namespace, name)
    validate(namespace)
    assert not wants_graphs(namespace)


@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        ("", False),
        ("--use-megatron-fsdp", False),
        ("--cuda-graph-impl transformer_engine", False),
        ("--use-megatron-fsdp --cuda-graph-impl full_iteration", False),
        ("--use-megatron-fsdp --cuda-graph-modules full_iteration", False),
        ("--use-megatron-fsdp --cuda-graph-impl transformer_engine", True),
        ("--use-megatron-fsdp --cuda-graph-impl local", True),
        ("--use-megatron-fsdp --external-cuda-graph", True),
    ],
)
def test_wants_graphs(argv: str, expected: bool) -> None:
    assert wants_graphs(parse(*argv.split())) is expected


def test_a_yaml_namespace_wants_no_graphs() -> None:
    assert not wants_graphs(argparse.Namespace(yaml_cfg="run.yaml"))


def test_the_good_arguments_are_valid_and_silent(caplog: pytest.LogCaptureFixture) -> None:
    validate(parse(*GOOD_ARGV), GOOD_ENVIRONMENT)
    assert caplog.records == []


def test_all_violations_of_a_bad_command_line_in_one_error() -> None:
    bare = (
        "--use-megatron-fsdp --cuda-graph-impl transformer_engine --cuda-graph-modules mlp "
        "--num-layers 2 --num-experts 4 --cg-layers attn:0 mlp"
    )
    with pytest.raises(ConfigurationError) as caught:
        validate(parse(*bare.split()), Environment())
    assert [violation.rule for violation in caught.value.violations] == [
        "double-buffer",
        "persistent-fallback",
        "scope-selects-nothing",
        "cg-layers",
        "cg-layers",
        "transformer-engine-version",
        "megatron-core-version",
    ]
    text = str(caught.value)
    assert "7 reasons" in text
    assert "add --fsdp-double-buffer" in text
    assert "type --cuda-graph-modules mlp attn" in text


def test_our_flags_without_graphs_are_refused() -> None:
    with pytest.raises(ConfigurationError, match="--cg-layers attn:0 with --cuda-graph-impl none"):
        validate(parse("--use-megatron-fsdp", "--cg-layers", "attn:0"), GOOD_ENVIRONMENT)


def test_recording_an_eager_run_is_allowed() -> None:
    validate(parse("--use-megatron-fsdp", "--cg-record", "folder"), Environment())


def test_an_eager_run_may_compute_experts_by_torchs_grouped_gemm() -> None:
    words = "--num-experts 8 --moe-grouped-gemm --disable-bias-linear --bf16".split()
    validate(parse("--cg-grouped-gemm", "torch", *words), Environment())
    with pytest.raises(ConfigurationError, match="without --bf16"):
        validate(parse("--cg-grouped-gemm", "torch", *words[:-1]), Environment())


@pytest.mark.parametrize(("rank", "lines"), [(0, 1), (1, 0)])
def test_notices_go_to_the_log_of_rank_0(
    rank: int, lines: int, caplog: pytest.LogCaptureFixture
) -> None:
    argv = [argument for argument in GOOD_ARGV if argument != "--te-rng-tracker"]
    namespace = parse(*argv)
    namespace.rank = rank
    with caplog.at_level(logging.WARNING):
        validate(namespace, GOOD_ENVIRONMENT)
    assert len(caplog.records) == lines
    assert all("--te-rng-tracker" in record.getMessage() for record in caplog.records)


def test_the_real_environment_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "expandable_segments:True")
    monkeypatch.delenv("NCCL_GRAPH_REGISTER", raising=False)
    environment = Environment.read(backend="tape")
    assert environment.versions["torch"].split("+")[0] == torch.__version__.split("+")[0]
    assert environment.variables["PYTORCH_ALLOC_CONF"] == "expandable_segments:True"
    assert "NCCL_GRAPH_REGISTER" not in environment.variables
    assert environment.backend == "tape"


def test_a_missing_package_is_absent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megatron_cg.arguments.schema.installed_version", lambda name: None)
    assert Environment.read().versions == {}


def test_every_setting_says_what_it_is() -> None:
    for kind in (RunArguments, GraphArguments):
        assert all(field.metadata["help"] for field in dataclasses.fields(kind))
