"""The configuration of a run as frozen values: the input of every rule."""

import argparse
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Literal, Self, get_args

from megatron_cg import version
from megatron_cg.errors import Violation
from megatron_cg.extensions import lacks_device_counts, not_installed
from megatron_cg.upstream.symbols import installed_version
from megatron_cg.upstream.te import NOT_LOADED

WHOLE_LAYER = "layer"
"""Our name for capture of a whole layer; Megatron writes it as an empty scope list."""

SCOPES = ("attn", "mlp", "moe", "moe_router", "moe_preprocess", "mamba")
"""Megatron's scope names: ``megatron.core.transformer.enums.CudaGraphModule`` of 0.19.2."""

TRANSFORMER_ENGINE, NATIVE, TAPE = "transformer_engine", "native", "tape"
"""Names of the capture backends; the tape needs no GPU."""
BACKENDS = MappingProxyType(
    {"te": TRANSFORMER_ENGINE} | {name: name for name in (TRANSFORMER_ENGINE, NATIVE, TAPE)}
)
"""The backend of each value of ``--cg-backend``, and of the names that Python code may also use."""

PACKAGES = ("megatron-core", "megatron-fsdp", "transformer-engine", "torch")
"""The distributions whose versions the rules read."""

VARIABLES = (
    "CUDA_DEVICE_MAX_CONNECTIONS",
    "NCCL_GRAPH_REGISTER",
    "NVTE_USE_CUTLASS_GROUPED_GEMM",
    "PYTORCH_ALLOC_CONF",
    "PYTORCH_CUDA_ALLOC_CONF",
)
"""The environment variables that the rules read."""

OnFailure = Literal["error", "eager"]
OnMismatch = Literal["eager", "error"]
GroupedGemm = Literal["te", "cublas", "torch"]
Exchange = Literal["nccl", "peer"]


@dataclass(frozen=True)
class Takes:
    """What an argument of the Python API may be: a test, what that says, and an example."""

    accepts: Callable[[Any], bool]
    reason: str
    example: str

    def check(self, name: str, value: object) -> Iterator[Violation]:
        if not self.accepts(value):
            found, remedy = f"{name}={value!r}", f"{name}={self.example}"
            yield Violation("argument", found, f"it is {self.reason}", remedy)

    def read_as(self, kind: Callable[[str], Any]) -> Callable[[str], Any]:
        """The ``type`` of a flag for argparse, which refuses what Python code may not give."""

        def read(word: str) -> Any:
            value = kind(word)
            if not self.accepts(value):
                raise argparse.ArgumentTypeError(f"{word!r} is not {self.reason}")
            return value

        read.__name__ = kind.__name__  # argparse says it of a word that cannot be read
        return read


def one_of(*known: str) -> Takes:
    return Takes(known.__contains__, f"one of {', '.join(map(repr, known))}", repr(known[0]))


def at_least(least: int) -> Takes:
    def accepts(value: Any) -> bool:
        return isinstance(value, int) and not isinstance(value, bool) and value >= least

    return Takes(accepts, f"a whole number from {least} on", str(least))


TRUE_OR_FALSE = Takes(lambda value: isinstance(value, bool), "True or False", "True")
_FACTOR = Takes(lambda value: type(value) in (int, float) and value >= 1, "1.0 or more", "1.25")
_FOLDER = Takes(lambda value: isinstance(value, str | os.PathLike), "a directory", '"runs/1"')
_ANYTHING = Takes(lambda _value: True, "", "")


def _flag(default: Any, takes: Any, text: str, **argparse_options: Any) -> Any:
    """A field: its help text, further argparse options of its flag, and what Python may give.

    ``takes`` may be a Literal.
    """
    if not isinstance(takes, Takes):
        argparse_options["choices"] = get_args(takes)
        takes = one_of(*get_args(takes))
    if kind := argparse_options.get("type"):
        argparse_options["type"] = takes.read_as(kind)
    metadata = {"help": text, "argparse": argparse_options, "takes": takes}
    return field(default=default, metadata=metadata)


def flag_of(name: str) -> str:
    return "--" + name.replace("_", "-")


def argument_of(name: str) -> str:
    return "fast_path" if name == "cg_no_fsdp_fast_path" else name.removeprefix("cg_")


@dataclass(frozen=True)
class GraphArguments:
    """The flags of this package; the flag of a field is its name with dashes."""

    cg_layers: tuple[str, ...] = _flag(
        (),
        _ANYTHING,
        "Capture a scope on some layers only: SCOPE:RANGES, where RANGES are layer indices from "
        "0 of the decoder, such as attn:0-23 moe_router:4- mlp:0-3,8. SCOPE is a name from "
        "--cuda-graph-modules, or 'layer' where that is empty. A scope that is not named here is "
        "captured on all layers. MTP layers are not counted and not affected.",
        nargs="+",
        metavar="SCOPE:RANGES",
    )
    cg_backend: Literal["te", "native", "transformer_engine", "tape"] = _flag(
        "te",
        one_of(*BACKENDS),
        "What captures graphs: Transformer Engine (default), or this package with torch alone, "
        "without FP8.",
        choices=("te", "native"),
    )
    cg_on_failure: Literal["error", "eager"] = _flag(
        "error",
        OnFailure,
        "What to do when capture fails: stop with the error (default), or log it and go on "
        "training without graphs.",
    )
    cg_on_mismatch: Literal["eager", "error"] = _flag(
        "eager",
        OnMismatch,
        "What to do when a graph must not be replayed, because an input, a buffer or a module is "
        "not as it was at capture: run that part eagerly (default), or stop with the error.",
    )
    cg_verify_interval: int = _flag(
        0,
        at_least(0),
        "In every STEPS-th step, run each graphed part eagerly beside its replay on the same "
        "inputs, forward and backward, and compare outputs and gradients bit for bit. A difference "
        "counts as a mismatch. 0 turns this off.",
        type=int,
        metavar="STEPS",
    )
    cg_verify_steps: int = _flag(
        0,
        at_least(0),
        "Train every STEPS-th step twice on the same batches, with graphs and then eagerly, and "
        "compare all numbers that it leaves for the optimizer: losses, gradients, buffers, metrics "
        "and random states. Training continues with the eager numbers. A difference on any rank "
        "ends the run or, with --cg-on-mismatch eager, turns all graphs off. 0 turns this off.",
        type=int,
        metavar="STEPS",
    )
    cg_packed_samples: int | None = _flag(
        None,
        at_least(1),
        "Graphs of attention have room for N samples in a pack. By default, for a quarter more "
        "than the fullest pack of the warmup steps has. A fuller pack runs eagerly.",
        type=int,
        metavar="N",
    )
    cg_no_fsdp_fast_path: bool = _flag(
        False,
        TRUE_OR_FALSE,
        "Leave Megatron-FSDP's bookkeeping as it is. By default, while graphs replay, it runs once "
        "per bucket of parameters instead of once per parameter; numbers are the same.",
        action="store_true",
    )
    cg_grouped_gemm: Literal["te", "cublas", "torch"] = _flag(
        "te",
        GroupedGemm,
        "What computes the experts in all passes: te, Transformer Engine's GEMM for each expert "
        "(default), or one kernel for all: torch's (BF16) or cuBLASLt's (cublas; BF16 and FP8, "
        "cuBLASLt 13.8.1 or newer; in eager passes of blockwise FP8 te). With one kernel, "
        "--cuda-graph-modules moe captures whole MoE layers without drop and pad.",
    )
    cg_moe_rows: float | None = _flag(
        None,
        _FACTOR,
        "Graphs with dropless experts have room for FACTOR times the rows that a rank receives on "
        "average. By default they have room for the most that a rank can receive. A step in which "
        "a rank receives more is repeated eagerly, so no token is dropped. FACTOR is at least 1.0; "
        "the flag needs expert parallelism.",
        type=float,
        metavar="FACTOR",
    )
    cg_moe_stash: float | None = _flag(
        None,
        _FACTOR,
        "Graphs with dropless experts keep for the backward pass only the rows that were used, in "
        "one buffer with room for FACTOR times the most rows of a step before the capture. A step "
        "with more is repeated eagerly. By default each layer keeps room for any routing. FACTOR "
        "is at least 1.0.",
        type=float,
        metavar="FACTOR",
    )
    cg_moe_exchange: Literal["nccl", "peer"] = _flag(
        "nccl",
        Exchange,
        "How graphs with dropless experts exchange tokens between expert-parallel ranks. nccl "
        "(default): an all-to-all with room for any routing, so it also sends padding. peer: each "
        "rank writes its tokens to the memory of the other GPUs, without padding; all "
        "expert-parallel ranks must be on one host.",
    )
    cg_record: str | None = _flag(
        None,
        _FOLDER,
        "Write how the run goes as JSON into this folder: losses, norms and times of steps, "
        "captures, memory, counters, and at the end the digest of every parameter shard. "
        "'megatron-cg align --records DIR DIR2' compares two runs.",
        metavar="DIR",
    )


@dataclass(frozen=True)
class RunArguments:
    """The settings of a Megatron run that the rules read, after Megatron's own derivations.

    A field has the name of Megatron's attribute (megatron-core 0.19.2) unless it is derived. The
    defaults are those of Megatron's parser.
    """

    use_megatron_fsdp: bool = False  # Megatron-FSDP wraps the model
    cuda_graph_impl: str = "none"  # which implementation of CUDA graphs
    cuda_graph_modules: tuple[str, ...] = ()  # scopes by name; empty is the whole layer
    optimizer_cuda_graph: bool = False  # the optimizer's step is a graph of its own
    optimizer_cpu_offload: bool = False  # the optimizer's state and step are the CPU's
    megatron_fsdp_version: int = 1  # which Megatron-FSDP; 2 is of megatron-core 0.20
    nccl_ub: bool = False  # its buffers are registered with NCCL
    fsdp_double_buffer: bool = False  # unsharded parameters live in two fixed buffers
    fsdp_db_use_persist_buf_on_alloc_fail: bool = False  # other buffers stay too
    gradient_accumulation_fusion: bool = True  # weight gradients go into main_grad in TE
    num_layers: int | None = None  # decoder layers, without multi-token prediction
    hybrid_layer_pattern: str | None = None  # one letter a layer, of a hybrid model
    custom_layers: bool = False  # a layer spec or heterogeneous config decides the layers
    num_experts: int | None = None  # experts of a MoE layer
    moe_grouped_gemm: bool = False  # experts compute by a grouped GEMM
    moe_layer_freq: int | tuple[int, ...] = 1  # which layers are MoE: every Nth, or 0/1
    moe_expert_capacity_factor: float | None = None  # capacity of an expert
    moe_pad_expert_input_to_capacity: bool = False  # every expert gets that many tokens
    moe_token_dispatcher_type: str = "allgather"  # how tokens reach their experts
    moe_router_load_balancing_type: tuple[str, ...] = ("aux_loss",)  # kinds of balancing
    moe_shared_expert_overlap: bool = False  # shared expert runs beside communication
    moe_input_jitter_eps: float | None = None  # random noise on a MoE layer's input
    moe_router_force_load_balancing: bool = False  # random logits in place of a router's
    moe_router_force_biased: float | None = None  # and a random bias on them
    expert_model_parallel_size: int = 1  # ranks that share the experts
    expert_tensor_parallel_size: int = 1  # tensor-parallel ranks of an expert
    add_bias_linear: bool = True  # linear layers have a bias
    moe_router_padding_for_quantization: bool = False  # routers pad each expert's rows
    moe_use_grouped_tensor: bool = False  # a grouped GEMM of padded rows; since 0.20
    use_transformer_engine_op_fuser: bool = False  # TE fuses the experts' operations
    qk_clip: bool = False  # the optimizer clips weights by the largest logits
    log_max_attention_logit: bool = False  # the log has the largest logits
    recompute_granularity: str | None = None  # None, selective or full
    recompute_method: str | None = None  # None, uniform or block; of full
    recompute_modules: tuple[str, ...] = ("core_attn",)  # what selective recomputes
    attention_dropout: float = 0.1  # dropout in attention
    hidden_dropout: float = 0.1  # dropout after attention and MLP
    sequence_parallel: bool = False  # tensor-parallel ranks share what is between GEMMs
    fine_grained_activation_offloading: bool = False  # activations of modules go there
    bf16: bool = False  # parameters and activations are bfloat16
    fp16: bool = False  # they are float16; without both they are float32
    fp8: str | None = None  # FP8 format, if any
    fp4: str | None = None  # FP4 format, if any
    fp8_recipe: str = "delayed"  # how FP8 scales are found
    fp8_param_gather: bool = False  # primary weights are FP8
    keep_fp8_transpose_cache: bool = False  # transposes of FP8 weights stay allocated
    pipeline_model_parallel_size: int = 1  # pipeline stages
    overlap_moe_expert_parallel_comm: bool = False  # 1F1B overlap with expert parallel
    overlap_dispatch_backward_with_experts_wgrad: bool = False  # the same for experts
    mtp_num_layers: int | None = None  # multi-token-prediction depth
    mtp_use_repeated_layer: bool = False  # one MTP layer is run at every depth
    moe_enable_routing_replay: bool = False  # routers record or repeat their choices
    packs_sequences: bool = False  # a flag packs several sequences into one
    rotates_positions: bool = False  # positions are rotary
    apply_rope_fusion: bool = True  # one kernel rotates them
    context_parallel_size: int = 1  # ranks that share a sequence
    micro_batch_size: int = 1  # sequences of a pass
    window_size: Any = None  # sliding-window attention
    softmax_type: str = "vanilla"  # other ones have attention sinks
    attention_backend: str = "auto"  # which of TE's kernels compute attention
    multi_latent_attention: bool = False  # MLA
    te_rng_tracker: bool = False  # the flag as given; Megatron sets it with graphs

    @property
    def wants_graphs(self) -> bool:
        """Whether the run asks for layerwise graphs under Megatron-FSDP: this package's case."""
        return self.use_megatron_fsdp and self.cuda_graph_impl not in ("none", "full_iteration")

    @property
    def is_moe(self) -> bool:
        return self.num_experts is not None and self.num_experts > 1

    @property
    def scope_names(self) -> tuple[str, ...]:
        """The run's scopes, under their names in ``--cg-layers``."""
        return self.cuda_graph_modules or (WHOLE_LAYER,)

    @property
    def drops_and_pads(self) -> bool:
        return self.moe_expert_capacity_factor is not None and self.moe_pad_expert_input_to_capacity

    @property
    def has_low_precision(self) -> bool:
        return self.fp8 is not None or self.fp4 is not None

    @property
    def one_kernel(self) -> str:
        """The ``--cg-grouped-gemm`` that is one kernel for all experts and needs the least."""
        return "cublas" if self.has_low_precision else "torch"

    @property
    def unmeasured_with_packs(self) -> str:
        """The flags with which the bits of packs in graphs were not measured."""
        found = {
            "--attention-dropout": self.attention_dropout,
            "--window-size": self.window_size is not None,
            "--softmax-type": self.softmax_type != "vanilla",
            "--multi-latent-attention": self.multi_latent_attention,
        }
        return " ".join(flag for flag, is_given in found.items() if is_given)

    def captures(self, scope: str) -> bool:
        return not self.cuda_graph_modules or scope in self.cuda_graph_modules

    def recomputes(self, module: str) -> bool:
        return self.recompute_granularity == "selective" and module in self.recompute_modules


def recomputes_layers(settings: Any) -> bool:
    """Whether Megatron recomputes whole layers, by RunArguments, its config, or its arguments."""
    return bool(settings.recompute_granularity == "full")


def mtp_is_repeated(settings: Any) -> bool:
    """Whether one layer predicts all further tokens, so that it runs several times in a pass.

    It has no graph: that would keep the activations of one run alone; see Note [Order of replays]
    in ``replay/guarded_graph.py``.
    """
    return bool(settings.mtp_use_repeated_layer and (settings.mtp_num_layers or 0) > 1)


@dataclass(frozen=True)
class Environment:
    """Installed versions and environment variables; what is not set is not in the mapping.

    ``backend`` is the name of the capture backend: the rules about Transformer Engine apply only
    to its own, and those about the CUDA allocator not to ``"tape"``.
    """

    versions: Mapping[str, str] = field(default_factory=dict)
    variables: Mapping[str, str] = field(default_factory=dict)
    backend: str = TRANSFORMER_ENGINE
    lacks_device_counts: str = NOT_LOADED
    """Why Transformer Engine's grouped GEMM cannot read counts on the device; empty if it can."""
    without: tuple[str, ...] = ()
    """The extensions of this package that are not installed."""

    @classmethod
    def read(cls, backend: str = TRANSFORMER_ENGINE) -> Self:
        """The environment of this process, from what it imports and ``os.environ``."""
        return cls(
            versions={name: found for name in PACKAGES if (found := installed_version(name))},
            variables={name: os.environ[name] for name in VARIABLES if name in os.environ},
            backend=backend,
            lacks_device_counts=lacks_device_counts(),
            without=not_installed(),
        )


def shared_by_ranks() -> dict[str, str]:
    """What is the same on all ranks of a run beside its settings, and how each part is called."""
    versions = {name: installed_version(name) for name in PACKAGES}
    versions["megatron_cg"] = version.__version__
    return {f"version of {name}": found or "not installed" for name, found in versions.items()} | {
        f"environment variable {name}": os.environ.get(name, "not set") for name in VARIABLES
    }
