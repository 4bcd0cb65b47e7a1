"""The launcher: ``torchrun ... -m megatron_cg SCRIPT ARGUMENTS`` runs a script with graphs."""

import os
import runpy
import sys

import megatron_cg
from megatron_cg.errors import ConfigurationError, UpstreamChangedError
from megatron_cg.version import __version__

CACHE_VARIABLE, CACHE_ENTRIES = "CUBLASLT_HEURISTICS_CACHE_CAPACITY", 1 << 18
"""How many GEMM problems cuBLASLt remembers the best kernel for; by default 8,192.

A layer of experts has six problems for each number of rows. Uneven routing makes more of them than
the default holds, and each that was forgotten takes 70 to 500 us of the host. The kernels are the
same. 262,144 entries take 94 MB of host memory.
"""

_USAGE = """usage: torchrun [...] -m megatron_cg SCRIPT [the script's own arguments]

Runs a Megatron pretraining script unchanged, with CUDA graphs of layers possible under
Megatron-FSDP. For an MoE model on one host of Hopper GPUs add to the script's arguments:

  --cuda-graph-impl transformer_engine --cuda-graph-modules attn moe
  --cg-grouped-gemm torch --cg-moe-exchange peer --moe-permute-fusion
  --fsdp-double-buffer --fsdp-db-use-persist-buf-on-alloc-fail
  --no-gradient-accumulation-fusion --no-create-attention-mask-in-dataloader

A dense model takes "attn mlp", and not the second line. SCRIPT --help shows the group of flags
"megatron_cg". "megatron-cg plan" edits a launch line; for all tools: megatron-cg --help."""


def main() -> None:
    """Run the script in the first argument as ``__main__``.

    ``sys.path`` is that of ``python SCRIPT``: it begins with the script's folder, and has no
    working directory. With ``python -P`` it has neither.
    """
    if len(sys.argv) < 2 or sys.argv[1] in ("-h", "--help", "--version"):
        print(__version__ if sys.argv[1:2] == ["--version"] else _USAGE)
        sys.exit(0 if len(sys.argv) > 1 else 2)
    script = sys.argv[1]
    if not os.path.isfile(script):
        sys.exit(
            f"megatron_cg: error: there is no file {script}. Commands such as plan and doctor are "
            f"those of megatron-cg: type megatron-cg {script}. " + _USAGE
        )
    sys.argv = sys.argv[1:]
    if not sys.flags.safe_path:
        if sys.path[:1] == [os.getcwd()]:  # python -m has put it there.
            del sys.path[0]
        sys.path.insert(0, os.path.dirname(os.path.realpath(script)))
    os.environ.setdefault(CACHE_VARIABLE, str(CACHE_ENTRIES))  # before torch loads cuBLASLt
    try:
        megatron_cg.enable()
        try:
            runpy.run_path(script, run_name="__main__")
        finally:
            megatron_cg.disable()
    except (ConfigurationError, UpstreamChangedError) as error:
        sys.exit(f"megatron_cg: error: {error}")


if __name__ == "__main__":
    main()
