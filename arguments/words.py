"""What rules say to a caller who writes Python: flags become fields of configs, or arguments. Pure.

Rules name flags. ``--fsdp-double-buffer`` becomes ``cfg.ddp.fsdp_double_buffer`` for the caller who
names the config so, and ``--cg-layers attn:0-`` becomes ``megatron_cg.enable(layers=['attn:0-'])``.
"""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import fields, replace
from functools import partial
from typing import Any

from megatron_cg.arguments.schema import GraphArguments, RunArguments, argument_of
from megatron_cg.errors import MegatronCGError, Violation

ENABLE, UNITS = "megatron_cg.enable", "graph_units"
_OF_UNITS = dict.fromkeys(("cg_layers", "cuda_graph_modules"), "units")
_OF_ENABLE = ("grouped_gemm", "moe_rows", "moe_exchange")
"""Settings that models are built with: of our functions, this one alone has them."""
_WORD = r"-?\w(?:[\w.:-]*[\w:-])?"
_VALUE = rf"(?: (?!(?:and|or|with|without|in|out|select)\b){_WORD}(?:,{_WORD})*)"
_FLAG = rf"--[a-z][a-z0-9-]*{_VALUE}*"
_FLAGS = re.compile(
    rf"(?:megatron-cg|pip) \w+(?: {_FLAG})*|(?:\b(add|type|drop) )?({_FLAG}(?:(?: and)? {_FLAG})*)"
)
PACKING = {
    "sft": "enable_offline_packing",
    "rl_use_sequence_packing": "enable_in_batch_packing",
    "dataloader_inter_document_masking": "inter_document_masking",
}
"""Megatron's flags, and what does the same in the dataset's config of Megatron-Bridge."""
_FIELDS = PACKING | {
    **{"fp8_format": "fp8", "fp4_format": "fp4", "use_nccl_ub": "nccl_ub"},
    "no_gradient_accumulation_fusion": "gradient_accumulation_fusion",
    "disable_bias_linear": "add_bias_linear",
}
"""Fields with another name than their flags."""
_OFF = ("no_", "disable_")
_DEFAULTS = {one.name: one.default for one in (*fields(RunArguments), *fields(GraphArguments))}
_PARTS = ("found", "reason", "remedy")


def in_python_terms(
    violations: Iterable[Violation], call: str = ENABLE, configs: Iterable[tuple[str, Any]] = ()
) -> tuple[Violation, ...]:
    """The violations of rules as a caller from Python reads them.

    ``call`` is our function that has the settings. ``configs`` are what the caller calls a config,
    and the config or None. Where two have a field, the last counts.
    """
    said_of = sentences(call, configs)
    return tuple(
        replace(one, **{part: said_of(getattr(one, part)) for part in _PARTS}) for one in violations
    )


def sentences(call: str = ENABLE, configs: Iterable[tuple[str, Any]] = ()) -> Callable[[str], str]:
    """Says text that names flags as :func:`in_python_terms` does."""
    named = [(name, getattr(config, "__dict__", {})) for name, config in configs]
    places = {key: f"{name}.{key}" for name, there in named for key in there}
    if any(there.get("cuda_graph_scope") is not None for _, there in named):
        places["cuda_graph_modules"] = places["cuda_graph_scope"]  # Megatron refuses both together.
    return partial(_FLAGS.sub, partial(_phrase, call, places))


@contextmanager
def errors_name_arguments(call: str) -> Iterator[None]:
    """Errors that leave the block name arguments of ``call``, and no flags."""
    try:
        yield
    except MegatronCGError as error:
        error.args = (sentences(call)(str(error)),)
        raise


def _phrase(call: str, places: Mapping[str, str], found: re.Match[str]) -> str:
    """Flags in a row, with the verb before them if there is one; those of a command stay."""
    verb, flags = found.groups()
    if flags is None:
        return found[0]
    before, parts = "", list[str]()
    for flag in re.findall(_FLAG, flags):
        text = _setting(call, places, verb, *flag.split(" "))
        does = "" if not verb else "call " if text.endswith(")") else "set "
        parts.append(text if does == before else does + text)
        before = does
    return " and ".join(parts)


def _setting(call: str, places: Mapping[str, str], verb: str | None, flag: str, *words: str) -> str:
    name = flag.removeprefix("--").replace("-", "_")
    key = _FIELDS.get(name, name)
    default, value, rest = _DEFAULTS.get(key), "", list(words)
    if call == UNITS and name in _OF_UNITS:
        return _OF_UNITS[name]
    if call != ENABLE and flag == "--cuda-graph-impl":
        return f"no {call}"
    if name.startswith(_OFF) or argument_of(name) == "fast_path":
        value = "False"
    elif verb == "drop":
        value = "[]" if default == () else repr(default)
    elif isinstance(default, bool):
        value = "True" if verb else ""
    elif isinstance(default, tuple) and words:
        value, rest = repr(rest), []
    elif key in _DEFAULTS and words:
        word = rest.pop(0)
        value = word if re.fullmatch(r"-?[\d.]+", word) else repr(word)
    if name.startswith("cg_"):
        argument = argument_of(name)
        made = f"{ENABLE if argument in _OF_ENABLE else call}({argument}={value or '...'})"
    else:
        made = places.get(key, key) + (f"={value}" if value else "")
    return " ".join([made, *rest])
