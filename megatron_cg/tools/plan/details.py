"""The plan of a run that breaks no rule: layers, graphs, memory, kernels, FSDP's buffers."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn

from megatron_cg.arguments.layers import LayerSelection
from megatron_cg.arguments.schema import WHOLE_LAYER, prediction_is_repeated
from megatron_cg.errors import HostSyncError, MegatronCGError
from megatron_cg.moe.install import peer_memory_of
from megatron_cg.tools.plan.capture import TORCH_GEMM_WORKSPACE, Capture, LayerCapture, simulate
from megatron_cg.tools.plan.experts import bits_note, experts_of
from megatron_cg.tools.plan.fakes.attention import DotProductAttention
from megatron_cg.tools.plan.fsdp_buffers import describe_buffers
from megatron_cg.tools.plan.layers import describe_layers
from megatron_cg.tools.plan.meta_model import built_model
from megatron_cg.tools.plan.planned_samples import PlannedHelper, Sample, read_in_place
from megatron_cg.tools.plan.pool import round_up
from megatron_cg.tools.plan.settings import Settings
from megatron_cg.tools.plan.worth import Planned, measured_rows, worth

_GRAPH_LAUNCHES = 2
"""A replay launches one graph in the forward pass and one in the backward pass."""
_VOCABULARY = 131_072
"""Vocabulary size when only the tokenizer knows it; a plan does not open a tokenizer."""


def details(settings: Settings, notes: list[str]) -> dict[str, Any]:
    """All details of the model in ``settings``; adds the limits of the plan to ``notes``."""
    args = settings.args
    notes += _limits(settings)
    if settings.run.fp8 is not None:
        args.fp8, args.fp8_param_gather = None, False
    if args.padded_vocab_size is None and args.vocab_size is None:
        args.vocab_size = _VOCABULARY
    DotProductAttention.deterministic = (
        os.environ.get("NVTE_ALLOW_NONDETERMINISTIC_ALGO", "1") == "0"
    )
    selection = LayerSelection.parse(settings.graph.cg_layers)
    with experts_of(settings.graph), built_model(args) as (model, fsdp):
        helper = PlannedHelper(model, args, selection)
        decoder = helper.decoder_layers()
        found: dict[str, Any] = {
            "model": _model(model, args, decoder),
            "fsdp": describe_buffers(fsdp, decoder),
            "layers": describe_layers(settings.run, selection, decoder),
        }
        try:
            with helper.prepared():
                samples, options = helper.samples()
                captured = simulate(samples, model, options)
        except HostSyncError:
            raise
        except MegatronCGError as error:
            notes.append(str(error))
            return found
        peers = peer_memory_of(model)
        _add_graphs(found, samples, captured, args, peers.bytes if peers is not None else 0)
        found["worth"] = _worth(found, settings)
        return found


def _limits(settings: Settings) -> Iterator[str]:
    """What is counted in another way, and what a run does eagerly in every layer."""
    args = settings.args
    if settings.run.fp8 is not None:
        yield (
            f"--fp8-format {settings.run.fp8}: memory and kernels are counted as for bfloat16, "
            "because Transformer Engine's quantized tensors have no fake yet."
        )
    if args.padded_vocab_size is None and args.vocab_size is None:
        yield (
            "the size of the vocabulary is the tokenizer's, which a plan does not open: counted as "
            f"{_VOCABULARY:,}, unless --vocab-size says otherwise. No graph holds the embedding or "
            "the output layer."
        )
    if args.gradient_accumulation_fusion:
        yield (
            "gradient-accumulation fusion: Megatron's output layer needs Apex for it on the "
            "machine that trains. Without Apex, add --no-gradient-accumulation-fusion."
        )
    if settings.graph.cg_grouped_gemm == "torch":
        yield bits_note(args)
    if prediction_is_repeated(args):
        yield (
            "--mtp-use-repeated-layer: the prediction layer stays eager, because it runs "
            f"{args.mtp_num_layers} times before its first backward pass."
        )
    if args.moe_enable_routing_replay:
        yield (
            "--moe-enable-routing-replay: passes in which routers record or repeat a choice run "
            "their graphs' regions eagerly; the others are replayed."
        )
    if settings.run.packs_sequences:
        yield (
            "packed sequences: attention sees their boundaries and stays eager."
            if settings.graph.cg_pack_sequences is None
            else "packed sequences: their attention is estimated as that of whole sequences."
        )


def _model(model: nn.Module, args: Any, decoder: Sequence[nn.Module]) -> dict[str, Any]:
    microbatches = args.global_batch_size // (args.micro_batch_size * args.data_parallel_size)
    innermost = model
    while isinstance(inner := getattr(innermost, "module", None), nn.Module):
        innermost = inner
    kind = "MoE" if args.num_experts else "dense"
    return {
        "class": type(innermost).__name__,
        "kind": "hybrid" if args.hybrid_layer_pattern else kind,
        "work_per_layer": _work_per_layer(args, decoder),
        "layers": len(decoder),
        "parameters_on_rank_0": sum(p.numel() for p in model.parameters()),
        "sequence_length": args.seq_length,
        "micro_batch_size": args.micro_batch_size,
        "microbatches": microbatches,
        "data_parallel": args.data_parallel_size,
        "tensor_parallel": args.tensor_model_parallel_size,
        "expert_parallel": args.expert_model_parallel_size,
        "context_parallel": args.context_parallel_size,
    }


def _work_per_layer(args: Any, decoder: Sequence[nn.Module]) -> float:
    """The mean over layers of what Note [The nearest row] in worth.py compares."""
    tokens = args.micro_batch_size * args.seq_length // args.context_parallel_size
    used = 0.0
    for layer in decoder:
        for name, parameter in layer.named_parameters():
            share = 1.0
            if ".experts." in f".{name}":
                share = args.moe_router_topk / (args.num_experts // args.expert_model_parallel_size)
            used += parameter.numel() * share
    return float(tokens * used / max(1, len(decoder)))


def _worth(found: dict[str, Any], settings: Settings) -> dict[str, Any]:
    # Layers of multi-token prediction have none.
    scopes = [set(row["scopes"]) for row in found["layers"] if "scopes" in row]
    model, run = found["model"], settings.run
    cutlass = os.environ.get("NVTE_USE_CUTLASS_GROUPED_GEMM") == "1" and model["kind"] == "MoE"
    torch_gemm = settings.graph.cg_grouped_gemm == "torch"
    dtype = "FP8" if run.fp8 else "BF16" if settings.args.bf16 else "FP32"
    planned = Planned(
        kind=model["kind"],
        dtype=dtype,
        grouped_gemm="torch" if torch_gemm else "cutlass" if cutlass else "default",
        work_per_layer=model["work_per_layer"],
        scopes=frozenset().union(*scopes),
        attention=all(captured & {"attn", WHOLE_LAYER} for captured in scopes),
        launches_saved=found["kernels"]["saved_per_step"],
    )
    return worth(planned, measured_rows())


def _add_graphs(
    found: dict[str, Any], samples: Sequence[Sample], captured: Capture, args: Any, peers: int
) -> None:
    """Add each layer's graph, and what all of them take and save."""
    in_place = read_in_place(args.cuda_graph_warmup_steps)
    rows = {row["index"]: row for row in found["layers"]}
    counted: set[int] = set()
    totals = dict.fromkeys(("static_inputs", "saved_activations", "outputs"), 0)
    saved_kernels = 0
    # One call copies a graph's weight gradients into their buckets.
    fused = not args.cg_no_fsdp_fast_path
    microbatches = found["model"]["microbatches"]
    for sample, layer in zip(samples, captured.layers, strict=True):
        row = rows.setdefault(
            sample.index, {"index": sample.index, "kind": "prediction", "captured": [], "eager": []}
        )
        inputs = [_input(n, t, n not in in_place, counted) for n, t in sample.inputs()]
        memory = {"static_inputs": sum(entry["bytes_here"] for entry in inputs), **layer.memory}
        memory["held"] = sum(memory[term] for term in totals)
        kernels = _kernels(layer, inputs, fused=fused)
        row.update(
            graphs=1, static_inputs=inputs, outputs=layer.outputs, memory=memory, kernels=kernels
        )
        for term in totals:
            totals[term] += memory[term]
        saved_kernels += kernels["saved_per_replay"] * microbatches
    found["layers"] = [rows[index] for index in sorted(rows)]
    found["graph_memory"] = _memory(totals, captured, peers)
    found["graphs"] = {"captured": len(samples), "replays_per_step": len(samples) * microbatches}
    found["kernels"] = {"saved_per_step": saved_kernels}


def _memory(totals: dict[str, int], captured: Capture, peers: int) -> dict[str, int]:
    """The terms; their sum is ``total``. ``peers`` is what other GPUs map."""
    pool = captured.pool
    workspace = TORCH_GEMM_WORKSPACE if captured.trace.torch_gemms else 0
    terms = {
        **totals,
        "output_gradients": captured.output_gradients,
        "gradients_and_workspace": pool.peak - totals["saved_activations"] - totals["outputs"],
        "torch_gemm_workspace": workspace,
        "fragmentation": pool.reserved - pool.peak,
        "peer_memory": peers,
    }
    return {
        **terms,
        "total": sum(terms.values()),
        "pool_peak": pool.peak + workspace,
        "pool_reserved": pool.reserved + workspace,
    }


def _input(name: str, tensor: torch.Tensor, copied: bool, counted: set[int]) -> dict[str, Any]:
    """One static input; memory that layers share counts for the first of them only."""
    storage = tensor.untyped_storage()
    size = round_up(storage.nbytes())
    first = id(storage) not in counted
    counted.add(id(storage))
    return {
        "name": name,
        "shape": list(tensor.shape),
        "dtype": str(tensor.dtype).removeprefix("torch."),
        "bytes": size,
        "copied": copied,
        "bytes_here": size if copied and first else 0,
    }


def _kernels(
    layer: LayerCapture, inputs: Sequence[dict[str, Any]], *, fused: bool
) -> dict[str, int]:
    """Kernels of one eager pass through the captured region, and of a replay.

    A replay launches its two graphs, copies its inputs and the gradients of its outputs into static
    buffers, makes the mask that it copies, and copies the weights' gradients (one by one,
    or ``fused``).
    """
    copies = sum(entry["copied"] for entry in inputs)
    masks = sum(entry["name"] == "attention_mask" for entry in inputs)
    replay = _GRAPH_LAUNCHES + copies + masks + layer.differentiable_outputs
    replay += min(layer.weights, 1) if fused else layer.weights
    saved = sum(layer.kernels.values()) - replay
    return {**layer.kernels, "replay": replay, "saved_per_replay": saved}
