"""The command lines, environments and data of the two runs."""

import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy
import pytest

from megatron_cg.errors import MegatronCGError
from megatron_cg.tools.align import run
from megatron_cg.tools.align.run import (
    END_OF_DOCUMENT,
    Plan,
    arguments,
    by_run,
    data_flags,
    environment,
    from_text,
    python_sources,
)
from tests.unit.interpreted import python

PLAN = Plan(
    script=Path("train.py"),
    nproc=2,
    model=("--num-layers", "2"),
    steps=12,
    scopes=("attn", "moe_router"),
    graph_extra=("--cg-layers", "attn:0-1"),
    extra=("--seed", "5", "--save", "/saved/{run}"),
)


def words(graphs: bool, plan: Plan = PLAN) -> list[str]:
    return arguments(plan, graphs=graphs, data=["--mock-data"], record=Path("/r"))


def value(flag: str, line: Sequence[str]) -> str:
    return line[line.index(flag) + 1]


def test_the_runs_differ_in_the_graph_flags_alone() -> None:
    eager, graphed = words(False), words(True)
    start = graphed.index("--cuda-graph-impl")
    flags = graphed[start : graphed.index("--seed", start)]
    assert " ".join(flags) == (
        "--cuda-graph-impl transformer_engine --cuda-graph-modules attn moe_router "
        "--cuda-graph-warmup-steps 3 --cg-verify-steps 3 --fsdp-double-buffer "
        "--fsdp-db-use-persist-buf-on-alloc-fail --cg-layers attn:0-1"
    )
    rest = [word.replace("/graphs", "/eager") for word in graphed[start + len(flags) :]]
    assert eager == [*graphed[:start], "--cuda-graph-impl", "none", *rest]
    assert value("--cg-record", eager) == "/r" and value("--nproc-per-node", eager) == "2"
    assert "--bf16" in eager and "--bf16" not in words(False, replace(PLAN, bf16=False))
    # No scope is the whole layer.
    assert "--cuda-graph-modules" not in words(True, replace(PLAN, scopes=()))


def test_extra_flags_come_last_so_that_they_win() -> None:
    line = words(True)
    assert line.index("--seed") < len(line) - 1 - line[::-1].index("--seed")
    assert line[-6:] == ["--seed", "5", "--save", "/saved/graphs", "--cg-record", "/r"]


def test_flags_about_graphs_are_for_the_graph_run_alone() -> None:
    given = ["--seed", "5", "--cg-verify-interval", "1", "--cg-grouped-gemm", "torch"]
    given += ["--cg-layers", "attn:0-1", "mlp:2", "--cg-no-fsdp-fast-path", "--lr=1", "--x", "-1"]
    both, of_graphs = by_run([*given, "--cg-on-mismatch=error"])
    assert " ".join(both) == "--seed 5 --cg-grouped-gemm torch --lr=1 --x -1"
    assert " ".join(of_graphs) == (
        "--cg-verify-interval 1 --cg-layers attn:0-1 mlp:2 --cg-no-fsdp-fast-path "
        "--cg-on-mismatch=error"
    )


def test_the_environment_is_deterministic_and_finds_the_package() -> None:
    inherited = {
        "CUDA_DEVICE_MAX_CONNECTIONS": "1",
        "NCCL_ALGO": "Tree",
        "PYTHONPATH": "/x",
        "HOME": "/h",
    }
    env = environment(inherited, Path("/cudnn"))
    chosen = environment({"CUDNN_HOME": "/mine"}, Path("/x"))
    assert chosen["CUDNN_HOME"] == "/mine"
    assert env["PYTHONPATH"] == f"{run.PACKAGE.parent}:/x" and env["HOME"] == "/h"
    assert env["NCCL_ALGO"] == "Ring" and env["NVTE_ALLOW_NONDETERMINISTIC_ALGO"] == "0"
    assert env["CUDNN_HOME"] == "/cudnn"
    assert "CUDA_DEVICE_MAX_CONNECTIONS" not in env


def test_the_runs_share_no_compiled_code_of_other_row_counts() -> None:
    """Torch's caches on disk hold kernels that were chosen for the rows of another process."""
    script = (
        "import torch._inductor.config as inductor, torch._functorch.config as functorch; "
        "print(inductor.fx_graph_cache, functorch.enable_autograd_cache)"
    )
    env = environment(os.environ)
    assert python(script, **env).stdout.split() == ["False", "False"]


def test_too_few_gpus_and_a_missing_script_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(MegatronCGError, match=r"train\.py: there is no such file"):
        run.check_gpus(PLAN)
    there = replace(PLAN, script=run.example_script())
    for gpus, smaller in ((1, "a smaller --nproc, or "), (0, "")):
        monkeypatch.setattr(run, "gpu_count", lambda gpus=gpus: gpus)
        told = f"--nproc 2 needs as many GPUs, and {gpus} can be seen: give {smaller}--backend tape"
        with pytest.raises(MegatronCGError, match=told):
            run.check_gpus(there)
    monkeypatch.setattr(run, "gpu_count", lambda: 2)
    run.check_gpus(there)


def test_bytes_are_tokens_and_files_are_documents(tmp_path: Path) -> None:
    from megatron.core.datasets.indexed_dataset import IndexedDataset

    one, two = tmp_path / "one", tmp_path / "two"
    one.write_bytes(bytes(range(256)))
    two.write_text("æ\0")
    prefix = from_text([one, two], tmp_path / "data")
    dataset = IndexedDataset(str(prefix))
    assert [list(document) for document in dataset] == [
        [*range(256), END_OF_DOCUMENT],
        [0xC3, 0xA6, 0, END_OF_DOCUMENT],
    ]
    assert list(dataset.document_indices) == [0, 1, 2]
    assert dataset.index.dtype is numpy.uint16
    flags = data_flags(prefix, tmp_path / "cache")
    assert flags[:2] == ["--data-path", str(tmp_path / "data" / "text")]
    assert flags[flags.index("--null-tokenizer-eod-id") + 1] == "256"


def test_the_default_text_is_pythons_library_and_ends_at_the_limit() -> None:
    files = python_sources(limit=100_000)
    assert files == sorted(files) and all(path.suffix == ".py" for path in files)
    sizes = [path.stat().st_size for path in files]
    assert sum(sizes[:-1]) < 100_000 <= sum(sizes)
