"""Whether Transformer Engine's grouped GEMM can read row counts on the device.

Where it cannot, it copies them to the host without a word (TE 2.20.2, ``_GroupedLinear.forward``).
"""

import inspect
import sys

from megatron_cg.upstream.symbols import Symbol, installed_version

_MODULE = "transformer_engine.pytorch.module.grouped_linear"
_LAYER = Symbol(f"{_MODULE}:GroupedLinear", "TE's grouped linear layer")
_VERSION = Symbol(f"{_MODULE}:tex.get_cublasLt_version", "the version of cuBLASLt")
RELIES_ON = (_LAYER, _VERSION)
_LEAST = 130801
"""13.8.1: what cuBLASLt itself asks for. Up to 13.7 a graph's second replay is wrong."""
UPGRADE = "pip install 'nvidia-cublas>=13.8.1'"
"""Of CUDA 13. Torch 2.11 pins an older one, and pip warns."""
_HOPPER = 9
"""Major compute capability, of the GPUs on which it was tried."""
NOT_LOADED = "Transformer Engine is not loaded"


def lacks_device_counts() -> str:
    """What is missing here, as a sentence; empty if nothing is."""
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
    if torch.cuda.get_device_capability()[0] != _HOPPER:
        return f"the GPU is {torch.cuda.get_device_name()}, and Hopper alone was tried"
    return ""
