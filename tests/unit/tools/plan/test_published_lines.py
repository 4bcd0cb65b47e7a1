"""Launch lines that people publish: what is changed, that it is complete, and what is captured."""

from dataclasses import dataclass
from pathlib import Path

import pytest
import yaml

from megatron_cg.tools.plan.report import changes
from tests.unit.tools.plan.conftest import Plan, said


@dataclass(frozen=True)
class Published:
    line: str
    gpus: int
    billions: float
    scopes: str
    layers: int
    flags: str = ""
    dropped: str = ""
    memory: int = 79


FILE = Path(__file__).with_name("published_lines.yaml")
PUBLISHED = {
    name: Published(**fields) for name, fields in yaml.safe_load(FILE.read_text("utf-8")).items()
}
ALWAYS = (
    "--use-megatron-fsdp --ckpt-format fsdp_dtensor --fsdp-double-buffer "
    "--fsdp-db-use-persist-buf-on-alloc-fail --no-gradient-accumulation-fusion "
    "--no-create-attention-mask-in-dataloader --te-rng-tracker -m megatron_cg"
)


def words(line: str) -> set[str]:
    return {word for word in line.replace("'", " ").split() if word.startswith("-")}


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_published_line_is_planned_right_in_one_round(name: str, plan: Plan) -> None:
    expected = PUBLISHED[name]
    found = plan(expected.line, expected.memory)
    best = found.best
    assert found.accepted, said(found)
    assert found.gpus.count == expected.gpus
    assert best.memory is not None
    whole, _, sharded = best.memory.parameters
    assert whole == pytest.approx(expected.billions * 1e9, rel=0.005)
    assert sharded == pytest.approx(whole / expected.gpus, rel=0.02)
    makes_masks = "attention-mask-in" not in expected.line
    assert ("each replay would copy one" in said(found)) is makes_masks
    assert " ".join(best.settings.run.cuda_graph_modules) == expected.scopes
    assert ("has not learned to balance" in said(found)) is ("rows" in expected.flags)
    assert ("Blackwell GPUs were not measured" in said(found)) is (expected.memory == 190)
    assert sum(bool(layer.captured) for layer in best.layers) == expected.layers
    line = str(best.line)
    assert words(f"{ALWAYS} {expected.flags}") <= words(line)
    assert not words(expected.dropped) & words(line)
    assert all(change.reason for change in changes(found))
    again = plan(line, expected.memory)
    assert again.accepted and changes(again) == []
    assert (again.gpus, again.best.layers) == (found.gpus, best.layers)
    assert (str(again.best.line), again.best.memory) == (line, best.memory)
