"""``megatron-cg align``: the lines, data and environment of its runs, exit code, table and JSON."""

import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy
import pytest

from megatron_cg.tools.align import align_command, run
from megatron_cg.tools.record.compare import (
    DIFFERENT,
    FAILED,
    IDENTICAL,
    Comparison,
    Outcome,
    Value,
)
from tests.unit.interpreted import python
from tests.unit.tools.conftest import Cli
from tests.unit.tools.records import make_record, write

SAME = Value(0, 1, "lm loss", (1.0).hex(), (1.0).hex())
OTHER = Value(1, 2, "gradient norm", (1.0).hex(), (1.5).hex())


class Answer:
    """What the runs have as their outcome, and the command line of each by its name."""

    outcome = Outcome(Comparison(IDENTICAL, ""))

    def __init__(self) -> None:
        self.lines: dict[str, str] = {}

    def __call__(self, runs: Sequence[run.Run], timeout: float) -> Outcome:
        self.lines.update({one.name: " ".join(one.words) for one in runs})
        return self.outcome


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> Iterator[Answer]:
    monkeypatch.setattr(run, "python_text", lambda *_: Path("text"))
    monkeypatch.setattr(run, "gpu_count", lambda: 4)
    monkeypatch.setattr(run, "run_and_compare", answer := Answer())
    yield answer


@pytest.mark.parametrize(
    ("comparison", "code", "shown"),
    [
        (Comparison(IDENTICAL, "", (SAME,), 4), 0, "IDENTICAL, to the last bit"),
        (Comparison(DIFFERENT, "first at step 2", (OTHER,), 4, ("w",)), 1, "first at step 2"),
        (Comparison(FAILED, "the graphs run ended"), 3, "FAILED: the graphs run ended"),
    ],
)
def test_the_verdict_is_the_exit_code(
    comparison: Comparison, code: int, shown: str, asked: Answer, cli: Cli
) -> None:
    asked.outcome = Outcome(comparison)
    ended = cli("align --backend tape")
    assert ended.code == code and shown in ended.out
    ended = cli("align --backend tape --json")
    facts = json.loads(ended.out)
    assert ended.code == code
    assert (facts["status"], facts["reason"]) == (comparison.status, comparison.reason)


def test_the_table_shows_numbers_differences_and_shards(
    asked: Answer, cli: Cli, tmp_path: Path
) -> None:
    shards = tuple(f"rank 0 main:w{index}" for index in range(7))
    comparison = Comparison(DIFFERENT, "why", (SAME, OTHER), 9, shards, {"captured": 3})
    asked.outcome = Outcome(comparison, log_tail="[the end]", graphed={})
    out = cli("align --backend tape --work-dir", tmp_path / "a folder").out
    assert "gradient norm (rank 1)" in out and "5.000e-01" in out and "differ" in out
    assert "9, different: 7" in out and "main:w4" in out and "main:w5" not in out
    assert "3 captured" in out and "[the end]" in out
    assert "CPU tape: a recording of ATen operations replaces the CUDA graph" in out


@pytest.mark.parametrize(
    ("off", "code", "said"),
    [(None, 0, "IDENTICAL, to the last bit"), (17, 1, "DIFFERENT: first difference at step 17")],
)
def test_two_records_are_compared_without_training(
    off: int | None, code: int, said: str, cli: Cli, tmp_path: Path
) -> None:
    eager = write(tmp_path / "eager", *[make_record(graphs=False)] * 2)
    graphs = write(tmp_path / "graphs", *[make_record(off=off)] * 2)
    ended = cli("align --records", eager, graphs)
    assert ended.code == code and said in ended.out and "2 mismatched" in ended.out
    assert json.loads(cli("align --json --records", eager, graphs).out)["shards"] == 4
    ended = cli("align --records", graphs, eager)
    assert ended.code == 3 and "the graph run captured no graph" in ended.out
    ended = cli("align --records", eager, tmp_path)
    assert ended.code == 2 and "holds no record" in ended.err
    ended = cli("align --records", eager, graphs, "--", "--lr")
    assert ended.code == 2 and "--records trains nothing: leave out --lr" in ended.err


def test_the_runs_on_gpus_differ_in_the_flags_about_graphs_alone(asked: Answer, cli: Cli) -> None:
    line = "align --preset mixtral-tiny --backend native --steps 14 --warmup-steps 2 --nproc 4 "
    line += "--scopes moe_router -- --cg-grouped-gemm torch --seed 7 --cg-layers moe:0-1 attn:2 "
    line += "--cg-no-fsdp-fast-path --lr=1 --cg-on-mismatch=error --x -1 --save a/{run} --preset --"
    assert cli(line).code == 0
    eager, graphs = (asked.lines[name].split() for name in ("eager", "graphs"))
    start = graphs.index("--cuda-graph-impl")
    end = graphs.index("--cg-grouped-gemm")
    assert " ".join(graphs[start:end]) == (
        "--cuda-graph-impl transformer_engine --cuda-graph-modules moe_router "
        "--cuda-graph-warmup-steps 2 --cg-verify-steps 3 --fsdp-double-buffer "
        "--fsdp-db-use-persist-buf-on-alloc-fail --cg-backend native --cg-layers moe:0-1 attn:2 "
        "--cg-no-fsdp-fast-path --cg-on-mismatch error"
    )
    without = [*graphs[:start], "--cuda-graph-impl", "none", *graphs[end:]]
    assert eager == [word.replace("/graphs", "/eager") for word in without]
    # What the user gave comes last, so that it wins.
    given = "--cg-grouped-gemm torch --seed 7 --lr 1 --x -1 --save a/eager --preset -- --cg-record"
    assert given in " ".join(eager) and eager.index("--seed") < start and eager[-1][0] == "/"
    for words in asked.lines.values():
        assert "--nproc-per-node 4" in words and "--train-iters 14" in words
        assert "pretrain_gpt.py" in words and "--num-experts" in words and "--bf16" in words


def test_a_plan_without_bf16_trains_in_fp32() -> None:
    plan = run.Plan(Path("train.py"), 2, ("--num-layers", "2"), 12, bf16=False)
    assert "--bf16" not in run.arguments(plan, graphs=False, data=[], record=Path("/r"))


def test_scopes_are_the_presets_unless_given(asked: Answer, cli: Cli) -> None:
    line = "align --preset qwen3-moe --backend transformer_engine"
    cli(line)
    assert "--cuda-graph-modules attn moe_router --cuda-graph-warmup" in asked.lines["graphs"]
    cli(f"{line} --scopes")  # whole layers
    assert "--cuda-graph-impl transformer_engine --cuda-graph-warmup" in asked.lines["graphs"]


def test_megatron_fsdp_v2_has_flags_of_its_own(
    asked: Answer, cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(align_command, "installed_version", lambda _: "0.20.0")
    cli("align --backend transformer_engine --megatron-fsdp-version 2")
    for words in asked.lines.values():
        assert "--megatron-fsdp-version 2" in words and "--cuda-graph-impl" in words
        assert "--use-distributed-optimizer" not in words and "--fsdp-d" not in words
    cli("align --backend tape --megatron-fsdp-version 2")
    assert all('"megatron_fsdp_version": 2' in words for words in asked.lines.values())


def test_the_runs_on_the_tape_differ_in_graphs_alone(asked: Answer, cli: Cli) -> None:
    assert not cli(
        "align --preset mixtral-tiny --scopes attn moe_router --nproc 640 --backend tape"
    ).code
    eager, graphs = asked.lines["eager"], asked.lines["graphs"]
    assert eager.replace('"graphs": false', '"graphs": true') == graphs.replace(
        "graphs/record", "eager/record"
    )
    assert '"graph_modules": ["attn", "moe_router"]' in graphs and " 640 " in graphs


@pytest.mark.parametrize(
    ("gpus", "line", "message"),
    [
        (4, "--preset nope", "there is no preset 'nope'; there are "),
        (0, "--preset mamba-hybrid-tiny", "cannot be built on a CPU"),
        (0, "--script x.py", "cannot take --script x.py"),
        (0, "-- --seed 1", "cannot take --seed 1"),
        (0, "--scopes moe_router", "llama-tiny has no moe_router to capture"),
        (0, "--preset mixtral --scopes mamba moe", "has no mamba and moe to capture"),
        (4, "--script x.py", "x.py: there is no such file"),
        (0, "--megatron-fsdp-version 2", "needs megatron-core 0.20, and here is 0.19"),
        (1, "--nproc 2", "and 1 can be seen: give a smaller --nproc, or --backend tape"),
        (0, "--nproc 2 --backend native", "and 0 can be seen: give --backend tape"),
    ],
)
def test_what_cannot_be_run_is_refused_with_code_2(
    gpus: int, line: str, message: str, asked: Answer, cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run, "gpu_count", lambda: gpus)
    ended = cli(f"align {line}")
    assert ended.code == 2 and message in ended.err and not asked.lines


def test_the_environment_is_deterministic_and_finds_the_package() -> None:
    inherited = {"CUDA_DEVICE_MAX_CONNECTIONS": "1", "NCCL_ALGO": "Tree", "PYTHONPATH": "/x"}
    env = run.environment(inherited | {"HOME": "/h", "CUDNN_HOME": "/mine"})
    assert env["PYTHONPATH"] == f"{run.PACKAGE.parent}:/x" and env["HOME"] == "/h"
    assert env["NCCL_ALGO"] == "Ring" and env["NVTE_ALLOW_NONDETERMINISTIC_ALGO"] == "0"
    assert "CUDA_DEVICE_MAX_CONNECTIONS" not in env and env["CUDNN_HOME"] == "/mine"


def test_the_runs_use_torchs_own_cudnn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "nvidia" / "cudnn").mkdir(parents=True)
    code = "from megatron_cg.tools.align.run import environment as e; print(e({})['CUDNN_HOME'])"
    monkeypatch.delenv("PYTHONPATH", raising=False)
    path = f"{run.PACKAGE.parent}:{tmp_path}"
    assert python(code, PYTHONPATH=path).stdout == f"{tmp_path}/nvidia/cudnn\n"


def test_the_runs_share_no_compiled_code_of_other_row_counts() -> None:
    """Torch's caches on disk hold kernels that were chosen for the rows of another process."""
    script = (
        "import torch._inductor.config as inductor, torch._functorch.config as functorch; "
        "print(inductor.fx_graph_cache, functorch.enable_autograd_cache)"
    )
    assert python(script, **run.environment(os.environ)).stdout.split() == ["False", "False"]


def test_the_data_are_pythons_sources_a_byte_a_token(tmp_path: Path) -> None:
    from megatron.core.datasets.indexed_dataset import IndexedDataset

    prefix = run.python_text(tmp_path / "data", limit=100_000)
    dataset = IndexedDataset(str(prefix))
    sizes = [len(document) for document in dataset]
    assert sum(sizes[:-1]) < 100_000 + len(sizes) and sum(sizes) > 100_000
    files = sorted(Path(os.__file__).parent.glob("*.py"))[: len(sizes)]
    for document, file in zip(dataset, files, strict=True):
        assert list(document) == [*file.read_bytes(), run.END_OF_DOCUMENT]
    assert list(dataset.document_indices) == [*range(len(sizes) + 1)]
    assert dataset.index.dtype is numpy.uint16
    flags = run.data_flags(prefix, tmp_path / "cache")
    assert flags[:2] == ["--data-path", str(tmp_path / "data" / "text")]
    assert flags[flags.index("--null-tokenizer-eod-id") + 1] == "256"
