"""The symbols of Megatron-FSDP that we rely on, in both packages that ship it."""

import sys
from collections.abc import Iterable
from typing import Any

from megatron_cg.upstream.symbols import Symbol

_PLACES = ("megatron.core.distributed.fsdp.src.megatron_fsdp", "megatron_fsdp")

_CLASSES = {
    "MegatronFSDP": "the wrapped model",
    "ParamAndGradBuffer": "the model's buffers",
    "ParameterGroup": "parameters in one bucket",
    "DataParallelBuffer": "one kind of weights or gradients",
    "FixedPoolAllocator": "buffers that stay in place",
    "AllGatherPipeline": "what gathers weights",
    "GradReducePipeline": "what reduces gradients",
    "BucketStatus": "how far a bucket is",
}


def fsdp_class(name: str, *attributes: str) -> tuple[Symbol, ...]:
    """A class of Megatron-FSDP that has these attributes, in each package that ships it."""
    return _in_both(name, _CLASSES[name], attributes=attributes)


def fsdp_function(
    path: str, expected: str, *parameters: str, fingerprints: tuple[str, ...] = ()
) -> tuple[Symbol, ...]:
    """A function of Megatron-FSDP, in each package that ships it; see :class:`Symbol`."""
    return _in_both(path, expected, parameters=parameters, fingerprints=fingerprints)


def fsdp_v2(
    path: str, expected: str, *attributes: str, fingerprints: tuple[str, ...] = ()
) -> tuple[Symbol, ...]:
    """A class or function of Megatron-FSDP v2, by its path below ``experimental``."""
    more = {"attributes": attributes, "fingerprints": fingerprints}
    return tuple(Symbol(f"{one}.experimental.{path}", expected, **more) for one in _PLACES)


def _in_both(path: str, expected: str, **more: tuple[str, ...]) -> tuple[Symbol, ...]:
    is_there = path.startswith(("MegatronFSDP", "fp8_"))
    module = "megatron_fsdp" if is_there else "param_and_grad_buffer"
    return tuple(Symbol(f"{package}.{module}:{path}", expected, **more) for package in _PLACES)


def unknown_bodies(symbols: Iterable[Symbol], fsdp: Any) -> list[str]:
    """Why our replacements of ``symbols`` may not be right for this object of Megatron-FSDP's.

    Does not check functions of modules that are not loaded, or of the other package of
    Megatron-FSDP.
    """
    own = type(fsdp).__module__
    reasons = []
    for symbol in symbols:
        module = symbol.path.partition(":")[0]
        other = any(
            module.startswith(f"{place}.") and not own.startswith(f"{place}.") for place in _PLACES
        )
        if module in sys.modules and not other:
            reasons.append(symbol.unknown_body())
    return [why for why in reasons if why is not None]
