"""Megatron's ``--sft``: conversations packed into sequences train to the same bits with graphs."""

import json
import random
from pathlib import Path

import pytest
import torch

from megatron_cg.tools.align import run as align
from tests.functional.cases import (
    DENSE,
    EP2,
    EXPERTS,
    MLP,
    MOE,
    PREPROCESS,
    TORCH_GEMM,
    Case,
    batch,
)
from tests.functional.conftest import GPUS, TIMEOUT, plan_of, skip_without
from tests.functional.outcomes import assert_identical

LENGTHS, TOKENS, LINES = (40, 90, 150, 300, 700), 512, 600
SFT = (*batch(8), "--sft", "--micro-batch-size", "1")
CASES = [
    Case("dense", DENSE, MLP, SFT),
    Case("partial", MOE, PREPROCESS, (*SFT, "--moe-permute-fusion")),
    Case("dropless", MOE, EXPERTS, (*SFT, *EP2, *TORCH_GEMM), graph_flags=TORCH_GEMM),
]


def tokenizer(folder: Path) -> Path:
    """A tokenizer of bytes, with a template for conversations."""
    transformers, tokenizers = map(pytest.importorskip, ("transformers", "tokenizers"))
    names = [*sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet()), "<unk>", "</s>"]
    ids = {name: number for number, name in enumerate(names)}
    merges = tokenizers.models.BPE(vocab=ids, merges=[], unk_token="<unk>")
    bytewise = tokenizers.Tokenizer(merges)
    bytewise.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made = transformers.PreTrainedTokenizerFast(
        tokenizer_object=bytewise, unk_token="<unk>", eos_token="</s>", pad_token="<unk>"
    )
    made.chat_template = "{% for m in messages %}{{ m['content'] }}{% endfor %}</s>"
    made.save_pretrained(folder)
    return folder


def conversations(file: Path) -> Path:
    """Torch's docstrings as answers; a line is a pack of up to 7."""
    documented = [(name, getattr(torch, name).__doc__) for name in sorted(dir(torch))]
    texts = [(name, text.strip()) for name, text in documented if isinstance(text, str)]
    draw, at, lines = random.Random(0), 0, list[str]()
    for _ in range(LINES):
        pack, size = list[dict[str, str]](), 0
        while size < TOKENS:
            name, text = texts[at % len(texts)]
            at += 1
            said = ("", f"What is torch.{name}?", text[: draw.choice(LENGTHS)])
            roles = zip(("system", "user", "assistant"), said, strict=True)
            pack += [{"role": role, "content": words} for role, words in roles]
            size += sum(map(len, said)) + 1
        lines.append(json.dumps({"messages": pack}))
    file.write_text("\n".join(lines))
    return file


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_conversations_train_to_the_same_bits(
    case: Case, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    skip_without(GPUS)
    pytest.importorskip("datasets", reason="Megatron reads conversations with it")
    words = ["--data-path", str(conversations(tmp_path / "text.jsonl")), "--split", "100,0,0"]
    words += ["--tokenizer-type", "SFTTokenizer", "--tokenizer-model", str(tokenizer(tmp_path))]
    words += ["--sft-tokenizer-prompt-format", "default"]
    monkeypatch.setattr(align, "data_flags", lambda *_: words)
    plan = plan_of(case, tmp_path, align.example_script())
    runs = [align.make_run(plan, tmp_path, tmp_path, name) for name in ("eager", "graphs")]
    assert_identical(align.run_and_compare(runs, TIMEOUT), case.steps)
