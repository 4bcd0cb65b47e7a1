"""Which runs are made, with which environment, and which steps of them are measured how."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from megatron_cg.tools.align.presets import load_preset
from megatron_cg.tools.bench import BenchError
from megatron_cg.tools.bench.measure.windows import VARIABLE, Windows, given
from megatron_cg.tools.bench.runs.bench_schedule import PlannedRun, parse_scale, schedule
from megatron_cg.tools.bench.runs.commands import (
    CUTLASS_VARIABLE,
    SCRIPT,
    Settings,
    command,
    run_environment,
)
from megatron_cg.tools.bench.runs.configurations import (
    CONFIGURATIONS,
    DDP_GRAPHS,
    EAGER,
    FULL,
    GRAPHS,
    without,
)
from megatron_cg.tools.bench.runs.shapes import default_scopes, layer_count, with_layers

MOE, DENSE, HYBRID = (Settings(load_preset(n), 2) for n in ("qwen3-moe", "llama", "mamba-hybrid"))


def test_runs_of_a_table_follow_one_another() -> None:
    runs = schedule([MOE, DENSE], "both", None, None)
    seen = [(run.key["shape"], run.key["grouped_gemm"], run.configuration) for run in runs]
    moe = [name for name in CONFIGURATIONS if name != FULL]
    expected = [("qwen3-moe", gemm, name) for gemm in ("default", "cutlass") for name in moe]
    assert seen == expected + [("llama", "default", name) for name in CONFIGURATIONS]
    assert len({run.name for run in runs}) == len(runs)


def test_every_other_round_of_a_table_is_in_reverse_order() -> None:
    names = [EAGER, GRAPHS, DDP_GRAPHS]
    runs = schedule([MOE, DENSE], "default", names, None, rounds=3)
    found = [(run.key["shape"], run.key["round"], run.configuration) for run in runs]
    orders = [(1, names), (2, names[::-1]), (3, names)]
    assert found == [
        (shape, number, name)
        for shape in ("qwen3-moe", "llama")
        for number, order in orders
        for name in order
    ]
    assert len({run.name for run in runs}) == len(runs)
    assert [run.name for run in runs[:4]][2:] == [
        "qwen3-moe.default.8layers-2mb-2gpus.ddp-graphs",
        "qwen3-moe.default.8layers-2mb-2gpus.ddp-graphs.round2",
    ]


def test_a_scaling_run_has_all_rounds_of_a_point_together() -> None:
    runs = schedule([DENSE], "default", None, parse_scale("layers=4,8"), rounds=2)
    found = [(run.key["layers"], run.round, run.configuration) for run in runs]
    turns = [(1, EAGER), (1, GRAPHS), (2, GRAPHS), (2, EAGER)]
    assert found == [(layers, *turn) for layers in (4, 8) for turn in turns]


def test_only_the_first_round_is_more_than_timed() -> None:
    windows = Windows(warmup=2, settle=3, timed=4, probed=5, sampled=6, profiled=7, native=True)
    settings = Settings(DENSE.preset, 2, windows=windows)
    first, second = schedule([settings], "default", [EAGER], None, rounds=2)
    assert first.settings.windows == windows
    timed = Windows(warmup=2, settle=3, timed=4, probed=0, sampled=0, profiled=0, native=False)
    assert second.settings.windows == timed
    assert second.seconds() < first.seconds()


def test_a_choice_of_configurations_is_kept_in_order() -> None:
    runs = schedule([MOE], "cutlass", ["ddp-graphs", GRAPHS], None)
    assert [run.configuration for run in runs] == [GRAPHS, "ddp-graphs"]
    assert {run.settings.grouped_gemm for run in runs} == {"cutlass"}
    with pytest.raises(BenchError, match=r"--only fsdp: there is no such configuration.*ddp-eager"):
        schedule([MOE], "default", ["fsdp"], None)
    with pytest.raises(BenchError, match="no configuration is left"):
        schedule([MOE], "default", [FULL], None)


@pytest.mark.parametrize(
    ("text", "sizes"),
    [
        ("layers=4,8", [("layers", 4), ("layers", 8)]),
        ("microbatches=1,4", [("microbatches", 1), ("microbatches", 4)]),
        ("nproc=1,2", [("nproc", 1), ("nproc", 2)]),
    ],
)
def test_a_scaling_run_grows_one_dimension(text: str, sizes: list[tuple[str, int]]) -> None:
    runs = schedule([DENSE], "default", None, parse_scale(text))
    found = [(run.dimension, run.key[str(run.dimension)], run.configuration) for run in runs]
    assert found == [(*size, name) for size in sizes for name in (EAGER, GRAPHS)]
    assert all(run.key["layers"] and run.key["microbatches"] for run in runs)


@pytest.mark.parametrize("text", ["layers", "layers=", "layers=0", "layers=4,x", "depth=4"])
def test_a_scale_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(BenchError, match="--scale layers=4,8,16"):
        parse_scale(text)


def test_longer_runs_are_expected_to_take_longer() -> None:
    short, long = (PlannedRun(Settings(MOE.preset, 2, layers=n), EAGER) for n in (4, 32))
    bare = PlannedRun(Settings(MOE.preset, 2, layers=4, windows=Windows(profiled=0)), EAGER)
    assert bare.seconds() < short.seconds() < long.seconds()


def test_layers_of_each_kind_grow() -> None:
    assert with_layers(DENSE.preset, 12).flags["num-layers"] == 12
    deep = with_layers(load_preset("deepseek-v3"), 16)
    assert deep.flags["moe-layer-freq"] == "([0]*1+[1]*15)"
    assert layer_count(deep) == 16
    grown = with_layers(HYBRID.preset, 20)
    assert grown.flags["hybrid-layer-pattern"] == "MM*-M-M-MM*-M-M-MM*-"
    assert layer_count(HYBRID.preset) == 8 and layer_count(grown) == 20
    with pytest.raises(BenchError, match="cannot have 1 layers"):
        with_layers(load_preset("deepseek-v3"), 1)


def test_scopes_are_as_many_as_a_shape_allows() -> None:
    assert default_scopes(MOE.preset) == ("attn", "moe_router", "moe_preprocess")
    assert default_scopes(DENSE.preset) == ("attn", "mlp")
    assert default_scopes(HYBRID.preset) == ("mamba", "attn")


def test_flags_are_left_out_with_their_values() -> None:
    words = ["--a", "1", "--b", "--c", "2", "3", "--d"]
    assert without(words, {"--a": 1, "--b": 0, "--c": 2}) == ["--d"]


@pytest.mark.parametrize(("gemm", "value"), [("default", None), ("cutlass", "1")])
def test_the_environment_is_that_of_a_run_in_earnest(gemm: str, value: str | None) -> None:
    settings = Settings(MOE.preset, 2, grouped_gemm=gemm)
    inherited = {"NCCL_ALGO": "Tree", CUTLASS_VARIABLE: "1", "CUDA_DEVICE_MAX_CONNECTIONS": "1"}
    env = run_environment(settings, inherited, root=Path("/r"), cudnn=None, metrics=Path("/f"))
    assert env.get(CUTLASS_VARIABLE) == value
    assert env["NCCL_ALGO"] == "Tree" and "CUBLAS_WORKSPACE_CONFIG" not in env
    assert "CUDA_DEVICE_MAX_CONNECTIONS" not in env and env["PYTHONPATH"] == "/r"
    assert given(env) == (settings.windows, "/f")


def test_the_command_runs_the_measured_example_by_the_launcher() -> None:
    words = command(Settings(DENSE.preset, 2, extra=("--seed", "7")), GRAPHS, ["--mock-data"])
    assert SCRIPT.is_file() and str(SCRIPT) in words
    assert words[words.index("-m", 3) : words.index(str(SCRIPT))] == ["-m", "megatron_cg"]
    assert words[words.index("--nproc-per-node") + 1] == "2"
    assert words[-2:] == ["--seed", "7"] and "--deterministic-mode" not in words


def test_windows_follow_one_another_and_end_with_a_step_that_is_not_measured() -> None:
    windows = Windows(warmup=1, settle=2, timed=3, probed=0, sampled=1, profiled=1, native=True)
    assert given({VARIABLE: windows.variable("/f")}) == (windows, "/f")
    kinds = list(windows.kinds())
    assert kinds == "warmup settle settle timed timed timed sampled traced profiled tail".split()
    assert windows.steps == len(kinds) == sum(Counter(kinds).values())
    both = [kind for kind in Windows(profiled=2).kinds() if kind in ("traced", "profiled")]
    assert both == ["traced"] * 2 + ["profiled"] * 2
    assert not {"traced", "profiled"} & set(Windows().only_timed().kinds())


@pytest.mark.parametrize("value", [None, "", "3", "[3]", '[{"nothing": 3}, "/f"]'])
def test_a_run_that_was_not_told_what_to_measure_says_so(value: str | None) -> None:
    environment = {} if value is None else {VARIABLE: value}
    with pytest.raises(BenchError, match="start this run by megatron-cg bench"):
        given(environment)
