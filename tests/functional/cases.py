"""The configurations that the functional suite aligns: a preset, scopes, and Megatron's flags."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

MOE, DENSE, MLA = "qwen3-moe-tiny", "llama-tiny", "deepseek-v3-tiny"
MIXTRAL, HYBRID = "mixtral-tiny", "mamba-hybrid-tiny"
QWEN3, DEEPSEEK = "qwen3-moe", "deepseek-v3"
ROUTER = ("attn", "moe_router")
PREPROCESS = ("attn", "moe_router", "moe_preprocess")
DROPOUT = ("--attention-dropout", "0.1", "--hidden-dropout", "0.1")
FP8 = ("--fp8-format", "hybrid")
TENSORWISE = (*FP8, "--fp8-recipe", "tensorwise")
FP8_WEIGHTS = ("--fp8-param-gather", "--keep-fp8-transpose-cache")
RECOMPUTE = ("--recompute-granularity", "selective", "--recompute-modules")
FULL = ("--recompute-granularity", "full", "--recompute-method")
UNIFORM = (*FULL, "uniform", "--recompute-num-layers", "1")
TENSOR_PARALLEL = ("--tensor-model-parallel-size", "2", "--sequence-parallel")
EVALUATED = ("--eval-interval", "5", "--eval-iters", "2", "--split", "90,5,5")
EP2, EP4, EP8 = (("--expert-model-parallel-size", size) for size in "248")
TORCH_GEMM = ("--cg-grouped-gemm", "torch")
"""For the graph run alone, against Transformer Engine's GEMM; in ``flags`` for both runs."""
PEER_MEMORY = ("--cg-moe-exchange", "peer")
"""For the graph run alone: tokens go to the memory of other GPUs directly."""
PEERS = (*TORCH_GEMM, *PEER_MEMORY)
CUBLAS_GEMM = ("--cg-grouped-gemm", "cublas")
STASH = ("--cg-moe-stash", "4")
BLOCKWISE = ("--fp8-format", "e4m3", "--fp8-recipe", "blockwise")
LONG = (*EP2, *CUBLAS_GEMM, "--moe-ffn-hidden-size", "7168")
WIDE = (*EP2, "--num-layers", "2", *TORCH_GEMM)
DEVICE_COUNTS = "cuBLASLt's grouped GEMM with counts on the device"
RECOMPUTED = (*RECOMPUTE, "moe_act", "layernorm", "mla_up_proj")
OVERLAP = ("--moe-shared-expert-overlap", "--moe-shared-expert-gate")
CAPACITY = ("--moe-expert-capacity-factor", "1.0", "--moe-pad-expert-input-to-capacity")
NATIVE = ("--cg-backend", "native")
VERIFIED = ("--cg-verify-interval", "2", "--cg-on-mismatch", "error")
LOCAL = ("--transformer-impl", "local", "--no-persist-layer-norm", "--no-masked-softmax-fusion")
"""As without Apex: its norm and Megatron's fused softmax are packages that need not be there."""
ZERO2 = ("--data-parallel-sharding-strategy", "optim_grads")
ZERO1 = ("--data-parallel-sharding-strategy", "optim")
HSDP = ("--num-distributed-optimizer-instances", "2")
HFSDP = (*HSDP, "--outer-dp-sharding-strategy", "optim")
"""The optimizer's state is sharded over all ranks, weights over half of them."""
SAVED = ("--save", "{directory}/{run}/checkpoints")
CHECKPOINT = ("--save-interval", "6", *SAVED)
UNCLIPPED_EP2 = (*EP2, "--clip-grad", "0")
"""Under v2, Megatron's norm of gradients fails with experts on ranks of their own, eagerly too."""
PACKS = ("--dataloader-inter-document-masking", "--micro-batch-size", "1")
EXPERTS, MLP = ("attn", "moe"), ("attn", "mlp")
ONE_EACH = ("--expert-tensor-parallel-size", "1")
SAVES = "--save-activations-interval"
"""Steps whose activations are saved run eagerly."""
WITHOUT_ROOM = ("packed-full", "packed-full-ep2", "stash-overflows")
"""Passes and steps with more samples or rows than there is room for run eagerly."""


@dataclass(frozen=True)
class Case:
    """One alignment; ``gpus`` 2 where not said."""

    name: str
    preset: str
    scopes: tuple[str, ...]
    flags: tuple[str, ...] = ()
    gpus: int = 2
    steps: int = 12
    needs: str = ""
    """A module without which the case cannot run, or :data:`DEVICE_COUNTS`."""
    graph_flags: tuple[str, ...] = ()
    """This package's flags, for the graph run."""
    env: tuple[tuple[str, str], ...] = ()
    """Environment variables of both runs."""
    bf16: bool = True
    """False: the model is in fp32."""
    fsdp_version: int = 1
    """As ``--megatron-fsdp-version``; 2 is of megatron-core 0.20."""
    scenario: str = ""
    """What ``tampered.py`` does in both runs."""


def batch(size: int) -> tuple[str, ...]:
    return ("--global-batch-size", str(size))


def _words(text: str) -> tuple[str, ...]:
    """Flags as typed; a name in capitals is one above, and ``b8`` a global batch of 8."""
    found: list[str] = []
    for word in text.split():
        size = word.removeprefix("b")
        found += batch(int(size)) if size.isdigit() and size != word else [word]
        if word.isupper():
            found[-1:] = globals()[word]
    return tuple(found)


def _rows(table: str) -> Iterator[list[str]]:
    """Each line's columns; one that is indented continues the line before, ``#`` is a comment."""
    for line in table.replace("\n   ", "").splitlines():
        if line and line[0] != "#":
            columns = [column.strip() for column in line.split("|")]
            yield columns + [""] * (5 - len(columns))


def _cases(table: str) -> list[Case]:
    """Name, preset and scopes, Megatron's flags, this package's flags of the graph run, the rest.

    The rest are fields of :class:`Case`, and variables of both runs.
    """
    cases = []
    for name, captured, flags, ours, rest in _rows(table):
        preset, *scopes = captured.split()
        more = dict(word.split("=", 1) for word in rest.split())
        cases.append(
            Case(
                name,
                globals()[preset],
                _words(scopes[0]) if scopes and scopes[0].isupper() else tuple(scopes),
                _words(flags),
                int(more.pop("gpus", "2")),
                needs=DEVICE_COUNTS if name.startswith("cublas") else more.pop("needs", ""),
                graph_flags=_words(ours),
                bf16=more.pop("bf16", "") != "False",
                fsdp_version=1 + name.startswith("v2-"),
                scenario=more.pop("scenario", ""),
                env=(*more.items(),),
            )
        )
    return cases


CASES = _cases("""
# All scopes of a router's layer under every kind of parallelism in the support table.
preprocess-dp2      | MOE PREPROCESS | b8
preprocess-tp2      | MOE PREPROCESS | b4 TENSOR_PARALLEL
preprocess-ep2      | MOE PREPROCESS | b8 EP2
preprocess-ep2-etp2 | MOE PREPROCESS | b8 TENSOR_PARALLEL EP2 --expert-tensor-parallel-size 2
    || gpus=4
# Graphs that hold whole MoE layers without drop and pad.
# The input gradient of fc1 sums 2,048 terms to a narrow output, which cuBLAS may split.
dropless-ep1-mixtral         | MIXTRAL EXPERTS | b8 TORCH_GEMM | TORCH_GEMM
dropless-ep1-zero2           | MOE EXPERTS | b8 ZERO2 | TORCH_GEMM
dropless-ep2                 | MOE EXPERTS | b8 EP2 | TORCH_GEMM
dropless-ep2-tp2             | MOE EXPERTS | b8 EP2 TENSOR_PARALLEL ONE_EACH | TORCH_GEMM
dropless-ep2-whole-layer     | MOE | b8 EP2 | TORCH_GEMM
dropless-ep2-evaluation      | MOE EXPERTS | b8 EP2 EVALUATED --empty-unused-memory-level 2
    | TORCH_GEMM
dropless-ep2-permute-fusion  | MOE EXPERTS | b8 EP2 --moe-permute-fusion | TORCH_GEMM
dropless-ep2-shared-experts  | MLA EXPERTS | b8 EP2 RECOMPUTED | TORCH_GEMM
# In a graph as many rows as 192 of each expert, eagerly 96: grouped_mm takes other tiles.
dropless-ep2-few-rows        | MOE EXPERTS | b8 EP2 --seq-length 192 | TORCH_GEMM
dropless-ep2-verified        | MOE EXPERTS | b8 EP2 | TORCH_GEMM VERIFIED
dropless-ep2-native          | MOE EXPERTS | b8 EP2 | TORCH_GEMM NATIVE
dropless-ep2-no-fast-path    | MOE EXPERTS | b8 EP2 | TORCH_GEMM --cg-no-fsdp-fast-path
dropless-ep2-layers          | MOE EXPERTS | b8 EP2 | TORCH_GEMM --cg-layers attn:0-1 moe:1-
# As many rows as any routing sends to one of two ranks: no step is repeated.
dropless-ep2-rows-evaluation | MOE EXPERTS | b8 EP2 EVALUATED | TORCH_GEMM --cg-moe-rows 2
# Graphs that keep the rows that were used; with the factor 1 some steps are repeated.
stash-ep2             | MOE EXPERTS | b8 EP2 | TORCH_GEMM STASH
stash-ep2-tp2         | MOE EXPERTS | b8 EP2 TENSOR_PARALLEL ONE_EACH | TORCH_GEMM STASH
stash-whole-layer     | MOE | b8 EP2 --moe-permute-fusion | TORCH_GEMM STASH
stash-overflows       | MOE EXPERTS | b8 EP2 | TORCH_GEMM --cg-moe-stash 1
stash-verified        | MOE EXPERTS | b8 EP2 | TORCH_GEMM STASH VERIFIED --cg-verify-steps 3
stash-native          | MOE EXPERTS | b8 EP2 | TORCH_GEMM STASH NATIVE
stash-evaluation      | MOE EXPERTS | b16 EP2 EVALUATED | PEERS STASH
stash-shared-experts  | MLA EXPERTS | b8 EP2 RECOMPUTED OVERLAP | TORCH_GEMM STASH
stash-full-recompute  | MOE EXPERTS | b8 FULL block --recompute-num-layers 1 EP2 | TORCH_GEMM STASH
cublas-stash          | MOE EXPERTS | b8 EP2 | CUBLAS_GEMM PEER_MEMORY STASH
cublas-fp8-stash      | MOE EXPERTS | b8 EP2 TENSORWISE | CUBLAS_GEMM PEER_MEMORY STASH
# Widths of real models, two layers. Both runs have torch's grouped GEMM: see experts.md.
dropless-realistic-qwen3       | QWEN3 EXPERTS | b4 WIDE
dropless-realistic-deepseek-v3 | DEEPSEEK EXPERTS | b4 WIDE --moe-layer-freq ([0]*1+[1]*1)
dropless-realistic-mixtral     | MIXTRAL EXPERTS | b4 WIDE --hidden-size 2048 --ffn-hidden-size 7168
     --moe-ffn-hidden-size 7168 --num-attention-heads 16 --num-query-groups 4 --seq-length 2048
     --max-position-embeddings 2048 --micro-batch-size 1
peers-realistic-qwen3          | QWEN3 EXPERTS | b4 WIDE | PEERS
# Whole dropless MoE layers with cuBLASLt's grouped GEMM, in BF16 and FP8.
cublas-ep1                  | MOE EXPERTS | b8 | CUBLAS_GEMM
cublas-ep2                  | MOE EXPERTS | b8 EP2 | CUBLAS_GEMM
cublas-peers                | MOE EXPERTS | b8 EP2 | CUBLAS_GEMM PEER_MEMORY
cublas-ep2-rows-evaluation  | MOE EXPERTS | b8 EP2 EVALUATED | CUBLAS_GEMM --cg-moe-rows 2
cublas-shared-experts       | MLA EXPERTS | b8 EP2 RECOMPUTED | CUBLAS_GEMM VERIFIED
# Transformer Engine's GEMM for each expert splits such sums, so both runs have cuBLASLt's.
cublas-long                 | MIXTRAL EXPERTS | b8 LONG EVALUATED | VERIFIED
cublas-capacity             | MOE EXPERTS | b8 CAPACITY CUBLAS_GEMM
cublas-fp8-ep1              | MOE EXPERTS | b8 TENSORWISE | CUBLAS_GEMM
cublas-fp8-ep2              | MOE EXPERTS | b8 EP2 TENSORWISE | CUBLAS_GEMM
cublas-fp8-peers            | MOE EXPERTS | b8 EP2 TENSORWISE | CUBLAS_GEMM PEER_MEMORY
cublas-fp8-evaluation       | MOE EXPERTS | b8 EP2 TENSORWISE EVALUATED | CUBLAS_GEMM PEER_MEMORY
cublas-fp8-verified         | MOE | b8 EP2 TENSORWISE | CUBLAS_GEMM PEER_MEMORY VERIFIED
cublas-fp8-weights          | MOE EXPERTS | b8 EP2 TENSORWISE FP8_WEIGHTS | CUBLAS_GEMM
cublas-fp8-recomputed       | MOE EXPERTS | b8 EP2 TENSORWISE RECOMPUTE moe_act layernorm
    | CUBLAS_GEMM
cublas-fp8-long             | MIXTRAL EXPERTS | b8 LONG TENSORWISE | PEER_MEMORY VERIFIED
cublas-fp8-blockwise        | MOE EXPERTS | b8 EP2 BLOCKWISE | CUBLAS_GEMM VERIFIED
# A router with groups, sigmoid and bias, whose ranks get very different numbers of rows.
cublas-fp8-groups-peers     | MLA EXPERTS | b8 EP2 TENSORWISE | CUBLAS_GEMM PEER_MEMORY
cublas-fp8-groups-blockwise | MLA EXPERTS | b8 EP2 BLOCKWISE | CUBLAS_GEMM
# Experts that drop and pad, and FP8. Torch's grouped GEMM takes no FP8 and no fp32.
capacity             | MOE EXPERTS | b8 CAPACITY
capacity-torch-gemm  | MOE EXPERTS | b8 CAPACITY | TORCH_GEMM
capacity-whole-layer | MOE | b8 EP2 CAPACITY
fp8-capacity-weights | MOE EXPERTS | b8 CAPACITY FP8 FP8_WEIGHTS
fp8-delayed            | DENSE MLP | b8 FP8 --fp8-recipe delayed | VERIFIED
fp8-delayed-weights    | DENSE MLP | b8 FP8 --fp8-recipe delayed FP8_WEIGHTS | VERIFIED
fp8-tensorwise-weights | DENSE MLP | b8 TENSORWISE FP8_WEIGHTS | VERIFIED
fp8-blockwise          | DENSE MLP | b8 BLOCKWISE | VERIFIED
# A shared expert that runs beside the exchange of tokens, on a stream of its own.
overlapped-router       | MLA ROUTER | b8 OVERLAP EP2 | VERIFIED
overlapped-capacity     | MLA EXPERTS | b8 OVERLAP EP2 CAPACITY RECOMPUTED
overlapped-dropless-ep2 | MLA EXPERTS | b8 OVERLAP EP2 | TORCH_GEMM
# Graphs that exchange tokens by peer memory.
peers-ep2        | MOE EXPERTS | b8 EP2 | PEERS
peers-ep2-tp2    | MOE EXPERTS | b8 EP2 TENSOR_PARALLEL ONE_EACH | PEERS
peers-evaluation | MOE EXPERTS | b8 EP2 EVALUATED | PEERS
peers-overlapped | MLA EXPERTS | b8 EP2 OVERLAP | PEERS
peers-native     | MOE EXPERTS | b8 EP2 | PEERS NATIVE
# Captured by torch alone; Megatron's local layers have no kernel of Transformer Engine's.
native-dense       | DENSE MLP | b8 DROPOUT | NATIVE
native-ep2         | MOE PREPROCESS | b8 EP2 | NATIVE
native-tp2         | DENSE MLP | b8 TENSOR_PARALLEL | NATIVE
native-local-dense | DENSE MLP | b8 LOCAL DROPOUT | NATIVE
# Whole layers that recompute themselves in their graphs.
full-recompute-whole-layer  | DENSE | b8 UNIFORM
full-recompute-block        | DENSE MLP | b8 FULL block --recompute-num-layers 2
full-recompute-tp2          | DENSE | b8 UNIFORM TENSOR_PARALLEL
full-recompute-dropless-ep2 | MOE EXPERTS | b8 UNIFORM EP2 | TORCH_GEMM
full-recompute-native       | DENSE | b8 UNIFORM | NATIVE
# Others.
dense                  | DENSE MLP | b8
whole-layer            | DENSE | b8
four-microbatches      | DENSE MLP | b8 b16
hybrid-sharding        | MOE attn | b8 HSDP
zero2                  | MOE ROUTER | b8 ZERO2
zero1                  | DENSE MLP | b8 ZERO1
recompute              | MOE moe_router | b8 RECOMPUTE core_attn
recompute-in-graph     | DENSE MLP | b8 RECOMPUTE core_attn
inference-rng          | DENSE MLP | b8 DROPOUT --inference-rng-tracker
fine-grained-gathering | DENSE MLP | b8 --megatron-fsdp-enable-fine-grained-param-gather
verified-dropout       | DENSE MLP | b8 DROPOUT | VERIFIED
verified-moe-fp8       | MOE ROUTER | b8 FP8 | VERIFIED
context-parallel       | DENSE MLP | b8 --context-parallel-size 2
no-warmup              | DENSE MLP | b8 | --cuda-graph-warmup-steps 0
layers-between         | MOE ROUTER | b8 | --cg-layers attn:0,2 moe_router:0,2
latent-attention       | MLA PREPROCESS | b8 RECOMPUTED
delayed-gradients      | MOE PREPROCESS | b8 EP2 --overlap-dispatch-backward-with-experts-wgrad
saved-passes           | MOE EXPERTS | b8 EP2 --save-activations-interval 5
     --save-dgrads-interval 5 CHECKPOINT | TORCH_GEMM --cg-moe-rows 2
ramp-up                | MOE ROUTER | b16 --rampup-batch-size 8 8 48
fp32                   | DENSE MLP | b8 || bf16=False
fp32-capacity          | MOE EXPERTS | b8 CAPACITY || bf16=False
expandable-segments    | DENSE MLP | b4 TENSOR_PARALLEL
    || PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True NCCL_GRAPH_REGISTER=0
cutlass                | MOE PREPROCESS | b8 EP2 || NVTE_USE_CUTLASS_GROUPED_GEMM=1
mamba                  | HYBRID mamba attn | b8 || needs=mamba_ssm
""")


def _with_settings(table: str) -> Iterator[Case]:
    """Other cases once more, each with settings of Megatron's or torch's that no case has."""
    known = {case.name: case for case in CASES}
    for prefix, names, flags, env, _ in _rows(table):
        for case in map(known.__getitem__, names.split()):
            more = tuple(
                (name, value) for name, _, value in (w.partition("=") for w in env.split())
            )
            yield replace(
                case,
                name=f"{prefix}-{case.name}",
                flags=(*case.flags, *_words(flags)),
                env=(*case.env, *more),
            )


PACKED = _cases("""
# Documents of a sequence attend to themselves alone: a pack with other boundaries in each pass.
packed-attn        | DENSE attn | b8 PACKS
packed-mlp         | DENSE MLP | b8 PACKS | VERIFIED
packed-layer       | DENSE | b8 PACKS UNIFORM
packed-recompute   | DENSE MLP | b8 PACKS RECOMPUTE core_attn
packed-tp2         | DENSE MLP | b4 PACKS TENSOR_PARALLEL
packed-evaluation  | DENSE MLP | b8 PACKS EVALUATED
packed-preprocess  | MOE PREPROCESS | b8 PACKS
packed-dropless    | MOE EXPERTS | b8 EP2 PACKS TORCH_GEMM | TORCH_GEMM
packed-seq-aux     | MOE ROUTER | b8 PACKS --moe-router-load-balancing-type seq_aux_loss
packed-fp8         | DENSE MLP | b8 PACKS TENSORWISE
packed-native      | DENSE MLP | b8 PACKS | NATIVE
# Of every pass one rank or both have more samples than there is room for.
packed-full        | DENSE MLP | b8 PACKS | --cg-packed-samples 5
packed-full-ep2    | MOE EXPERTS | b8 EP2 PACKS TORCH_GEMM | TORCH_GEMM --cg-packed-samples 5
""")
FEATURES = [
    *_with_settings("""
meta           | dense dropless-ep2 fp8-delayed-weights native-local-dense
    | --init-model-with-meta-device
moments        | dropless-ep2 | --use-precision-aware-optimizer --exp-avg-dtype bf16
     --exp-avg-sq-dtype bf16
bf16-gradients | dense | --megatron-fsdp-main-grads-dtype bf16
     --megatron-fsdp-grad-comm-dtype bf16
# From before the capture until after some replays.
profiled       | dropless-ep2 | --profile --use-pytorch-profiler --record-memory-history
     --profile-step-start 2 --profile-step-end 8 --tensorboard-dir {directory}/{run}/tensorboard
     --memory-snapshot-path {directory}/{run}/snapshot.pickle
streams        | native-tp2
    || PYTORCH_CUDA_ALLOC_CONF=graph_capture_record_stream_reuse:True
held           | dropless-ep2 || TORCH_NCCL_AVOID_RECORD_STREAMS=1
registered     | dropless-ep2 | --use-nccl-ub --fsdp-manual-registration
largest        | dropless-ep2 | --megatron-fsdp-max-pool-double-buffer
""")
]

UNDER_V2 = _cases("""
v2-dense                    | DENSE MLP | b8 DROPOUT | VERIFIED
v2-whole-layer              | DENSE | b8 EVALUATED
v2-full-recompute           | DENSE | b8 UNIFORM
v2-preprocess-ep2           | MOE PREPROCESS | b8 UNCLIPPED_EP2
v2-dropless-ep2-evaluation  | MOE EXPERTS | b8 UNCLIPPED_EP2 EVALUATED | TORCH_GEMM
v2-dropless-ep2-whole-layer | MOE | b8 UNCLIPPED_EP2 | TORCH_GEMM
v2-peers-ep2                | MOE EXPERTS | b8 UNCLIPPED_EP2 | PEERS
""")


LARGE = _cases("""
# Each way of splitting a model over four and eight ranks: dense ones where no expert is split. With
# ep4 and ep8 eager runs with Transformer Engine's grouped GEMM and with torch's differed.
ep4-experts        | MOE EXPERTS | b16 EP4 TORCH_GEMM | TORCH_GEMM | gpus=4
tp2-fsdp2-dense    | DENSE MLP | b8 TENSOR_PARALLEL || gpus=4
tp2-fsdp2-experts  | MOE EXPERTS | b8 TENSOR_PARALLEL ONE_EACH | TORCH_GEMM | gpus=4
cp2-fsdp2-dense    | DENSE MLP | b16 --context-parallel-size 2 || gpus=4
cp2-fsdp2-experts  | MOE EXPERTS | b16 --context-parallel-size 2 | TORCH_GEMM | gpus=4
hsdp-four-dense    | DENSE MLP | b16 HSDP || gpus=4
hsdp-four-experts  | MOE EXPERTS | b16 HSDP | TORCH_GEMM | gpus=4
hfsdp-four-dense   | DENSE MLP | b16 HFSDP || gpus=4
hfsdp-four-experts | MOE EXPERTS | b16 HFSDP | TORCH_GEMM | gpus=4
ep8-experts        | MOE EXPERTS | b32 EP8 TORCH_GEMM | TORCH_GEMM | gpus=8
tp2-ep4-experts    | MOE EXPERTS | b16 TENSOR_PARALLEL EP4 ONE_EACH | TORCH_GEMM | gpus=8
tp2-fsdp4-dense    | DENSE MLP | b16 TENSOR_PARALLEL || gpus=8
tp2-fsdp4-experts  | MOE EXPERTS | b16 TENSOR_PARALLEL ONE_EACH | TORCH_GEMM | gpus=8
cp2-fsdp4-dense    | DENSE MLP | b16 --context-parallel-size 2 || gpus=8
cp2-fsdp4-experts  | MOE EXPERTS | b16 --context-parallel-size 2 | TORCH_GEMM | gpus=8
hsdp-dense         | DENSE MLP | b32 HSDP || gpus=8
hsdp-experts       | MOE EXPERTS | b32 HSDP | TORCH_GEMM | gpus=8
hfsdp-dense        | DENSE MLP | b32 HFSDP || gpus=8
hfsdp-experts      | MOE EXPERTS | b32 HFSDP | TORCH_GEMM | gpus=8
ep4-peers          | MOE EXPERTS | b16 EP4 TORCH_GEMM | PEER_MEMORY | gpus=4
ep4-peers-rows     | MOE EXPERTS | b16 EP4 TORCH_GEMM | PEER_MEMORY --cg-moe-rows 1 | gpus=4
ep2-etp2-capacity  | MOE EXPERTS | b4 TENSOR_PARALLEL EP2 --expert-tensor-parallel-size 2 CAPACITY
    || gpus=4
""")


_LIVES = _cases("""
# Of a run: saved, resumed, skipped, signalled, repeated.
dense           | DENSE MLP | b8 DROPOUT
moe             | MOE ROUTER | b8
experts         | MOE EXPERTS | b8 EP2 | TORCH_GEMM
peers           | MOE EXPERTS | b8 EP2 | PEERS
cublas          | MOE EXPERTS | b8 EP2 | CUBLAS_GEMM PEER_MEMORY
cublas-fp8      | MOE EXPERTS | b8 EP2 TENSORWISE | CUBLAS_GEMM PEER_MEMORY
bounded-peers   | MOE EXPERTS | b8 EP2 | PEERS --cg-moe-rows 1
bounded-meta    | MOE EXPERTS | b8 EP2 --init-model-with-meta-device | TORCH_GEMM --cg-moe-rows 1
saved-experts   | MOE EXPERTS | b8 EP2 CHECKPOINT | TORCH_GEMM
tensor-parallel | DENSE MLP | b4 TENSOR_PARALLEL
saved-dropout   | DENSE MLP | b8 DROPOUT CHECKPOINT
skipped         | MOE ROUTER | b8 --iterations-to-skip 4 7
signal          | MOE ROUTER | b8 SAVED --save-interval 100 --exit-signal-handler
    || scenario=signal@7
destroy         | DENSE MLP | b4 TENSOR_PARALLEL || scenario=destroy@7
# Refused, since no graph holds experts.
unused          | MOE ROUTER | b8 | PEER_MEMORY
""")
LIFE = {case.name: case for case in _LIVES}


def resumed(case: Case, step: int) -> Case:
    """The run that goes on from what ``case`` saved after ``step`` steps."""
    saves = {at for at, word in enumerate(case.flags) if word in ("--save", "--save-interval")}
    rest = [w for at, w in enumerate(case.flags) if at not in saves and at - 1 not in saves]
    flags = (*rest, "--ckpt-step", str(step), "--load", SAVED[1])
    return replace(case, name=f"{case.name}-resumed", flags=flags)
