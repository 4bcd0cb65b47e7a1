"""Launch lines that people publish: what is changed, that it is complete, and what is captured."""

from dataclasses import dataclass

import pytest

from megatron_cg.tools.plan.report import changes
from tests.unit.tools.plan.conftest import Plan, said
from tests.unit.tools.plan.launch_lines import LINES


@dataclass(frozen=True)
class Expected:
    gpus: int
    billions: float
    """Parameters of the whole model, as published."""
    scopes: str
    on: int
    """How many layers have a graph."""
    flags: str = ""
    """Flags that the edited command has, beside those of every run."""
    dropped: str = ""
    memory: int = 79
    """GiB of a GPU that it needs."""


PIPELINE = "--pipeline-model-parallel-size"
PEER = "--cg-grouped-gemm torch --cg-moe-exchange peer"
EXPECTED = {
    "Llama 3 8B, FSDP, FP8": Expected(8, 8.03, "attn mlp", 32, "--keep-fp8-transpose-cache"),
    "Llama 3 70B, pipeline": Expected(
        64, 70.6, "attn mlp", 80, "--use-megatron-fsdp --tp-comm-overlap", PIPELINE
    ),
    "Llama 3 70B, FSDP, recompute": Expected(
        64, 70.6, "attn mlp", 80, "--recompute-granularity full"
    ),
    "Qwen3 30B-A3B, FSDP, MXFP8": Expected(
        16, 30.5, "attn moe_router", 48, "", "--fp8-param-gather", memory=190
    ),
    "Qwen3 30B-A3B, pipeline, BF16": Expected(
        32, 30.5, "attn moe", 48, f"{PEER} --cg-moe-rows 1.25", PIPELINE
    ),
    "Qwen3 235B-A22B, pipeline, DeepEP": Expected(
        256, 235.1, "moe_router moe_preprocess", 94, "", f"{PIPELINE} --delay-wgrad-compute"
    ),
    "DeepSeek-V3, FSDP, HybridEP": Expected(1024, 682.6, "attn mlp moe_router", 62, memory=139),
    "GPT-OSS 120B, BF16": Expected(64, 116.8, "attn moe_router moe_preprocess", 36, "", PIPELINE),
    "Nemotron hybrid, FSDP": Expected(
        64, 31.6, "mamba attn moe_router", 52, "", "--check-weight-hash-across-dp-replicas-interval"
    ),
}
ALWAYS = (
    "--use-megatron-fsdp --ckpt-format fsdp_dtensor --fsdp-double-buffer "
    "--fsdp-db-use-persist-buf-on-alloc-fail --no-gradient-accumulation-fusion "
    "--no-create-attention-mask-in-dataloader --te-rng-tracker -m megatron_cg"
)


def words(line: str) -> set[str]:
    return {word for word in line.replace("'", " ").split() if word.startswith("-")}


@pytest.mark.parametrize("name", EXPECTED)
def test_a_published_line_is_planned_right_in_one_round(name: str, plan: Plan) -> None:
    expected = EXPECTED[name]
    found = plan(LINES[name], expected.memory)
    best = found.best
    assert found.accepted, said(found)
    assert found.gpus.count == expected.gpus
    assert best.memory is not None
    whole, _, sharded = best.memory.parameters
    assert whole == pytest.approx(expected.billions * 1e9, rel=0.005)
    assert sharded == pytest.approx(whole / expected.gpus, rel=0.02)
    makes_masks = "attention-mask-in" not in LINES[name]
    assert ("each replay would copy one" in said(found)) is makes_masks
    assert " ".join(best.settings.run.cuda_graph_modules) == expected.scopes
    assert ("has not learned to balance" in said(found)) is ("rows" in expected.flags)
    assert ("Blackwell GPUs were not measured" in said(found)) is (expected.memory == 190)
    assert sum(bool(layer.captured) for layer in best.layers) == expected.on
    line = str(best.line)
    assert words(f"{ALWAYS} {expected.flags}") <= words(line)
    assert not words(expected.dropped) & words(line)
    assert all(change.reason for change in changes(found))
    again = plan(line, expected.memory)
    assert again.accepted and changes(again) == []
    assert (again.gpus, again.best.layers) == (found.gpus, best.layers)
    assert (str(again.best.line), again.best.memory) == (line, best.memory)
