"""What may be typed after ``megatron-cg plan``."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron_cg.tools.align.presets import load_preset
from megatron_cg.tools.plan.request import RequestError, read_request


def after(words: tuple[str, ...], flag: str) -> list[str]:
    at = len(words) - 1 - words[::-1].index(flag)
    rest = list(words[at + 1 :])
    end = next((i for i, word in enumerate(rest) if word.startswith("--")), len(rest))
    return rest[:end]


def test_a_preset_brings_its_shape_scopes_and_gpus() -> None:
    preset = load_preset("mixtral-tiny")
    request = read_request("mixtral-tiny", ["--expert-model-parallel-size", "2"])
    assert request.words[: len(preset.arguments())] == tuple(preset.arguments())
    assert after(request.words, "--cuda-graph-modules") == list(preset.scopes)
    assert request.words[-2:] == ("--expert-model-parallel-size", "2")
    assert request.nproc == preset.nproc
    assert "--deterministic-mode" not in request.words and not request.own_flags


def test_what_is_no_flag_is_not_taken_for_a_scope() -> None:
    request = read_request("mixtral-tiny", ["pretrain_gpt.py", "--bf16"])
    assert "pretrain_gpt.py" not in after(request.words, "--cuda-graph-modules")


@pytest.mark.parametrize("target", ["mixtral-tiny", "examples/pretrain_gpt.py"])
def test_scopes_replace_those_of_the_flags(target: str) -> None:
    flags = ["--cuda-graph-modules", "attn", "mlp", "--bf16"]
    request = read_request(target, flags, scopes=["moe_router"], cg_layers=["moe_router:1-"])
    assert request.words.count("--cuda-graph-modules") == 1
    assert after(request.words, "--cuda-graph-modules") == ["moe_router"]
    assert after(request.words, "--cg-layers") == ["moe_router:1-"]
    assert "--bf16" in request.words
    whole = read_request(target, flags, scopes=[])
    assert "--cuda-graph-modules" not in whole.words and "mlp" not in whole.words


def test_a_scripts_flags_are_taken_as_they_are() -> None:
    request = read_request("examples/pretrain_gpt.py", ["--bf16"])
    assert (request.words, request.nproc, request.own_flags) == (("--bf16",), None, False)
    assert read_request("/somewhere/train.py", []).own_flags


@pytest.mark.parametrize(
    ("launcher", "nproc"),
    [
        ("torchrun --nproc-per-node 8", 8),
        ("torchrun --nproc_per_node=4 --nnodes=2", 8),
        ("torchrun --nproc-per-node gpu", None),
        ("python", None),
        ("srun -N 2 torchrun --nnodes 2 --nproc-per-node 8 -m megatron_cg", 16),
    ],
)
def test_what_stands_before_the_script_says_only_gpus_and_variables(
    launcher: str, nproc: int | None
) -> None:
    line = f"NCCL_GRAPH_REGISTER=0 {launcher} a/pretrain_gpt.py --lr 1 --bf16".split()
    request = read_request(None, line)
    assert request.words == ("--lr", "1", "--bf16")
    assert request.environment == {"NCCL_GRAPH_REGISTER": "0"}
    assert request.nproc == nproc
    assert read_request(None, line, nproc=32).nproc == 32


@pytest.mark.parametrize(("target", "extra"), [("llama-huge", []), (None, []), (None, ["--bf16"])])
def test_what_is_neither_is_refused_with_what_there_is(
    target: str | None, extra: list[str]
) -> None:
    with pytest.raises(RequestError, match="llama-tiny"):
        read_request(target, extra)


@pytest.mark.parametrize(
    ("command", "missing"),
    [
        ("torchrun --nproc-per-node 8", True),
        ("python -m torch.distributed.run", True),
        ("A=1 srun torchrun -m megatron_cg.other", True),
        ("torchrun -m megatron_cg", False),
        ("torchrun -mmegatron_cg", False),
        ("torchrun --module=megatron_cg", False),
        ("A=1 python -m torch.distributed.run --standalone --module megatron_cg", False),
        # Without a command it is unknown how the script is started.
        ("", False),
        ("A=1", False),
    ],
)
def test_a_launcher_that_is_missing_is_seen(command: str, missing: bool) -> None:
    request = read_request(None, [*command.split(), "a/train.py", "--bf16"])
    assert request.started_without == ("a/train.py" if missing else None)
    assert read_request("a/train.py", ["--bf16"]).started_without is None


def test_a_script_that_enables_this_package_needs_no_launcher(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("import megatron_cg\n\nmegatron_cg.enable()\n")
    assert read_request(None, ["torchrun", str(script)]).started_without is None
    script.write_text("import torch\n")
    assert read_request(None, ["torchrun", str(script)]).started_without == str(script)
