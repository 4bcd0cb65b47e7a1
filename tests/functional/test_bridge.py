"""Megatron-Bridge's ``pretrain`` trains the same losses and norms with graphs, to the last bit."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from filelock import FileLock

from megatron_cg.upstream.symbols import installed_version
from tests.functional.conftest import GPUS, ROOT, skip_without, torchrun
from tests.functional.test_sft import TOKENS, conversations, tokenizer

VERSION = "0.6.2"
LAYERS, STEPS, WARMUP, MICROBATCHES = 4, 12, 3, 2
EVERY, ITERATIONS, SAVED, FAILS = 4, 2, 6, 7
"""Steps between evaluations and the iterations of one; steps that end in a checkpoint, an error."""


@dataclass(frozen=True)
class Run:
    """What the client does: ``scopes`` None is an eager run, ``experts`` Bridge's Qwen3-MoE.

    ``fields`` are changes of Bridge's configuration and ``enable`` the arguments of ``enable()``,
    which is called before Bridge is imported if ``early``. On the ranks ``fails`` the microbatch
    number ``fails_at`` raises.
    """

    scopes: tuple[str, ...] | None
    fields: dict[str, Any] = field(default_factory=dict)
    enable: dict[str, Any] = field(default_factory=dict)
    experts: bool = True
    early: bool = False
    environment: dict[str, str] = field(default_factory=dict)
    tuned: str = ""
    """A folder with a Hugging Face model and packs, on which it is tuned; else it is trained."""
    adapter: bool = False
    fails: tuple[int, ...] = ()
    fails_at: int = (FAILS - 1) * MICROBATCHES + 1

    @property
    def eager(self) -> Run:
        return replace(self, scopes=None, enable={}, early=False, environment={})


ROUTER, EXPERTS = ("attn", "moe_router", "moe_preprocess"), ("attn", "moe")
DENSE = Run(("attn", "mlp"), experts=False)
EP2 = {"model.expert_model_parallel_size": 2}
_PLAIN = dict.fromkeys(f"model.recompute_{x}" for x in ("granularity", "method", "num_layers"))
_EP2 = _PLAIN | EP2
_FP32 = {"ddp.megatron_fsdp_main_grads_dtype": "float32"}
_EVALUATED = {"validation.eval_interval": EVERY, "validation.eval_iters": ITERATIONS}
_DECENTRALIZED = {"dist.use_decentralized_pg": True, "dist.use_gloo_process_groups": False}
_OF_RECIPES = {
    **dict.fromkeys(("NCCL_GRAPH_REGISTER", "NCCL_NVLS_ENABLE"), "0"),
    **dict.fromkeys(("TORCH_NCCL_AVOID_RECORD_STREAMS", "TORCH_NCCL_HIGH_PRIORITY"), "1"),
    "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True",
}
"""``COMMON_RECIPE_ENV_VARS`` of Bridge, which a launcher sets: torch reads it when it starts."""
TORCH_GEMM = {"grouped_gemm": "torch"}
CASES = {
    "dense": DENSE,
    "dense-early": replace(DENSE, early=True),
    # With experts it fails eagerly: megatron-core 0.19.2's metrics of MoE ask ``parallel_state``.
    "dense-decentralized": replace(DENSE, fields=_DECENTRALIZED),
    "experts": Run(ROUTER, _PLAIN),
    "experts-fp32": Run(ROUTER, _EP2 | _FP32),
    "experts-evaluated": Run(ROUTER, _EP2 | _EVALUATED),
    "experts-environment": Run(ROUTER, _EP2, environment=_OF_RECIPES),
    "peers": Run(EXPERTS, _EP2, {**TORCH_GEMM, "moe_exchange": "peer"}),
    "recipe": Run(("full",), EP2, TORCH_GEMM),
}
"""``recipe`` has the scopes and the recompute of Bridge's Qwen3-MoE."""
_SAVED = {"checkpoint.save": "{folder}", "checkpoint.save_interval": SAVED}
BASE = replace(DENSE.eager, fields=_SAVED)
TUNED = {
    "whole": replace(
        DENSE, tuned="{model}", fields={"checkpoint.pretrained_checkpoint": "{saved}"}
    ),
    "adapter": replace(DENSE, tuned="{model}", adapter=True),
}
SAVING = Run(ROUTER, _EP2 | _SAVED)
RESUMING = Run(ROUTER, _EP2 | {"checkpoint.load": "{saved}", "checkpoint.ckpt_step": SAVED})
WITH_NCCL = Run(EXPERTS, _EP2, TORCH_GEMM)


@dataclass(frozen=True)
class Ended:
    folder: Path
    failure: str
    """Why the run failed; empty if it did not."""
    log: str

    @property
    def ranks(self) -> list[dict[str, Any]]:
        return [json.loads((self.folder / f"rank{rank}.json").read_text()) for rank in range(GPUS)]


Start = Callable[..., Ended]


@pytest.fixture(scope="module", autouse=True)
def _bridge() -> None:
    skip_without(GPUS)
    if (version := installed_version("megatron-bridge")) != VERSION:
        pytest.skip(f"needs megatron-bridge {VERSION}, and {version} is installed")


@pytest.fixture
def start(shared: Path, tmp_path: Path) -> Start:
    """Train a run to its end. Eager ones, which several tests ask for, are trained once."""

    def started(run: Run, **places: Path) -> Ended:
        if run.scopes is not None:
            return train(run, tmp_path / f"run{len(list(tmp_path.iterdir()))}", places)
        folder = shared / f"bridge-{hashlib.sha256(repr((run, places)).encode()).hexdigest()[:16]}"
        with FileLock(f"{folder}.lock"):
            done = folder / "ended.json"
            if not done.exists():
                ended = train(run, folder, places)
                done.write_text(json.dumps([ended.failure, ended.log]))
            return Ended(folder, *json.loads(done.read_text()))

    return started


def train(run: Run, folder: Path, places: dict[str, Path]) -> Ended:
    folder.mkdir(exist_ok=True)
    text = json.dumps(asdict(run))
    for name, place in {"folder": folder, **places}.items():
        text = text.replace(f"{{{name}}}", str(place))
    (folder / "run.json").write_text(text)
    client = ["-m", "tests.functional.bridge_client", str(folder / "run.json")]
    return launch(client, folder, run.environment)


def launch(script: list[str], folder: Path, variables: Mapping[str, str] = {}) -> Ended:
    failure, log = torchrun(script, folder, HF_HUB_OFFLINE="1", **variables)
    return Ended(folder, failure, log)


def check(
    eager: Ended,
    graphs: Ended,
    first: int = 1,
    evaluations: int = 0,
    microbatches: int = MICROBATCHES,
) -> None:
    """Both trained the steps from ``first`` on, to the same bits; each layer had a graph.

    After the capture no pass of a layer was eager but those of evaluations.
    """
    for ended in (eager, graphs):
        assert not ended.failure, ended.failure + ended.log[-8000:]
    replayed = LAYERS * (STEPS + 1 - first - WARMUP) * microbatches
    for one, two in zip(eager.ranks, graphs.ranks, strict=True):
        assert list(one["steps"]) == [str(step) for step in range(first, STEPS + 1)]
        assert len(set(map(tuple, one["steps"].values()))) == len(one["steps"])
        assert two["steps"] == one["steps"]
        assert two["evaluations"] == one["evaluations"]
        assert len(one["evaluations"]) == evaluations + bool(evaluations)  # One after training.
        assert one["graphs"] == []
        (counts,) = two["graphs"]
        assert (counts["captured"], counts["replayed"]) == (LAYERS, replayed)
        evaluated = LAYERS * evaluations * ITERATIONS * MICROBATCHES
        assert (counts["eager"], counts["mismatched"]) == (evaluated, 0)


@pytest.mark.parametrize("name", CASES)
def test_losses_and_gradient_norms_are_equal_to_eager(name: str, start: Start) -> None:
    run = CASES[name]
    evaluations = STEPS // EVERY if _EVALUATED.items() <= run.fields.items() else 0
    eager, graphs = start(run.eager), start(run)
    check(eager, graphs, evaluations=evaluations)
    assert all(told["expandable"] is bool(run.environment) for told in graphs.ranks)


@pytest.fixture
def model(shared: Path) -> Path:
    """The example's Llama as Hugging Face saves it, with a tokenizer, and torch's docstrings."""
    transformers = pytest.importorskip("transformers")
    folder = shared / "bridge-model"
    with FileLock(f"{folder}.lock"):
        if not folder.exists():
            torch.manual_seed(1)
            config = transformers.LlamaConfig(
                num_hidden_layers=LAYERS, hidden_size=512, intermediate_size=1024, vocab_size=4096,
                num_attention_heads=8, num_key_value_heads=2, max_position_embeddings=TOKENS,
                tie_word_embeddings=False, architectures=["LlamaForCausalLM"],
            )  # fmt: skip
            transformers.LlamaForCausalLM(config).save_pretrained(folder)
            write_packs(tokenizer(folder))
    return folder


def write_packs(folder: Path) -> None:
    """In the form of Bridge's ``GPTSFTPackedDataset``."""
    end = pytest.importorskip("transformers").AutoTokenizer.from_pretrained(folder).eos_token_id
    packs = []
    for line in conversations(folder / "text.jsonl").read_text().splitlines():
        texts = [m["content"].encode() for m in json.loads(line)["messages"] if m["content"]]
        ids, starts, mask = list[int](), list[int](), list[int]()
        for text in texts:
            if len(ids) - len(starts) + len(text) > TOKENS:
                break
            starts.append(len(ids))
            ids += [*text, end]
            mask += [1] * (len(text) + 1)
        packs.append({"input_ids": ids, "seq_start_id": starts, "loss_mask": mask})
    numpy.save(folder / "packs.npy", numpy.array(packs, dtype=object), allow_pickle=True)
    sizes = [len(pack["input_ids"]) - len(pack["seq_start_id"]) for pack in packs]
    most = max(len(pack["seq_start_id"]) for pack in packs)
    told = {
        "max_samples_per_bin": most,
        "dataset_max_seqlen": TOKENS,
        "min_packed_seqlen": min(sizes),
    }
    (folder / "packs.json").write_text(json.dumps([told]))


@pytest.mark.parametrize("name", TUNED)
def test_packed_fine_tuning_is_equal_to_eager(name: str, start: Start, model: Path) -> None:
    run, places = TUNED[name], {"model": model}
    if not run.adapter:
        places["saved"] = start(BASE).folder
    check(start(run.eager, **places), start(run, **places), microbatches=2 * MICROBATCHES)


def test_a_resumed_run_goes_on_as_the_one_that_was_not_interrupted(start: Start) -> None:
    eager, graphs = start(SAVING.eager), start(SAVING)
    check(eager, graphs)
    rest = start(RESUMING.eager, saved=eager.folder)
    check(rest, start(RESUMING, saved=graphs.folder), first=SAVED + 1)
    for whole, later in zip(eager.ranks, rest.ranks, strict=True):
        assert later["steps"].items() <= whole["steps"].items()


@pytest.mark.kills
@pytest.mark.fault
@pytest.mark.parametrize("ranks", [(0, 1), (1,)], ids=["all", "one"])
def test_no_graph_outlives_its_communicators_when_a_step_raises(
    ranks: tuple[int, ...], start: Start
) -> None:
    """Bridge then aborts all process groups."""
    ended = start(replace(WITH_NCCL, fails=ranks))
    assert ended.failure
    assert "not released" not in ended.log and "could be released" not in ended.log
    for rank in ranks:
        assert f"rank {rank}: 1 sessions open" in ended.log
        assert f"rank {rank}: 0 sessions open after pretrain()" in ended.log
        told = json.loads((ended.folder / f"rank{rank}.json").read_text())
        assert told["error"] == "RuntimeError: forced" and len(told["steps"]) == FAILS - 1


def test_a_recipe_with_its_defaults_is_refused_before_the_model_is_built(start: Start) -> None:
    """And the error says what to set; the case ``recipe`` has it set."""
    ended = start(replace(CASES["recipe"], enable={}))
    assert ended.failure and "number of parameters" not in ended.log
    # The launcher ends the other rank when the first has failed: only the log has both or one.
    assert "megatron_cg.enable(grouped_gemm='torch')" in ended.log


def test_the_example_trains_in_graphs(tmp_path: Path) -> None:
    ended = launch([str(ROOT / "examples" / "megatron_bridge.py")], tmp_path)
    replayed = LAYERS * (STEPS - WARMUP) * MICROBATCHES
    assert not ended.failure and f"{LAYERS} captured, {replayed} replayed, 0 eager" in ended.log
