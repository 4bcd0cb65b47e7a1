"""The rules read the same of a preset's model as of its command line: dense, MoE, MLA, hybrid."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from megatron_cg.tools.align.presets import preset_names

ROOT = Path(__file__).resolve().parents[4]
NAMES = preset_names()
APART = (
    "moe_layer_freq",
    "te_rng_tracker",
    "gradient_ranks",
    "micro_batch_size",
)
"""The first is compared as the scopes of each layer, which a model shows directly.
Megatron does not pass the second from its flags to its config. The third is read of process
groups, and a model does not have the last."""


@pytest.fixture(scope="module")
def models() -> dict[str, Any]:
    words = [sys.executable, "-m", "tests.unit.tools.plan.read_models", *NAMES]
    ended = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr[-3000:]
    found: dict[str, Any] = json.loads(ended.stdout.splitlines()[-1])
    return found


@pytest.mark.parametrize("name", NAMES)
def test_the_model_says_what_its_command_line_says(models: dict[str, Any], name: str) -> None:
    flags, model = models[name]["flags"], models[name]["model"]
    assert {k: v for k, v in model.items() if k not in APART} == {
        k: v for k, v in flags.items() if k not in APART
    }
    of_flags, of_model = models[name]["layouts"]
    assert of_flags == of_model and of_model


@pytest.mark.parametrize("name", NAMES)
def test_the_model_is_not_refused(models: dict[str, Any], name: str) -> None:
    assert models[name]["refused"] == []
