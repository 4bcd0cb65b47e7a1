"""A run that keeps every rule, as our dataclasses and as arguments of Megatron's real parser."""

import argparse
import functools

from megatron_cg.arguments.megatron import add_arguments
from megatron_cg.arguments.schema import Environment, RunArguments

GOOD_RUN = RunArguments(
    use_megatron_fsdp=True,
    cuda_graph_impl="transformer_engine",
    cuda_graph_modules=("attn", "moe_router"),
    fsdp_double_buffer=True,
    fsdp_db_use_persist_buf_on_alloc_fail=True,
    gradient_accumulation_fusion=False,
    num_layers=4,
    num_experts=8,
    moe_token_dispatcher_type="alltoall",
    bf16=True,
    te_rng_tracker=True,
)

GOOD_ARGV = (
    "--use-megatron-fsdp --cuda-graph-impl transformer_engine --cuda-graph-modules attn moe_router "
    "--fsdp-double-buffer --fsdp-db-use-persist-buf-on-alloc-fail "
    "--no-gradient-accumulation-fusion --num-layers 4 --num-experts 8 "
    "--moe-token-dispatcher-type alltoall --bf16 --te-rng-tracker"
).split()

GOOD_ENVIRONMENT = Environment(
    versions={
        "megatron-core": "0.19.2",
        "megatron-fsdp": "0.6.1",
        "transformer-engine": "2.20.2",
        "torch": "2.11.0+cu130",
    }
)


@functools.cache
def megatron_parser() -> argparse.ArgumentParser:
    """Megatron's own parser with our group, as ``parse_args`` of megatron.training builds it."""
    from megatron.training.arguments import add_megatron_arguments

    parser = argparse.ArgumentParser(allow_abbrev=False)
    return add_arguments(add_megatron_arguments(parser))


def parse(*argv: str) -> argparse.Namespace:
    return megatron_parser().parse_args(argv)
