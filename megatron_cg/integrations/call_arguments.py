"""Arguments of the Python API: settings under the names of the flags, and every mistake at once."""

import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import fields, replace
from os import fspath
from typing import Any, Literal

from megatron_cg import extensions
from megatron_cg.arguments import schema
from megatron_cg.arguments.layers import read_tokens
from megatron_cg.arguments.megatron import PACKING
from megatron_cg.arguments.rule import Configuration
from megatron_cg.arguments.rules import extension_missing
from megatron_cg.backends.base import Backend
from megatron_cg.consensus.exchange import Agreement
from megatron_cg.errors import ArgumentError, Violation, Voice, speaking

BackendName = Literal["transformer_engine", "te", "native", "tape"]

ENABLE, UNITS = "megatron_cg.enable", "graph_units"
_OF_UNITS = ("cg_layers", "cuda_graph_modules")
_OF_ENABLE = ("grouped_gemm", "moe_rows", "moe_stash", "moe_exchange")
"""Settings that models are built with: of our functions, this one alone has them."""
_RENAMED = PACKING | {
    **{"fp8_format": "fp8", "fp4_format": "fp4", "use_nccl_ub": "nccl_ub"},
    "no_gradient_accumulation_fusion": "gradient_accumulation_fusion",
    "no_rope_fusion": "apply_rope_fusion",
    "disable_bias_linear": "add_bias_linear",
}
"""Fields with another name than their flags."""
_DEFAULTS = {
    one.name: one.default for one in (*fields(schema.RunArguments), *fields(schema.GraphArguments))
}
_FIELDS = {schema.argument_of(field.name): field for field in fields(schema.GraphArguments)}


class CallVoice(Voice):
    """Names settings for callers from Python: arguments of ``call``, and fields of configs.

    ``call`` is our function that has the settings. ``configs`` are what the caller calls a config,
    and the config or None. Where two have a field, the last counts.
    """

    def __init__(self, call: str = ENABLE, configs: Iterable[tuple[str, Any]] = ()) -> None:
        named = [(name, getattr(config, "__dict__", {})) for name, config in configs]
        self._call = call
        self._places = {key: f"{name}.{key}" for name, there in named for key in there}
        if any(there.get("cuda_graph_scope") is not None for _, there in named):
            # Megatron refuses both together.
            self._places["cuda_graph_modules"] = self._places["cuda_graph_scope"]

    def settings(self, verb: str, flags: str) -> str:
        before, parts = "", list[str]()
        for flag in flags.removeprefix("--").split(" --"):
            text = self._setting(verb, *flag.split(" "))
            does = "" if not verb else "call " if text.endswith(")") else "set "
            parts.append(text if does == before else does + text)
            before = does
        return " and ".join(parts)

    def _setting(self, verb: str, flag: str, *words: str) -> str:
        name = flag.replace("-", "_")
        if self._call == UNITS and name in _OF_UNITS:
            return "units"
        if self._call != ENABLE and name == "cuda_graph_impl":
            return f"no {self._call}"
        key = _RENAMED.get(name, name)
        value = _value(name, _DEFAULTS.get(key), verb, words)
        if name.startswith("cg_"):
            argument = schema.argument_of(name)
            call = ENABLE if argument in _OF_ENABLE else self._call
            return f"{call}({argument}={value or '...'})"
        return self._places.get(key, key) + (f"={value}" if value else "")


def _value(name: str, default: Any, verb: str, words: Sequence[str]) -> str:
    """A setting's value in Python; empty if it is only named."""
    if name.startswith(("no_", "disable_")) or schema.argument_of(name) == "fast_path":
        return str(verb == "drop")
    if verb == "drop":
        return "[]" if default == () else repr(default)
    if isinstance(default, bool):
        return "True" if verb else ""
    if isinstance(default, tuple) and words:
        return repr(list(words))
    return "".join(
        word if word.lstrip("-").replace(".", "").isdigit() else repr(word) for word in words
    )


def settings_in(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Our settings among the arguments of a call that are not None."""
    return {name: arguments[name] for name in _FIELDS if arguments.get(name) is not None}


def check_settings(given: Mapping[str, Any], call: str = ENABLE) -> list[Violation]:
    absent = schema.Environment(without=extensions.not_installed())
    with speaking(CallVoice(call)):
        if broken := list(_check_each(given, call)):
            return broken
        settings = with_settings(schema.GraphArguments(), given)
        return list(extension_missing(Configuration(graph=settings, environment=absent)))


_BACKEND = schema.Takes(
    lambda value: callable(getattr(value, "capture", None)),
    "a name, or has the method capture (megatron_cg.backends.base)",
    '"transformer_engine", or leave it out',
)


def _check_each(given: Mapping[str, Any], call: str) -> Iterator[Violation]:
    for name, value in given.items():
        by_object = name == "backend" and call != ENABLE and not isinstance(value, str)
        takes: schema.Takes = _BACKEND if by_object else _FIELDS[name].metadata["takes"]
        yield from takes.check(name, value)
        if name == "layers":
            yield from read_tokens(map(str, several(value)))[1]


def with_settings(before: schema.GraphArguments, given: Mapping[str, Any]) -> schema.GraphArguments:
    read: dict[str, Callable[[Any], Any]]
    read = {"layers": several, "record": fspath, "fast_path": operator.not_}
    made = {name: read[name](value) if name in read else value for name, value in given.items()}
    return replace(before, **{_FIELDS[name].name: value for name, value in made.items()})


def refuse(broken: Sequence[Violation]) -> None:
    if broken:
        raise ArgumentError(broken)


def several(value: Any) -> tuple[Any, ...]:
    if isinstance(value, str) or not isinstance(value, Iterable):
        return (value,)
    return tuple(value)


def backend_of(value: Backend | BackendName | None) -> Backend:
    """The backend by that name; Transformer Engine's if None.

    Raises UpstreamChangedError, ExtensionMissingError or CaptureError if it is not there.
    """
    if value in ("native", "tape"):
        return extensions.backend(value)
    if value is None or isinstance(value, str):
        from megatron_cg.backends.te_backend import TransformerEngineBackend

        return TransformerEngineBackend()
    return value


def require_same(agreement: Agreement, call: str, given: Mapping[str, object]) -> None:
    """Raise AgreementError where ranks differ in settings, versions or variables.

    All ranks call it together, before they change anything. ``given`` are settings of our function
    ``call``, or Megatron's flags where that is empty. Ranks may record to different folders.
    """
    settings: dict[str, object] = {"call": call or "Megatron's training loop"}
    for name, value in given.items():
        is_folder = name.endswith("record") and value is not None
        settings[name if call else schema.flag_of(name)] = "given" if is_folder else value
    agreement.require_same(settings | schema.shared_by_ranks())


def by_argument(given: schema.GraphArguments) -> dict[str, object]:
    """Settings as arguments of the Python API: the inverse of :func:`with_settings`."""
    made = {name: getattr(given, field.name) for name, field in _FIELDS.items()}
    return made | {"fast_path": not given.cg_no_fsdp_fast_path}
