"""What experts in a graph need, and what each ``--cg-grouped-gemm`` needs."""

import inspect
import sys
from collections.abc import Iterator
from itertools import chain

from megatron_cg.arguments.rule import WITHOUT_FIXED_SHAPES, Configuration, Facts, Rule
from megatron_cg.arguments.schema import RunArguments
from megatron_cg.errors import say
from megatron_cg.upstream.symbols import Symbol, installed_version
from megatron_cg.upstream.te import NOT_LOADED, UPGRADE

DROP_AND_PAD = "--moe-expert-capacity-factor 1.0 --moe-pad-expert-input-to-capacity"
_GEMM = "--cg-grouped-gemm"
_ROUTER = "{type:--cuda-graph-modules attn moe_router}"
ROW_MULTIPLES = {"tensorwise": 16, "blockwise": 128}
"""By ``--fp8-recipe``: each expert's rows are a multiple of it in a graph. Others are refused."""
_CUTLASS = "NVTE_USE_CUTLASS_GROUPED_GEMM"
_MOST_EXPERTS = 64
"""Of a rank: what Transformer Engine's grouped GEMM takes (TE 2.20.2, ``kMaxGroups``)."""
_BALANCING = ("aux_loss", "seq_aux_loss", "global_aux_loss", "none")


_MODULE = "transformer_engine.pytorch.module.grouped_linear"
_LAYER = Symbol(f"{_MODULE}:GroupedLinear", "TE's grouped linear layer")
_VERSION = Symbol(f"{_MODULE}:tex.get_cublasLt_version", "the version of cuBLASLt")
RELIES_ON = (_LAYER, _VERSION)
_LEAST = 130801
"""13.8.1: what cuBLASLt itself asks for. Up to 13.7 a graph's second replay is wrong."""
HOPPER = 9
"""Major compute capability, of the GPUs on which it was tried."""


def lacks_device_counts() -> str:
    """Why TE's grouped GEMM cannot read row counts on the device, in words; empty if it can.

    It then copies them to the host without a word (TE 2.20.2, ``_GroupedLinear.forward``).
    """
    if _MODULE not in sys.modules:
        return NOT_LOADED
    if "use_grouped_tensor" not in inspect.signature(_LAYER.find().__init__).parameters:
        return f"transformer-engine is {installed_version(_LAYER.distribution)}, before 2.19"
    version = _VERSION.find()()
    if version < _LEAST:
        found = f"{version // 10000}.{version // 100 % 100}.{version % 100}"
        return f"cuBLASLt is {found}, before 13.8.1"
    import torch  # Slow to import, and the rules of a command's help need none of it.

    if not torch.cuda.is_available():
        return "no GPU is visible"
    if torch.cuda.get_device_capability()[0] != HOPPER:
        return f"the GPU is {torch.cuda.get_device_name()}, and Hopper alone was tried"
    return ""


_Found = Iterator[tuple[bool, str, str, str]]
"""Whether something is wrong, what, why, and what to type instead."""


def _captures_dropless(given: Configuration) -> bool:
    captured = given.run.wants_graphs and given.captures_experts
    return captured and given.counts_on_device and not given.run.drops_and_pads


def _against_one_kernel(given: Configuration) -> list[Facts]:
    gemm = given.graph.cg_grouped_gemm
    if gemm == "te":
        return []
    by_kernel = _against_torchs(given.run) if gemm == "torch" else _against_cublass(given)
    last = f", or {{drop:{' '.join([_GEMM, *_of_exchange(given)])}}}"
    if _captures_dropless(given):
        last += f" and {_ROUTER}"
    return [
        {"what": say(what, run=given.run), "why": why, "instead": say(instead + last)}
        for broken, what, why, instead in chain(_against_any(given.run), by_kernel)
        if broken
    ]


def _against_any(run: RunArguments) -> _Found:
    kernel, fuser = "one kernel for all experts", "--use-transformer-engine-op-fuser}"
    grouped = run.is_moe and run.moe_grouped_gemm
    why, remedy = f"{kernel} computes those alone", "{add:--moe-grouped-gemm} in a MoE model"
    yield not grouped, "in a model without grouped experts", why, remedy
    yield not run.bf16, "without {flag:--bf16}", f"{kernel} has weights in BF16", "{add:--bf16}"
    yield run.add_bias_linear, "with biases", f"{kernel} adds none", "{add:--disable-bias-linear}"
    why = "the fuser computes experts itself"
    yield run.use_transformer_engine_op_fuser, "with {flag:" + fuser, why, "{drop:" + fuser


def _against_torchs(run: RunArguments) -> _Found:
    why, remedy = "torch's kernel computes in BF16", "{type:" + _kernel_for(run)
    yield run.fp8 is not None, "with FP8", why, f"{remedy}}}, or {{drop:--fp8-format}}"
    yield run.fp4 is not None, "with FP4", why, "{drop:--fp4-format}"


def _against_cublass(given: Configuration) -> _Found:
    run = given.run
    lacks = given.environment.lacks_device_counts
    upgradable = not lacks or lacks.startswith("cuBLASLt")  # The GPU is one that torch's takes too.
    torch = ", or {type:--cg-grouped-gemm torch}" * (upgradable and not run.has_low_precision)
    why = "cuBLASLt's kernel computes in BF16 and FP8"
    yield run.fp4 is not None, "with FP4", why, "{drop:--fp4-format}"
    yield (
        run.fp8 is not None and run.fp8_recipe not in ROW_MULTIPLES,
        "with {flag:--fp8-recipe {run.fp8_recipe}}",
        f"Transformer Engine has this kernel for {' and '.join(ROW_MULTIPLES)} on Hopper GPUs",
        "{type:--fp8-recipe tensorwise}",
    )
    cutlass = given.environment.variables.get(_CUTLASS) == "1"
    why = "the variable asks for CUTLASS's kernels"
    yield cutlass, f"with {_CUTLASS}=1", why, f"type unset {_CUTLASS}"
    experts = (run.num_experts or 0) // run.expert_model_parallel_size
    yield (
        experts > _MOST_EXPERTS,
        f"with {experts} experts of a rank",
        f"Transformer Engine's kernel takes {_MOST_EXPERTS} at most",
        "raise {flag:--expert-model-parallel-size}" + torch,
    )
    upgrade = f"{UPGRADE} (torch pins an older one, and pip warns)"
    remedy = upgrade if lacks.startswith("cuBLASLt is 13.") else "megatron-cg doctor"
    yield bool(lacks), "on this machine", lacks, f"type {remedy}{torch}"


def _kernel_for(run: RunArguments) -> str:
    """The flags by which one kernel computes the experts of a run in BF16 or FP8."""
    other = run.fp8 is not None and run.fp8_recipe not in ROW_MULTIPLES
    return f"{_GEMM} {run.one_kernel}" + " --fp8-recipe tensorwise" * other


def _without_fixed_shapes(given: Configuration) -> list[Facts]:
    run = given.run
    if not given.captures_experts or run.drops_and_pads or given.counts_on_device:
        return []
    return [{"kernel": say(f"{{add:{_kernel_for(run)}}}, or ") if run.fp4 is None else ""}]


def _drops_unpadded(given: Configuration) -> bool:
    run, factor = given.run, given.run.moe_expert_capacity_factor
    drops = factor is not None and factor >= 0
    return _captures_dropless(given) and drops and not run.moe_pad_expert_input_to_capacity


def _unknown_balancing(given: Configuration) -> list[Facts]:
    kinds = given.run.moe_router_load_balancing_type if _captures_dropless(given) else ()
    others = [kind for kind in kinds if kind not in _BALANCING]
    return [{"others": " ".join(others)}] if others else []


def _reads_counts(given: Configuration) -> bool:
    kind = given.run.moe_token_dispatcher_type
    refused = ("allgather", "flex") if _captures_dropless(given) else ("allgather",)
    return given.captures_experts and kind in refused


def _pads_rows(given: Configuration) -> list[Facts]:
    """The last flag implies the second in megatron-core 0.20, and copies counts in 0.19.2 too."""
    run = given.run
    flags = {
        "--moe-router-padding-for-quantization": run.moe_router_padding_for_quantization
        and not run.drops_and_pads,
        "--moe-use-grouped-tensor": run.moe_use_grouped_tensor,
        "--use-transformer-engine-op-fuser": run.use_transformer_engine_op_fuser,
    }
    applies = given.captures_experts and run.moe_grouped_gemm
    return [{"setting": flag} for flag, is_set in flags.items() if applies and is_set]


def _exchanges_nothing(given: Configuration) -> list[Facts]:
    """Flags about the exchange of rows in a run whose graphs hold none."""
    run = given.run
    exchanges = _captures_dropless(given) and run.expert_model_parallel_size > 1
    flags = {} if exchanges or not run.wants_graphs else _of_exchange(given)
    return [{"name": name, "value": value} for name, value in flags.items()]


def _of_exchange(given: Configuration) -> dict[str, str]:
    rows, stash = given.graph.cg_moe_rows, given.graph.cg_moe_stash
    factors = {"--cg-moe-rows": rows, "--cg-moe-stash": stash}
    found = {name: f"{factor:g}" for name, factor in factors.items() if factor is not None}
    return found | ({"--cg-moe-exchange": "peer"} if given.graph.cg_moe_exchange == "peer" else {})


RULES = (
    Rule(
        "grouped-gemm",
        _against_one_kernel,
        "{flag:--cg-grouped-gemm {graph.cg_grouped_gemm}} {what}",
        "{why}",
        "{instead}",
        without_graphs=True,
    ),
    Rule(
        "experts-delayed-gradients",
        lambda c: (
            c.run.overlap_dispatch_backward_with_experts_wgrad
            and (c.graph.cg_grouped_gemm == "torch" or (c.run.wants_graphs and c.captures_experts))
        ),
        "{flag:--overlap-dispatch-backward-with-experts-wgrad} with experts in a graph, or with "
        "{flag:--cg-grouped-gemm torch}",
        "Python code that reduces delayed weight gradients does not run in a replay, and torch's "
        "grouped GEMM computes them at once",
        "{drop:--overlap-dispatch-backward-with-experts-wgrad}",
        without_graphs=True,
    ),
    # A graph can hold experts if it has fixed shapes: by drop and pad, or by counts on the GPU.
    Rule(
        WITHOUT_FIXED_SHAPES,
        _without_fixed_shapes,
        "MoE layers in graphs with their experts ({flag:--cuda-graph-modules moe}, or none), "
        "without drop and pad",
        "how many tokens each expert gets then differs from step to step, and Transformer "
        "Engine's grouped GEMM reads it on the CPU, which a capture does not allow",
        f"{{kernel}}{{add:{DROP_AND_PAD}}}, or {_ROUTER}; or, without "
        "{flag:--cuda-graph-modules}, name the dense layers, as with {flag:--cg-layers layer:0}",
    ),
    Rule(
        "experts-capacity",
        _drops_unpadded,
        "{flag:--moe-expert-capacity-factor {run.moe_expert_capacity_factor:g}} without padding, "
        "and experts in a graph",
        "Megatron captures experts that drop tokens only if each of them gets the same number",
        "{drop:--moe-expert-capacity-factor}, or {add:--moe-pad-expert-input-to-capacity}",
    ),
    Rule(
        "experts-grouped-tensor",
        _pads_rows,
        "a grouped GEMM of padded rows ({flag:{setting}}) and experts in a graph",
        "Megatron pads the rows of each expert by counts on the CPU, and copies the counts to the "
        "GPU, which a capture does not allow",
        "{drop:{setting}}, or " + _ROUTER,
    ),
    Rule(
        "experts-dispatcher",
        _reads_counts,
        "{flag:--moe-token-dispatcher-type {run.moe_token_dispatcher_type}} in MoE layers that are "
        "captured with their experts",
        "this dispatcher copies the number of each expert's tokens to the CPU and waits for it, "
        "which a capture does not allow",
        "{type:--moe-token-dispatcher-type alltoall}, or " + _ROUTER,
    ),
    Rule(
        "experts-tensor-parallel",
        lambda c: _captures_dropless(c) and c.run.expert_tensor_parallel_size > 1,
        "dropless experts in a graph that are split over several tensor-parallel ranks",
        "the ranks of an expert then exchange rows by numbers that Megatron reads on the CPU",
        "{add:--expert-tensor-parallel-size 1}, or " + _ROUTER,
    ),
    Rule(
        "experts-router",
        _unknown_balancing,
        "dropless experts in a graph with {flag:--moe-router-load-balancing-type {others}}",
        "megatron-core 0.19.2 takes whole MoE layers in graphs only as drop and pad, and that only "
        f"with {', '.join(_BALANCING)}",
        "{type:--moe-router-load-balancing-type aux_loss}, or " + _ROUTER,
    ),
    Rule(
        "no-exchange",
        _exchanges_nothing,
        "{flag:{name} {value}} in a run whose graphs hold no dropless experts of several ranks",
        "it is about the rows that such graphs receive from other expert-parallel ranks",
        "{drop:{name}}, or let graphs hold such experts: docs/experts.md",
    ),
)
