"""The loops of ``tests/functional/own_loop.py`` on the CPU: gloo, and tapes as graphs.

Tensor parallel is not among them: Megatron's MoE demands sequence parallel, which torch's norm
cannot do.
"""

import dataclasses
import gc
import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_cg.backends.base import CaptureRequest
from megatron_cg.capture.guarded_capture import GuardedCapture
from megatron_cg.tape.fakes import replaced
from megatron_cg.tape.launch import run_processes
from megatron_cg.upstream.symbols import installed_version
from tests.functional.loops import ENABLED, EXPERTS, GROUPS, PREPROCESS, Run
from tests.functional.test_own_loop import check

STEPS, RANKS = 3, 2
ROUTER = ("moe_router",)
RUNS = {
    "default": (
        Run("bf16", PREPROCESS, ENABLED),
        Run("fp32", PREPROCESS, ENABLED),
        Run("fp32", ("attn",), ENABLED),
        Run("fp32", ROUTER, ENABLED),
    ),
    "ep2": (Run("bf16", PREPROCESS, ENABLED),),
    "dropless-ep2": (Run("bf16", EXPERTS, ENABLED),),
    "dropless-recompute": (Run("bf16", EXPERTS, ENABLED),),
    "dropless-rows": (Run("bf16", EXPERTS, ENABLED),),
    "dropless-stash": (Run("bf16", EXPERTS, ENABLED),),
    "mtp": (Run("fp32", PREPROCESS, ENABLED),),
    "mtp-repeated": (Run("fp32", PREPROCESS, ENABLED),),
    "v2": (Run("bf16", PREPROCESS, ENABLED), Run("fp32", ("attn",), ENABLED)),
    "v2-dropless-ep2": (Run("bf16", EXPERTS, ENABLED),),
    "v2-dropless-rows": (Run("bf16", EXPERTS, ENABLED),),
    "latent-attention": (Run("bf16", PREPROCESS, ENABLED),),
}
HERE = {name: runs for name, runs in RUNS.items() if not GROUPS[name].lacks}
CASES = [(group, run) for group, runs in RUNS.items() for run in runs]


def train(directory: Path) -> None:
    from megatron.core.models import backends

    from tests.functional.own_loop import train_all

    # What Megatron's router compiles takes longer than the steps.
    torch.compiler.set_stance("force_eager")
    attention, own = without_channels(backends.DotProductAttention), GuardedCapture.run

    def warmed_up_once(self: Any, request: CaptureRequest, *args: Any, **more: Any) -> Any:
        """Megatron's helper asks for four passes to warm up, for GPUs."""
        return own(self, dataclasses.replace(request, warmups=1), *args, **more)

    with (
        replaced(backends, "DotProductAttention", attention),
        replaced(GuardedCapture, "run", warmed_up_once),
    ):
        for name, runs in HERE.items():
            eager = [Run(dtype) for dtype in dict.fromkeys(run.dtype for run in runs)]
            folder = directory / name
            folder.mkdir(exist_ok=True)
            train_all(GROUPS[name], [*eager, *runs], STEPS, folder)
            # The models never go, and each run's end collects garbage.
            gc.freeze()


def without_channels(attention: Any) -> Any:
    """megatron-core's own attention, which takes MLA's channels of keys and values as TE's does.

    It ignores them: the channels of the values are those of a head here.
    """

    class Attention(attention):  # type: ignore[misc]
        def __init__(
            self, *args: Any, k_channels: int = 0, v_channels: int = 0, **named: Any
        ) -> None:
            super().__init__(*args, **named)

    # Like the one of TE, it is of a class that this package knows.
    Attention.__module__ = Attention.__init__.__module__ = attention.__module__
    return Attention


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, Any]]]:
    if installed_version("transformer-engine") is not None:
        pytest.skip("Megatron's optimizer takes TE's kernels where TE is, and they need a GPU")
    root = tmp_path_factory.mktemp("loops")
    run_processes(partial(train, root), RANKS)
    return {
        name: [json.loads((root / name / f"rank{r}.json").read_text()) for r in range(RANKS)]
        for name in HERE
    }


@pytest.mark.parametrize(("group", "run"), CASES, ids=[f"{g}-{r.name}" for g, r in CASES])
def test_losses_and_norms_are_equal_to_eager(
    results: dict[str, list[dict[str, Any]]], group: str, run: Run
) -> None:
    if GROUPS[group].lacks:
        pytest.skip(GROUPS[group].lacks)
    for found in results[group]:
        check(GROUPS[group], found[Run(run.dtype).name], found[run.name], STEPS)
