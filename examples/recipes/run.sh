#!/usr/bin/env bash
# Trains a preset (arguments/presets/) under Megatron-FSDP with layerwise CUDA graphs, on the GPUs of
# this node.
#
#   DATA_PATH=/data/my_text_document TOKENIZER_MODEL=/data/tokenizer OUTPUT=/runs/1 \
#       bash examples/recipes/run.sh PRESET [more of Megatron's flags]
#   MOCK_DATA=1 TRAIN_ITERS=20 bash examples/recipes/run.sh qwen3-moe-tiny
#
# The second tries it on made-up data. GRAPHS=0 is the same run without graphs. EXPERTS_IN_GRAPHS=1
# captures whole MoE layers, which drop no token (docs/experts.md); below is where it
# is the default. Where each expert-parallel group lies in one node, ranks exchange tokens through
# peer memory; PEER_EXCHANGE=0 uses NCCL instead. Also read are GPUS_PER_NODE, GLOBAL_BATCH_SIZE,
# TENSOR_PARALLEL, CONTEXT_PARALLEL, EXPERT_PARALLEL, EXPANDABLE_SEGMENTS, SCRIPT and PYTHON.
set -euo pipefail

fail() { echo "$0: $*" >&2; exit 2; }
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
script=${SCRIPT:-$here/../pretrain_gpt.py}
python=${PYTHON:-python}
command -v "$python" >/dev/null || fail "there is no $python: set PYTHON to Python 3.12"
[[ -f $script ]] || fail "there is no $script: set SCRIPT to a pretraining script of Megatron's"
[[ -n ${1:-} && $1 != -* ]] || fail "name a preset first: bash $0 PRESET [more of Megatron's flags]"
preset=$1
shift

# Where, and how much.
for name in NODES GPUS_PER_NODE TRAIN_ITERS GLOBAL_BATCH_SIZE TENSOR_PARALLEL CONTEXT_PARALLEL \
    EXPERT_PARALLEL; do
    [[ ${!name:-1} =~ ^[1-9][0-9]*$ ]] || fail "$name=${!name} is no whole number of 1 or more"
done
for name in GRAPHS EXPERTS_IN_GRAPHS PEER_EXCHANGE MOCK_DATA EXPANDABLE_SEGMENTS; do
    [[ ${!name:-1} == [01] ]] || fail "$name=${!name} is neither 0 nor 1"
done
nodes=${NODES:-1}
gpus=${GPUS_PER_NODE:-$(nvidia-smi -L 2>/dev/null | wc -l || true)}
((gpus > 0)) || fail "nvidia-smi finds no GPU: set GPUS_PER_NODE to how many this node has"
iterations=${TRAIN_ITERS:-1000}
# Whole MoE layers in graphs pay if a model has many small experts. They need Hopper GPUs, in FP8 a
# newer cuBLASLt (docs/experts.md), and memory for any routing: with two expert-parallel ranks twice
# the average, with more ranks more.
whole=${EXPERTS_IN_GRAPHS:-0}
if [[ -z ${EXPERTS_IN_GRAPHS:-} && $preset =~ ^(qwen3-moe|deepseek-v3)(-tiny)?$ &&
    ${EXPERT_PARALLEL:-1} -le 2 && " $*" != *" --fp"[48]-* ]]; then
    capability=$(nvidia-smi --query-gpu=compute_cap --format=csv,noheader 2>&1 | sort -u || true)
    if [[ $capability == 9.0 ]]; then whole=1; fi
fi
global_batch=${GLOBAL_BATCH_SIZE:-$((nodes * gpus * 4))}

# What is trained on.
if [[ ${MOCK_DATA:-0} == 1 ]]; then
    data=(--mock-data --tokenizer-type NullTokenizer)
else
    [[ -n ${DATA_PATH:-} ]] || fail "set DATA_PATH to the prefix of a dataset that Megatron's" \
        "tools/preprocess_data.py wrote (/data/my_text_document), or MOCK_DATA=1 to try the script"
    for file in "$DATA_PATH.bin" "$DATA_PATH.idx"; do
        [[ -f $file ]] || fail "there is no $file: DATA_PATH is the common prefix of .bin and .idx"
    done
    [[ -n ${TOKENIZER_MODEL:-} ]] || fail "set TOKENIZER_MODEL to the name or folder of the" \
        "Hugging Face tokenizer that the dataset was made with"
    data=(--data-path "$DATA_PATH" --split '99,1,0'
        --tokenizer-type HuggingFaceTokenizer --tokenizer-model "$TOKENIZER_MODEL")
fi
if [[ -n ${OUTPUT:-} ]]; then
    data+=(--save "$OUTPUT/checkpoints" --load "$OUTPUT/checkpoints" --save-interval 500
        --tensorboard-dir "$OUTPUT/tensorboard" --data-cache-path "$OUTPUT/cache")
fi

# Megatron-FSDP refuses 1 (megatron-core 0.19.2, training/arguments.py: "FSDP requires
# CUDA_DEVICE_MAX_CONNECTIONS > 1 or unset"); many containers set it.
unset CUDA_DEVICE_MAX_CONNECTIONS
# TE opens the cuDNN of CUDNN_HOME before that of the CUDA toolkit and the system (2.20.2,
# common/__init__.py, _load_cuda_library_from_system). An older system cuDNN costs fused attention,
# so this is the one that torch brings.
if [[ -z ${CUDNN_HOME:-} ]]; then
    torch_cudnn='import nvidia.cudnn; print(nvidia.cudnn.__path__[0])'
    CUDNN_HOME=$("$python" -c "$torch_cudnn" 2>/dev/null || true)
    if [[ -n $CUDNN_HOME ]]; then export CUDNN_HOME; else unset CUDNN_HOME; fi
fi
# How many GEMM problems cuBLASLt remembers the best kernel for. Experts need more than its 8,192.
export CUBLASLT_HEURISTICS_CACHE_CAPACITY=${CUBLASLT_HEURISTICS_CACHE_CAPACITY:-262144}
# Against fragmentation: EXPANDABLE_SEGMENTS=1. Then NCCL must not register graphs' buffers, or a
# replay reads unmapped memory (megatron-core 0.19.2, cuda_graphs.py, TECudaGraphHelper).
if [[ ${EXPANDABLE_SEGMENTS:-0} == 1 ]]; then
    export PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True NCCL_GRAPH_REGISTER=0
fi
# Not set, on purpose: TORCH_NCCL_AVOID_RECORD_STREAMS (torch 2.11: "is the default now, this
# environment variable is thus deprecated"), and NVTE_FLASH_ATTN and its like (--attention-backend
# chooses).

# The preset: its scopes in the first line, then its flags, a word a line.
words=$("$python" -m megatron_cg.tools.align.presets "$preset") || exit 2
mapfile -t model <<<"$words"
read -ra scopes <<<"${model[0]}"
model=("${model[@]:1}")
parallel=(
    --tensor-model-parallel-size "${TENSOR_PARALLEL:-1}"
    --context-parallel-size "${CONTEXT_PARALLEL:-1}"
)
experts=()
# Megatron fuses rotary embeddings by default; with latent attention only those of YaRN.
if [[ " ${model[*]} " == *" --multi-latent-attention "* ]]; then model+=(--no-rope-fusion); fi
if [[ " ${model[*]} " == *" --num-experts "* ]]; then
    parallel+=(--expert-model-parallel-size "${EXPERT_PARALLEL:-1}" --moe-permute-fusion)
    if [[ $whole == 1 ]]; then
        mapfile -t scopes < <(printf '%s\n' "${scopes[@]}" moe | grep -v '^moe_')
        # One grouped GEMM for all experts, in a run with GRAPHS=0 too, so that its bits are equal.
        kernel=torch
        if [[ " $*" == *" --fp8-"* ]]; then kernel=cublas; fi
        experts=(--cg-grouped-gemm "$kernel" --expert-tensor-parallel-size 1)
        # Ranks of a group are consecutive.
        peer=$((${EXPERT_PARALLEL:-1} > 1 && gpus % ${EXPERT_PARALLEL:-1} == 0))
    fi
elif [[ $whole == 1 ]]; then
    fail "EXPERTS_IN_GRAPHS=1 needs a MoE model, and $preset is none"
fi
if ((${TENSOR_PARALLEL:-1} > 1)); then parallel+=(--sequence-parallel); fi
training=(
    --bf16 --transformer-impl transformer_engine
    --global-batch-size "$global_batch" --train-iters "$iterations"
    --lr 3e-4 --min-lr 3e-5 --lr-decay-style cosine --lr-warmup-fraction 0.01
    --weight-decay 0.1 --adam-beta1 0.9 --adam-beta2 0.95 --clip-grad 1.0
    --eval-interval 500 --eval-iters 10 --log-interval 10
    # Attention is causal by itself; a mask would be copied into every graph.
    --no-create-attention-mask-in-dataloader
    # The generator that graphs need; with it GRAPHS=0 draws the same numbers.
    --te-rng-tracker
)
fsdp=(
    --use-megatron-fsdp --data-parallel-sharding-strategy optim_grads_params
    --use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather
    --ckpt-format fsdp_dtensor --no-gradient-accumulation-fusion
)
graphs=(--cuda-graph-impl none)
if [[ ${GRAPHS:-1} == 1 ]]; then
    graphs=(
        --cuda-graph-impl transformer_engine
        --cuda-graph-warmup-steps 3
        # Unsharded parameters stay where they lay at capture.
        --fsdp-double-buffer --fsdp-db-use-persist-buf-on-alloc-fail
    )
    # Without modules whole layers are captured.
    if ((${#scopes[@]} > 0)); then graphs+=(--cuda-graph-modules "${scopes[@]}"); fi
    if [[ ${PEER_EXCHANGE:-${peer:-0}} == 1 ]]; then graphs+=(--cg-moe-exchange peer); fi
fi

launch=(--standalone)
if ((nodes > 1)); then
    [[ -n ${RENDEZVOUS:-} && -n ${RUN_ID:-} ]] || fail "for $nodes nodes set RENDEZVOUS to" \
        "host:port of one of them and RUN_ID to any number, the same on all; submit.sbatch does"
    launch=(--nnodes "$nodes" --rdzv-backend c10d --rdzv-endpoint "$RENDEZVOUS" --rdzv-id "$RUN_ID")
fi
exec "$python" -m torch.distributed.run "${launch[@]}" --nproc-per-node "$gpus" \
    -m megatron_cg "$script" "${model[@]}" "${parallel[@]}" "${training[@]}" "${fsdp[@]}" \
    ${experts[@]+"${experts[@]}"} "${graphs[@]}" "${data[@]}" "$@"
