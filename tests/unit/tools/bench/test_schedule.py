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
    Settings,
    run_environment,
)
from megatron_cg.tools.bench.runs.configurations import (
    DDP_GRAPHS,
    EAGER,
    GRAPHS,
)
from megatron_cg.tools.bench.runs.shapes import default_scopes, layer_count, with_layers

MOE, DENSE, HYBRID = (Settings(load_preset(n), 2) for n in ("qwen3-moe", "llama", "mamba-hybrid"))


def test_a_choice_of_configurations_is_kept_in_order() -> None:
    runs = schedule([MOE], "cutlass", [DDP_GRAPHS, GRAPHS], None)
    assert [run.configuration for run in runs] == [GRAPHS, DDP_GRAPHS]
    assert {run.settings.grouped_gemm for run in runs} == {"cutlass"}


@pytest.mark.parametrize("dimension", ["layers", "microbatches", "nproc"])
def test_a_scaling_run_grows_one_dimension_and_has_all_rounds_of_a_point_together(
    dimension: str,
) -> None:
    runs = schedule([DENSE], "default", None, parse_scale(f"{dimension}=4,8"), rounds=2)
    found = [(run.key[dimension], run.round, run.configuration) for run in runs]
    turns = [(1, EAGER), (1, GRAPHS), (2, GRAPHS), (2, EAGER)]
    assert found == [(size, *turn) for size in (4, 8) for turn in turns]
    assert {run.key["dimension"] for run in runs} == {dimension}


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


@pytest.mark.parametrize(("gemm", "value"), [("default", None), ("cutlass", "1")])
def test_the_environment_is_that_of_a_run_in_earnest(gemm: str, value: str | None) -> None:
    settings = Settings(MOE.preset, 2, grouped_gemm=gemm)
    inherited = {"NCCL_ALGO": "Tree", CUTLASS_VARIABLE: "1", "CUDA_DEVICE_MAX_CONNECTIONS": "1"}
    env = run_environment(settings, inherited, root=Path("/r"), cudnn=None, metrics=Path("/f"))
    assert env.get(CUTLASS_VARIABLE) == value
    assert env["NCCL_ALGO"] == "Tree" and "CUBLAS_WORKSPACE_CONFIG" not in env
    assert "CUDA_DEVICE_MAX_CONNECTIONS" not in env and env["PYTHONPATH"] == "/r"
    assert given(env) == (settings.windows, "/f")


def test_windows_follow_one_another_and_end_with_a_step_that_is_not_measured() -> None:
    windows = Windows(warmup=1, settle=2, timed=3, probed=0, sampled=1, profiled=1, native=True)
    assert given({VARIABLE: windows.variable("/f")}) == (windows, "/f")
    kinds = list(windows.kinds())
    assert kinds == "warmup settle settle timed timed timed sampled traced profiled tail".split()
    assert windows.steps == len(kinds) == sum(Counter(kinds).values())
    both = [kind for kind in Windows(profiled=2).kinds() if kind in ("traced", "profiled")]
    assert both == ["traced"] * 2 + ["profiled"] * 2
    timed = Windows(warmup=1, settle=2, timed=3, probed=0, sampled=0, profiled=0, native=False)
    assert windows.only_timed() == timed


@pytest.mark.parametrize("value", [None, "", "3", "[3]", '[{"nothing": 3}, "/f"]'])
def test_a_run_that_was_not_told_what_to_measure_says_so(value: str | None) -> None:
    environment = {} if value is None else {VARIABLE: value}
    with pytest.raises(BenchError, match="start this run by megatron-cg bench"):
        given(environment)
