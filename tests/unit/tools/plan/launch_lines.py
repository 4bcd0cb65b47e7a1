"""Launch lines of models that people train, with the published flags that a plan may depend on.

Shapes and settings are those of Megatron-LM's examples, the Megatron MoE model zoo and
Megatron-Bridge. Each is started in another way.
"""

_MODEL = (
    "--use-mcore-models --untie-embeddings-and-output-weights --normalization RMSNorm "
    "--attention-dropout 0.0 --hidden-dropout 0.0 "
)
_DENSE = (
    f"{_MODEL}--swiglu --disable-bias-linear --position-embedding-type rope --attention-backend "
    "fused --group-query-attention --num-query-groups 8 --kv-channels 128 "
)
_TRAINED = (
    "--train-samples 1953125 --lr 0.00015 --bf16 --save ckpt --save-interval 1000 --load ckpt "
    "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather "
)
_MOCK = (
    "--mock-data --tokenizer-type NullTokenizer --vocab-size 128256 --split '99,1,0' "
    "--no-create-attention-mask-in-dataloader "
)
_DATA = (
    "--data-path /data/text_document --tokenizer-type HuggingFaceTokenizer "
    "--tokenizer-model some/model --split 99,1,0 "
)
_FSDP = (
    "--use-megatron-fsdp --data-parallel-sharding-strategy optim_grads_params "
    "--no-gradient-accumulation-fusion --calculate-per-token-loss --init-model-with-meta-device "
    "--ckpt-format fsdp_dtensor --use-nccl-ub --fsdp-double-buffer --fsdp-manual-registration "
)
_FP8 = "--fp8-format hybrid --fp8-amax-history-len 1024 --fp8-amax-compute-algo max "
_LLAMA_8B = (
    f"{_DENSE}--num-layers 32 --hidden-size 4096 --ffn-hidden-size 14336 --num-attention-heads 32 "
    "--seq-length 8192 --max-position-embeddings 8192 --rotary-base 1000000 --apply-layernorm-1p "
    f"--micro-batch-size 1 --global-batch-size 128 {_TRAINED}{_MOCK}--cross-entropy-loss-fusion "
    "--tensor-model-parallel-size 1 --context-parallel-size 1 --sequence-parallel "
)
_LLAMA_70B = (
    f"{_DENSE}--num-layers 80 --hidden-size 8192 --ffn-hidden-size 28672 --num-attention-heads 64 "
    f"--max-position-embeddings 8192 --rotary-base 500000 --seq-length 8192 {_TRAINED}{_MOCK}"
)
_QWEN = (
    f"{_MODEL}--disable-bias-linear --position-embedding-type rope --rotary-base 1000000 --swiglu "
    "--group-query-attention --num-query-groups 4 --kv-channels 128 --qk-layernorm --seq-length "
    "4096 --max-position-embeddings 40960 --make-vocab-size-divisible-by 1187 --num-experts 128 "
    "--vocab-size 151643 --moe-router-load-balancing-type aux_loss --moe-router-topk 8 "
    "--moe-grouped-gemm --moe-aux-loss-coeff 1e-3 --moe-permute-fusion --moe-router-dtype fp32 "
    f"--expert-tensor-parallel-size 1 {_TRAINED}{_DATA}"
)
_QWEN_30B = (
    f"{_QWEN}--num-layers 48 --hidden-size 2048 --ffn-hidden-size 6144 --num-attention-heads 32 "
    "--moe-ffn-hidden-size 768 "
)
_QWEN_235B = (
    f"{_QWEN}--num-layers 94 --hidden-size 4096 --ffn-hidden-size 12288 --num-attention-heads 64 "
    "--moe-ffn-hidden-size 1536 --moe-router-fusion --cross-entropy-loss-fusion "
    "--cross-entropy-fusion-impl te --enable-experimental "
)
_DEEPSEEK = (
    f"{_MODEL}--disable-bias-linear --num-layers 61 --hidden-size 7168 --ffn-hidden-size 18432 "
    "--num-attention-heads 128 --kv-channels 128 --seq-length 4096 --max-position-embeddings 4096 "
    "--rotary-base 10000 --position-embedding-type rope --make-vocab-size-divisible-by 3232 "
    "--swiglu --multi-latent-attention --qk-layernorm --num-experts 256 --moe-layer-freq "
    "([0]*3+[1]*58) --moe-ffn-hidden-size 2048 --vocab-size 129280 "
    "--moe-shared-expert-intermediate-size 2048 --moe-router-load-balancing-type seq_aux_loss "
    "--moe-router-topk 8 --moe-grouped-gemm --moe-aux-loss-coeff 1e-4 --moe-router-group-topk 4 "
    "--moe-router-num-groups 8 --moe-router-topk-scaling-factor 2.5 --moe-router-dtype fp32 "
    "--moe-router-score-function sigmoid --moe-router-enable-expert-bias --moe-permute-fusion "
    "--q-lora-rank 1536 --kv-lora-rank 512 --qk-head-dim 128 --qk-pos-emb-head-dim 64 "
    "--v-head-dim 128 --rotary-scaling-factor 40 --mtp-num-layers 1 --expert-tensor-parallel-size "
    f"1 --enable-experimental {_TRAINED}{_DATA}"
)
_GPT_OSS = (
    f"{_MODEL}--no-masked-softmax-fusion --no-rope-fusion --hidden-size 2880 --ffn-hidden-size "
    "2880 --num-attention-heads 64 --group-query-attention --num-query-groups 8 --kv-channels 64 "
    "--seq-length 4096 --max-position-embeddings 40960 --rotary-base 150000 --no-bias-gelu-fusion "
    "--no-bias-dropout-fusion --padded-vocab-size 201088 --quick-geglu --glu-linear-offset 1.0 "
    "--softmax-type learnable --window-attn-skip-freq 2 --activation-func-clamp-value 7.0 "
    "--window-size 128,0 --position-embedding-type yarn --rotary-scaling-factor 32 "
    "--moe-router-load-balancing-type none --moe-router-topk 4 --moe-grouped-gemm "
    "--moe-permute-fusion --moe-ffn-hidden-size 2880 --moe-router-dtype fp32 "
    "--moe-token-dispatcher-type alltoall --moe-router-score-function softmax "
    f"--micro-batch-size 1 {_TRAINED}{_DATA}"
)
_NEMOTRON = (
    f"{_MODEL}--hybrid-layer-pattern MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME --spec "
    "megatron.core.models.hybrid.hybrid_layer_specs hybrid_stack_spec --hidden-size 2688 "
    "--num-attention-heads 32 --group-query-attention --num-query-groups 2 --kv-channels 128 "
    "--mamba-num-heads 64 --squared-relu --position-embedding-type none --ffn-hidden-size 1856 "
    "--seq-length 8192 --max-position-embeddings 8192 --disable-bias-linear --num-experts 128 "
    "--moe-router-topk 6 --moe-router-score-function sigmoid --moe-grouped-gemm "
    "--moe-aux-loss-coeff 1e-4 --moe-router-topk-scaling-factor 2.5 "
    "--moe-router-enable-expert-bias --moe-router-dtype fp32 --moe-router-load-balancing-type "
    "seq_aux_loss --moe-shared-expert-intermediate-size 3712 --moe-permute-fusion "
    "--use-fused-weighted-squared-relu --cross-entropy-loss-fusion --cross-entropy-fusion-impl "
    "native --enable-experimental --vocab-size 131072 "
    "--check-weight-hash-across-dp-replicas-interval 20000 --attention-backend flash "
    f"--micro-batch-size 1 --global-batch-size 768 {_TRAINED}{_DATA}"
)

LINES = {
    "Llama 3 8B, FSDP, FP8": (
        "python -m torch.distributed.run --nproc_per_node 8 --nnodes 1 pretrain_gpt.py "
        f"{_LLAMA_8B}{_FP8}--fp8-param-gather {_FSDP}"
    ),
    "Llama 3 70B, pipeline": (
        "CUDA_DEVICE_MAX_CONNECTIONS=1 srun -N 8 --ntasks-per-node 8 python -u pretrain_gpt.py "
        f"{_LLAMA_70B}--micro-batch-size 1 --global-batch-size 128 --tensor-model-parallel-size 4 "
        "--pipeline-model-parallel-size 4 --num-layers-per-virtual-pipeline-stage 5 "
        "--sequence-parallel --tp-comm-overlap --ckpt-format torch_dist"
    ),
    "Llama 3 70B, FSDP, recompute": (
        f"mpirun -np 64 python pretrain_gpt.py {_LLAMA_70B}{_FSDP}--micro-batch-size 1 "
        "--global-batch-size 512 --recompute-granularity full --recompute-method uniform "
        "--recompute-num-layers 1"
    ),
    "Qwen3 30B-A3B, FSDP, MXFP8": (
        "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True CUDA_DEVICE_MAX_CONNECTIONS=8 srun -N 2 "
        "--ntasks-per-node 8 --mpi=pmix bash -x -c 'cd /opt/Megatron-LM; python3 -u "
        f"pretrain_gpt.py {_QWEN_30B.replace(chr(39), '')}{_FSDP}--micro-batch-size 4 "
        "--global-batch-size 128 --expert-model-parallel-size 4 --moe-token-dispatcher-type "
        "alltoall --grad-reduce-in-bf16 --fp8-recipe mxfp8 --fp8-format e4m3 --fp8-param-gather "
        "--cross-entropy-loss-fusion --cross-entropy-fusion-impl te --recompute-granularity "
        "selective --recompute-modules moe_act --no-create-attention-mask-in-dataloader'"
    ),
    "Qwen3 30B-A3B, pipeline, BF16": (
        "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True CUDA_DEVICE_MAX_CONNECTIONS=1 torchrun "
        f"--nnodes 4 --nproc-per-node 8 pretrain_gpt.py {_QWEN_30B}--micro-batch-size 1 "
        "--global-batch-size 512 --expert-model-parallel-size 8 --pipeline-model-parallel-size 2 "
        "--num-layers-per-virtual-pipeline-stage 12 --moe-token-dispatcher-type alltoall"
    ),
    "Qwen3 235B-A22B, pipeline, DeepEP": (
        "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True NCCL_GRAPH_REGISTER=0 srun -n 256 "
        f"python pretrain_gpt.py {_QWEN_235B}--micro-batch-size 1 --global-batch-size 2048 "
        "--tensor-model-parallel-size 2 --sequence-parallel --pipeline-model-parallel-size 8 "
        "--num-virtual-stages-per-pipeline-rank 4 --expert-model-parallel-size 32 "
        "--moe-token-dispatcher-type flex --moe-enable-deepep --overlap-moe-expert-parallel-comm "
        "--delay-wgrad-compute --account-for-embedding-in-pipeline-split "
        "--account-for-loss-in-pipeline-split --recompute-granularity selective "
        "--recompute-modules moe_act layernorm --moe-router-force-load-balancing "
        "--cuda-graph-impl transformer_engine --cuda-graph-scope moe_router moe_preprocess"
    ),
    "DeepSeek-V3, FSDP, HybridEP": (
        f"WORLD_SIZE=1024 python pretrain_gpt.py {_DEEPSEEK}{_FSDP}--micro-batch-size 1 "
        "--global-batch-size 2048 --expert-model-parallel-size 8 --moe-token-dispatcher-type flex "
        "--moe-flex-dispatcher-backend hybridep --recompute-granularity selective "
        "--recompute-modules mlp moe mla_up_proj layernorm --moe-router-force-load-balancing "
        "--megatron-fsdp-grad-comm-dtype bf16 --megatron-fsdp-main-grads-dtype bf16"
    ),
    "GPT-OSS 120B, BF16": (
        f"srun -N 8 torchrun --nnodes 8 --nproc-per-node 8 pretrain_gpt.py {_GPT_OSS}--num-layers "
        "36 --num-experts 128 --global-batch-size 256 --expert-model-parallel-size 8 "
        "--expert-tensor-parallel-size 1 --pipeline-model-parallel-size 4"
    ),
    "Nemotron hybrid, FSDP": (
        "srun -N 8 --gpus-per-node 8 python -u pretrain_hybrid.py "
        f"{_NEMOTRON}{_FSDP}--expert-model-parallel-size 8 --expert-tensor-parallel-size 1 "
        "--moe-token-dispatcher-type alltoall"
    ),
}
"""By name: as typed in a shell."""
