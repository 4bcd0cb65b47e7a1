"""Packed sequences: what graphs can hold of them, and what ``--cg-pack-sequences`` needs."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from megatron_cg.arguments.rule import Refusal, Rule
from megatron_cg.arguments.rules_layers import captures_attention
from megatron_cg.arguments.schema import Environment, GraphArguments, RunArguments
from megatron_cg.errors import Violation

_PACKS = (
    "packed sequences (--sft, --rl-use-sequence-packing or --dataloader-inter-document-masking)"
)
_OR_NO_BOUND = "or drop --cg-pack-sequences"
_BEHIND = "type --cuda-graph-modules mlp, or other scopes behind attention"


def packs_sequences(run: RunArguments) -> bool:
    """Whether a flag of Megatron's packs several sequences into one."""
    return run.sft or run.rl_use_sequence_packing or run.dataloader_inter_document_masking


def _captures_mamba(run: RunArguments) -> bool:
    whole = run.is_whole_layer and run.hybrid_layer_pattern is not None
    return whole or "mamba" in run.cuda_graph_modules


def _has_bound(_run: RunArguments, graph: GraphArguments) -> bool:
    return graph.cg_pack_sequences is not None


def _has_no_bound(run: RunArguments, graph: GraphArguments) -> bool:
    return not _has_bound(run, graph)


_bounded = partial(Refusal, where=_has_bound)


def at_least_one(
    run: RunArguments, graph: GraphArguments, environment: Environment
) -> Iterator[Violation]:
    """The most sequences of a pack are at least 1."""
    most = graph.cg_pack_sequences
    if most is not None and most < 1:
        yield Violation(
            "pack-sequences-least",
            f"--cg-pack-sequences {most}",
            "it is the most sequences that a pack has",
            "type --cg-pack-sequences 64, or as many as your packs have",
        )


RULES: tuple[Rule, ...] = (
    at_least_one,
    Refusal(
        "packed-sequences",
        lambda run: packs_sequences(run) and captures_attention(run),
        f"{_PACKS} with captured attention",
        "a pack's boundaries reach the layer in a PackedSeqParams, and Megatron's graphs take only "
        "tensors (cu_seqlens differs from step to step in length and values, max_seqlen is a "
        "number)",
        "add --cg-pack-sequences N, where N is the most sequences of a pack; or leave attn out of "
        "--cuda-graph-modules",
        where=_has_no_bound,
    ),
    Refusal(
        "packed-microbatches",
        lambda run: packs_sequences(run) and (run.micro_batch_size or 1) > 1,
        f"{_PACKS} with --micro-batch-size {{run.micro_batch_size}}",
        "Megatron joins the samples of a microbatch into one, and its graphs have the shape of "
        "separate samples: none would be replayed",
        "type --micro-batch-size 1, and a longer --seq-length for as many tokens",
    ),
    Refusal(
        "packed-mamba",
        lambda run: packs_sequences(run) and _captures_mamba(run),
        f"{_PACKS} with captured Mamba mixers",
        "a mixer reads from PackedSeqParams which sequence each token belongs to, and Megatron's "
        "graphs take no such object",
        _BEHIND,
    ),
    _bounded(
        "pack-sequences-hybrid",
        lambda run: run.hybrid_layer_pattern is not None and captures_attention(run),
        "--cg-pack-sequences with captured attention of a hybrid model",
        "the flag acts in GPTModel. HybridModel passes packs on as they are, with an index of "
        "tokens for its Mamba mixers",
        _BEHIND,
    ),
    _bounded(
        "pack-sequences-context-parallel",
        lambda run: run.context_parallel_size > 1 and captures_attention(run),
        "--cg-pack-sequences with --context-parallel-size {run.context_parallel_size}",
        "each rank then has two parts of every sequence, and the positions in them are not "
        "computed on the device",
        f"type --context-parallel-size 1, {_OR_NO_BOUND} and leave attn out of "
        "--cuda-graph-modules",
    ),
)
