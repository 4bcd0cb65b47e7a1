"""Parts of the fast path are left out one at a time, and the table says what a step loses."""

from __future__ import annotations

import io
import re
import shlex
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from megatron_cg.arguments.fast_path_parts import PARTS, mistakes
from megatron_cg.tools.bench.measure import eager_fast_path
from megatron_cg.tools.bench.measure.eager_fast_path import EagerFastPath, given_parts, variable
from megatron_cg.tools.bench.results.ablation import (
    COLUMNS,
    TITLE,
    ablation_lines,
    bookkeeping,
    losses,
)
from megatron_cg.tools.bench.results.bench_page import page
from megatron_cg.tools.bench.results.markdown import as_markdown
from megatron_cg.tools.bench.results.metrics import tables
from megatron_cg.tools.bench.results.summary import print_summary
from megatron_cg.tools.bench.runs.configurations import (
    ABLATIONS,
    EAGER,
    EAGER_FAST_PATH,
    GRAPHS,
    PLAIN,
    ablation,
)
from megatron_cg.tools.cli.main import main
from tests.unit.tools.bench.test_command_line import TAPE, bench, runs_in

Make = Callable[..., dict[str, Any]]


def planned(words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> dict[str, list[str]]:
    """The words of each run's command, with its environment, by configuration."""
    command = f"bench --backend transformer_engine --dry-run {words} --out {tmp_path}"
    assert main(command.split()) == 0
    lines = capsys.readouterr().out.splitlines()
    names = [line.split(":")[0].rpartition(".")[2] for line in lines if line.startswith("# llama")]
    names += [line.split(":")[0].rpartition(".")[2] for line in lines if line.startswith("# qwen")]
    commands = [shlex.split(line) for line in lines if "torch.distributed.run" in line]
    return dict(zip(names, commands, strict=True))


def test_every_part_is_left_out_once_with_the_parts_that_need_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    runs = planned("--shapes qwen3-moe --ablate-fast-path", tmp_path, capsys)
    assert list(runs) == [EAGER, EAGER_FAST_PATH, GRAPHS, PLAIN, *map(ablation, PARTS)]
    for part in PARTS:
        words = runs[ablation(part)]
        chosen = words[words.index("--cg-fast-path") + 1].split(",")
        assert part not in chosen and not list(mistakes(chosen))
    assert "--cg-no-fsdp-fast-path" in runs[PLAIN]
    assert not {"--cg-no-fsdp-fast-path", "--cg-fast-path"} & set(runs[GRAPHS])
    installs = [
        name for name, words in runs.items() if f"{eager_fast_path.VARIABLE}=" in str(words)
    ]
    assert installs == [EAGER, EAGER_FAST_PATH]
    assert f"{eager_fast_path.VARIABLE}={','.join(PARTS)}" in runs[EAGER_FAST_PATH]
    assert f"{eager_fast_path.VARIABLE}=" in runs[EAGER]


def test_parts_can_be_named_and_a_dense_model_has_no_grouped_gemm(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = "--shapes llama --ablate-fast-path swap,gemm-heuristics"
    runs = planned(words, tmp_path, capsys)
    assert list(runs) == [EAGER, EAGER_FAST_PATH, GRAPHS, PLAIN, ablation("swap")]


def test_the_tape_trains_the_same_with_the_fast_path_alone_and_without_a_part(
    tmp_path: Path,
) -> None:
    part = ablation("unshard")
    words = f"{TAPE} --warmup-steps 1 --probe-steps 1 --only {EAGER},{EAGER_FAST_PATH},{part}"
    assert bench(words, tmp_path) == 0
    ranks = [run["ranks"][0] for run in runs_in(tmp_path)]
    assert len({rank["timed"]["loss"] for rank in ranks}) == 1
    waits = [
        next(row["calls"] for row in rank["probed"]["phases"] if row["phase"] == "unshard: wait")
        for rank in ranks
    ]
    # Unsharding waits once a bucket instead of once a parameter, unless that part is left out.
    assert 2 * waits[1] < min(waits[0], waits[2])


@pytest.fixture
def rows(result: Make) -> list[Any]:
    """Two rounds, in which a step is 10 to 20% longer without a part."""
    slower = {
        EAGER: 3.0,
        EAGER_FAST_PATH: 2.0,
        GRAPHS: 1.0,
        PLAIN: 1.5,
        ablation("swap"): 1.1,
        ablation("gradients"): 1.2,
    }
    runs = []
    for name, factor in slower.items():
        for number, step in enumerate((100.0, 200.0), 1):
            more = 0.02 if number == 2 and name == ablation("swap") else 0.0
            made = result(name, (step * (factor + more),) * 3, round=number)
            runs.append(made)
    (table,) = tables(runs)
    return table


def test_a_loss_is_relative_to_all_parts_in_the_same_round(rows: list[Any]) -> None:
    found = {loss.left_out: loss for loss in losses(rows)}
    assert list(found) == [
        "the graphs, but no part",
        "all parts",
        "gradients, with detached-weights, detached-weights-of-graphs, deferred-prefetch",
        "swap",
    ]
    swap = found["swap"]
    # Graphs took 100 and 200 ms, so 150 in the middle.
    assert swap.ratio.median == pytest.approx(1.11) and swap.ms == pytest.approx(16.5)
    assert swap.cells() == ["swap", "+16.50", "+11.0", "+10.0 to +12.0", "+0.00"]


def test_the_report_has_the_table_and_leaves_these_runs_out_of_the_others(
    rows: list[Any],
) -> None:
    text = as_markdown([result for row in rows for result in row.rounds])
    assert "| swap | +16.50 | +11.0 | +10.0 to +12.0 | +0.00 |" in text
    matrix = next(line for line in text.splitlines() if line.startswith("| step of / to"))
    phases = next(line for line in text.splitlines() if line.startswith("| phase [thread]"))
    assert GRAPHS in matrix and not any(name in matrix + phases for name in ABLATIONS)
    assert f"- `{ablation('swap')}`: {GRAPHS} without swap" in text
    assert ablation("unshard") not in text


def test_without_such_runs_there_is_no_table(result: Make) -> None:
    (table,) = tables([result(GRAPHS), result(EAGER), result(PLAIN)])
    assert ablation_lines(table) == []
    (alone,) = tables([result(ablation("swap"))])
    assert ablation_lines(alone) == []


def test_bookkeeping_is_neither_the_passes_nor_waiting(result: Make) -> None:
    phases = [
        {"phase": name, "thread": "main", "calls": 1.0, "ms": 9.0, "own_ms": own}
        for name, own in (
            *(("forward", 100.0), ("replay: launch", 50.0), ("unshard", 1.0)),
            *(("unshard: wait", 20.0), ("votes: post", 10.0)),
            *(("zero gradients", 2.0), ("optimizer step: update", 4.0)),
        )
    ]
    made = result(GRAPHS)
    made["ranks"][0]["probed"]["phases"] = phases
    ((row,),) = tables([made])
    assert bookkeeping(row) == 7.0
    del made["ranks"][0]["probed"]
    ((row,),) = tables([made])
    assert bookkeeping(row) is None


def test_an_eager_run_gets_its_parts_after_the_warmup_steps_and_loses_them_at_its_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    done: list[Any] = []
    path = SimpleNamespace(close=lambda: done.append("closed"))

    def installed(fsdp: str, **given: Any) -> Any:
        done.append((fsdp, given))
        return path

    monkeypatch.setattr(eager_fast_path, "install", installed)
    monkeypatch.setattr(eager_fast_path, "find_megatron_fsdp", lambda model: f"fsdp of {model}")
    model: Any = "model"
    fast_path = EagerFastPath(("swap", "gathers"), warmup_steps=2)
    for step in range(4):
        fast_path.before_step(lambda: (model, ["optimizer"]))
        assert len(done) == (step >= 2)
    given = {"optimizers": ["optimizer"], "model": "model", "parts": ("swap", "gathers")}
    assert done == [("fsdp of model", given)]
    fast_path.close()
    fast_path.close()
    assert done[1:] == ["closed"]


def test_the_parts_go_by_the_environment() -> None:
    assert given_parts(variable(("swap", "gathers"))) == ("swap", "gathers")
    assert given_parts(variable(())) == given_parts({}) == ()


def test_the_page_and_the_terminal_have_the_table(rows: list[Any]) -> None:
    made = [result for row in rows for result in row.rounds]
    text = page(made, [], [])
    found = re.findall(r"<table>.*?</table>", text, re.S)[1]
    cells = re.findall(r"<t[hd](?: [^>]*)?>(.*?)</t[hd]>", found)
    losing = [cell for loss in losses(rows) for cell in loss.cells()]
    assert cells == [*COLUMNS, *losing] and "compared with fsdp-graphs in the same round" in text
    for terminal in (False, True):
        out = io.StringIO()
        print_summary(made, Console(file=out, force_terminal=terminal, width=160))
        assert TITLE in out.getvalue() and "+10.0 to +12.0" in out.getvalue()


def test_the_page_and_the_terminal_have_no_table_without_such_runs(result: Make) -> None:
    made = [result(EAGER), result(GRAPHS)]
    out = io.StringIO()
    print_summary(made, Console(file=out))
    assert TITLE.capitalize() not in page(made, [], []) and TITLE not in out.getvalue()
