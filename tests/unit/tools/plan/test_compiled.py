"""A layer compiled from the flags of a run, and loaded by ranks whose model has the same flags."""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from megatron_cg.errors import ArtifactRefusedError, ConfigurationError, MegatronCGError
from megatron_cg.tools.align.command import BASE_FLAGS, DETERMINISTIC_ENVIRONMENT, GRAPH_FLAGS
from megatron_cg.tools.cli.main import main
from megatron_cg.tools.plan.compiled import layers_of, read_run
from tests.unit.ranks import on_ranks

SCRIPT = "examples/pretrain_gpt.py"
FLAGS = (
    *BASE_FLAGS,
    *GRAPH_FLAGS,
    *"--cuda-graph-impl transformer_engine --cuda-graph-warmup-steps 3 --train-iters 12".split(),
    *"--num-layers 2 --hidden-size 32 --ffn-hidden-size 64 --num-attention-heads 4".split(),
    *"--seq-length 16 --max-position-embeddings 16 --micro-batch-size 2 --vocab-size 64".split(),
    *"--swiglu --disable-bias-linear --position-embedding-type rope".split(),
    *"--group-query-attention --num-query-groups 2 --untie-embeddings-and-output-weights".split(),
    *"--mock-data --tokenizer-type NullTokenizer".split(),
    *"--attention-dropout 0 --hidden-dropout 0 --transformer-impl local".split(),
    *"--no-persist-layer-norm --no-masked-softmax-fusion --no-bias-swiglu-fusion".split(),
    *"--no-bias-dropout-fusion --cg-backend native --tensor-model-parallel-size 2".split(),
)


@pytest.fixture(scope="module", autouse=True)
def variables_restored() -> Iterator[None]:
    """Megatron sets TE's variables for the backend of attention, for all models of the process."""
    with patch.dict(os.environ):
        yield


VARIABLES = [f"{name}={value}" for name, value in DETERMINISTIC_ENVIRONMENT.items()]


def command(*more: str, without: str = "") -> list[str]:
    """The whole command line of a run, after a bare dash."""
    start = [*VARIABLES, *"torchrun --nproc-per-node 2 -m megatron_cg".split(), SCRIPT]
    return [*start, *(word for word in (*FLAGS, *more) if word != without)]


NO_MASKS = "--no-create-attention-mask-in-dataloader"


def loaded(args: dict[str, Any], folder: Path) -> dict[str, str]:
    """Load what each command line made, for a model of the same flags, and of others."""
    from megatron.core import parallel_state, tensor_parallel

    from megatron_cg.consensus.exchange import Agreement
    from megatron_cg.precompile.load import load

    logging.disable()
    found: dict[str, str] = {}
    parallel_state.initialize_model_parallel(2)
    tensor_parallel.model_parallel_cuda_manual_seed(1)
    for name, namespace in args.items():
        first, *_others = layers_of(namespace)
        for place in ("causal", "masked"):
            try:
                made = load(folder / place, "layer", first, Agreement())
            except ArtifactRefusedError as error:
                found[f"{name} in {place}"] = str(error)
            else:
                assert made is not None
                found[f"{name} in {place}"] = ", ".join(made.manifest.roles)
    return found


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, str]]:
    """Compile from two command lines, and load on two ranks."""
    folder = tmp_path_factory.mktemp("artifacts")
    args = {}
    for name, without in (("causal", ""), ("masked", NO_MASKS)):
        words = command("--cg-precompile-dir", str(folder / name), without=without)
        assert main(["precompile", "--capability", "cpu", "--", *words]) == 0
        args[name] = read_run(None, words, None).args
    return on_ranks(partial(loaded, args, folder))


def test_ranks_with_the_same_flags_load_it(results: list[dict[str, str]]) -> None:
    for found in results:
        assert found["causal in causal"] == found["masked in masked"] == "tp"


def test_ranks_with_other_flags_refuse_it_by_name(results: list[dict[str, str]]) -> None:
    mask = "argument.attention_mask was {} and is {}"
    shape = "torch.bool (2, 1, 16, 16) strides (256, 256, 16, 1)"
    for found in results:
        assert mask.format("absent", shape) in found["masked in causal"]
        assert mask.format(shape, "absent") in found["causal in masked"]


def test_the_process_is_as_it_was(results: list[dict[str, str]]) -> None:
    assert not dist.is_initialized()
    assert not torch.are_deterministic_algorithms_enabled()


@pytest.mark.parametrize(
    ("words", "error", "text"),
    [
        (command(), MegatronCGError, "add --cg-precompile-dir DIR, here and to the run"),
        (command("--cg-precompile-dir"), MegatronCGError, "expected one argument"),
        (command("--no-such-flag"), MegatronCGError, "Megatron has no such flag: --no-such-flag"),
        (
            command("--cg-precompile-dir", "x", "--num-query-groups", "3"),
            MegatronCGError,
            "these flags start no run: ",
        ),
        (
            command("--cg-precompile-dir", "x", "--hidden-dropout", "0.1"),
            ConfigurationError,
            "--hidden-dropout 0.1 with --cg-precompile-dir",
        ),
    ],
)
def test_flags_of_no_run_are_refused(words: list[str], error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=re.escape(text)):
        read_run(None, words, None)


def test_a_run_says_itself_where_its_artifact_goes(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["precompile", SCRIPT, "--out", "there", "--", *FLAGS]) == 2
    assert "the artifact of a run goes to its --cg-precompile-dir" in capsys.readouterr().err


def test_a_layer_that_recomputes_itself_is_compiled(tmp_path: Path) -> None:
    recompute = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
    words = command("--cg-precompile-dir", str(tmp_path), *recompute.split())
    assert main(["precompile", "--capability", "cpu", "--", *words]) == 0
    assert Path(tmp_path, "layer.artifact").is_file()
