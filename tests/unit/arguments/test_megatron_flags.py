"""What we read of Megatron: its real parser's namespace, and the real configs of a model."""

import argparse
import copy
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.optimizer import OptimizerConfig
from megatron.core.transformer.enums import CudaGraphModule
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.training import arguments

from megatron_cg.arguments.megatron import (
    add_arguments,
    read_graph,
    read_run,
    run_of,
    validate,
    wants_graphs,
)
from megatron_cg.arguments.schema import Environment, GraphArguments, RunArguments
from megatron_cg.errors import ConfigurationError, UpstreamChangedError
from tests.unit.arguments.good_configuration import GOOD_ARGV, GOOD_ENVIRONMENT, GOOD_RUN, parse


def test_help_texts_of_megatron_that_argparse_cannot_format_are_mended() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--bare", help="headroom of 10%)")
    parser.add_argument("--right", default=3, help="%(default)s of 10%%")
    with pytest.raises(ValueError, match="unsupported format character"):
        parser.format_help()
    text = add_arguments(parser).format_help()
    assert "headroom of 10%)" in text and "3 of 10%\n" in text


def test_our_flags_are_read() -> None:
    line = "--cg-layers attn:0-3,8 moe_router:4- --cg-verify-interval 100 --cg-no-fsdp-fast-path"
    assert read_graph(parse(*line.split())) == GraphArguments(
        cg_layers=("attn:0-3,8", "moe_router:4-"), cg_verify_interval=100, cg_no_fsdp_fast_path=True
    )


@pytest.mark.parametrize("words", ["--cg-verify-interval -1", "--cg-verify-steps -3"])
def test_a_flag_refuses_what_its_argument_refuses(
    words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        parse(*words.split())
    assert "is not a whole number from 0 on" in capsys.readouterr().err


def test_our_defaults_are_those_of_megatrons_parser() -> None:
    assert (read_run(parse()), read_graph(parse())) == (RunArguments(), GraphArguments())


def test_a_setting_of_a_later_release_may_be_missing() -> None:
    namespace = parse()
    vars(namespace).pop("moe_use_grouped_tensor", None)
    assert read_run(namespace) == RunArguments()
    namespace.moe_use_grouped_tensor = True
    assert read_run(namespace).moe_use_grouped_tensor


def test_the_good_arguments_are_the_good_run(caplog: pytest.LogCaptureFixture) -> None:
    assert read_run(parse(*GOOD_ARGV)) == GOOD_RUN
    validate(parse(*GOOD_ARGV), GOOD_ENVIRONMENT)
    assert caplog.records == []


BALANCING = "moe_router_load_balancing_type"


@pytest.mark.parametrize(
    ("argv", "field", "expected"),
    [
        ("--use-nccl-ub", "fsdp_double_buffer", True),
        ("--megatron-fsdp-max-pool-double-buffer", "fsdp_double_buffer", True),
        ("--cuda-graph-modules attn mlp", "cuda_graph_modules", ("attn", "mlp")),
        ("--cuda-graph-scope attn", "cuda_graph_modules", ("attn",)),
        ("--cuda-graph-modules full_iteration", "cuda_graph_impl", "full_iteration"),
        ("--external-cuda-graph", "cuda_graph_impl", "transformer_engine"),
        ("--enable-cuda-graph", "cuda_graph_impl", "local"),
        ("--encoder-num-layers 6", "num_layers", 6),
        ("--num-layers 7 --hybrid-layer-pattern M*|M-/MM", "num_layers", 4),
        ("--hybrid-override-pattern M*", "hybrid_layer_pattern", "M*"),
        ("--moe-layer-freq [0]+[1]*2", "moe_layer_freq", (0, 1, 1)),
        ("--moe-router-load-balancing-type sinkhorn", BALANCING, ("sinkhorn",)),
        (
            "--moe-router-load-balancing-type aux_loss global_aux_loss",
            BALANCING,
            ("aux_loss", "global_aux_loss"),
        ),
        ("--spec some.module some_function", "custom_layers", True),
        ("--heterogeneous-layers-config-path c.json", "custom_layers", True),
        ("--recompute-activations", "recompute_granularity", "selective"),
        ("--moe-layer-recompute", "recompute_granularity", "selective"),
        ("--moe-layer-recompute", "recompute_modules", ("core_attn", "moe")),
        ("--sft", "packs_sequences", True),
        ("--position-embedding-type rope", "rotates_positions", True),
        ("--no-rope-fusion", "apply_rope_fusion", False),
        ("--micro-batch-size 2", "micro_batch_size", 2),
        ("--context-parallel-size 2", "context_parallel_size", 2),
        ("--fp8-format hybrid", "fp8", "hybrid"),
        ("--tensor-model-parallel-size 2", "expert_tensor_parallel_size", 2),
        ("--tensor-model-parallel-size 2 --sequence-parallel", "sequence_parallel", True),
    ],
)
def test_derived_settings(argv: str, field: str, expected: object) -> None:
    run = read_run(parse(*argv.split()))
    assert getattr(run, field) == expected != getattr(RunArguments(), field)


@pytest.mark.parametrize(
    "argv",
    [
        "--cuda-graph-modules full",
        "--cuda-graph-modules attn moe_router",
        "--cuda-graph-modules full_iteration",
    ],
)
def test_the_namespace_reads_the_same_after_megatrons_normalisation(argv: str) -> None:
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


@pytest.mark.parametrize("name", ["nccl_ub", "bf16", "cuda_graph_modules"])
def test_a_missing_attribute_of_megatron_is_named(name: str) -> None:
    namespace = parse(*GOOD_ARGV)
    delattr(namespace, name)
    with pytest.raises(UpstreamChangedError, match=rf"megatron-core .*args\.{name}"):
        validate(namespace, GOOD_ENVIRONMENT)


def test_a_run_without_graphs_needs_no_attribute_of_megatron() -> None:
    namespace = parse("--use-megatron-fsdp")
    for name in ("nccl_ub", "moe_layer_freq", "bf16"):
        delattr(namespace, name)
    validate(namespace)
    assert not wants_graphs(namespace)
    assert not wants_graphs(argparse.Namespace(yaml_cfg="run.yaml"))


@pytest.mark.parametrize(
    ("argv", "expected"),
    [
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


def test_all_violations_of_a_bad_command_line_in_one_error() -> None:
    bare = (
        "--use-megatron-fsdp --cuda-graph-impl transformer_engine --cuda-graph-modules mlp "
        "--num-layers 2 --num-experts 4 --cg-layers attn:0 mlp"
    )
    with pytest.raises(ConfigurationError, match="7 reasons") as caught:
        validate(parse(*bare.split()), Environment())
    rules = "double-buffer persistent-fallback gradient-accumulation-fusion scope-selects-nothing "
    rules += "cg-layers cg-layers transformer-engine-version"
    assert [violation.rule for violation in caught.value.violations] == rules.split()


@pytest.mark.parametrize(("rank", "lines"), [(0, 1), (1, 0)])
def test_notices_go_to_the_log_of_rank_0(
    rank: int, lines: int, caplog: pytest.LogCaptureFixture
) -> None:
    namespace = parse(*(argument for argument in GOOD_ARGV if argument != "--te-rng-tracker"))
    namespace.rank = rank
    validate(namespace, GOOD_ENVIRONMENT)
    assert ["--te-rng-tracker" in line.getMessage() for line in caplog.records] == [True] * lines


def test_the_real_environment_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "expandable_segments:True")
    monkeypatch.delenv("NCCL_GRAPH_REGISTER", raising=False)
    environment = Environment.read(backend="tape")
    assert environment.versions["torch"].split("+")[0] == torch.__version__.split("+")[0]
    assert environment.variables["PYTORCH_ALLOC_CONF"] == "expandable_segments:True"
    assert "NCCL_GRAPH_REGISTER" not in environment.variables


def config(**changes: Any) -> TransformerConfig:
    return TransformerConfig(num_layers=2, hidden_size=8, num_attention_heads=2, **changes)


def layer(*, moe: bool = False, attention: Any = None) -> Any:
    part = SimpleNamespace()
    return SimpleNamespace(is_moe_layer=moe, self_attention=attention or part, mlp=part)


def model(*layers: Any, **members: Any) -> Any:
    return SimpleNamespace(decoder=SimpleNamespace(layers=list(layers)), **members)


def test_values_come_from_all_three_configs() -> None:
    optimizer = OptimizerConfig()
    optimizer.optimizer_cuda_graph = True
    settings: dict[str, Any] = {"add_bias_linear": False, "num_moe_experts": 4, "bf16": True}
    run = run_of(
        model(layer(), layer(moe=True)),
        config(**settings, hidden_dropout=0.25),
        DistributedDataParallelConfig(fsdp_double_buffer=True, fp8_param_gather=True),
        optimizer,
    )
    # The layers that were built count, whatever moe_layer_freq says.
    assert run == RunArguments(
        use_megatron_fsdp=True,
        fsdp_double_buffer=True,
        fp8_param_gather=True,
        optimizer_cuda_graph=True,
        apply_rope_fusion=False,
        num_layers=2,
        num_experts=4,
        moe_layer_freq=(0, 1),
        add_bias_linear=False,
        hidden_dropout=0.25,
        bf16=True,
        gradient_accumulation_fusion=False,
        te_rng_tracker=run.te_rng_tracker,
    )


def test_a_hybrid_models_layers_are_those_of_its_pattern() -> None:
    run = run_of(model(hybrid_layer_pattern="MM*-/MM"), config(), DistributedDataParallelConfig())
    assert (run.hybrid_layer_pattern, run.num_layers) == ("MM*-/MM", 4)


@pytest.mark.parametrize(
    "built", [model(), model(layer(), layer(attention=IdentityOp())), SimpleNamespace()]
)
def test_layers_of_another_kind_are_not_guessed(built: Any) -> None:
    assert run_of(built, config(), DistributedDataParallelConfig()).custom_layers


def test_a_config_without_a_field_is_named() -> None:
    given = config()
    del given.num_moe_experts
    with pytest.raises(UpstreamChangedError, match="num_moe_experts"):
        run_of(model(), given, DistributedDataParallelConfig())
