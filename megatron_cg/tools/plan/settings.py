"""Reads flags with Megatron's own parser and rules, and with ours.

Relied on: megatron-core 0.19.2, ``megatron.training.arguments``: ``add_megatron_arguments``,
``validate_args``, what ``parse_args`` adds; ``argument_utils.core_transformer_config_from_args``.
Megatron stops at its first broken rule. Of ours all are found.
"""

import argparse
import copy
import importlib
import io
import os
import re
import traceback
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, redirect_stdout
from dataclasses import dataclass, replace
from difflib import get_close_matches
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from packaging.version import Version

from megatron_cg import extensions
from megatron_cg.arguments.megatron import add_arguments, read_graph, read_run
from megatron_cg.arguments.rule import Configuration
from megatron_cg.arguments.rules import notices, violations
from megatron_cg.arguments.schema import BACKENDS, SCOPES, Environment, GraphArguments, RunArguments
from megatron_cg.errors import Violation
from megatron_cg.tools.launch_line import MEGATRONS, LaunchLine, LaunchLineError
from megatron_cg.upstream.symbols import installed_version
from megatron_cg.upstream.te import UPGRADE

TE_VERSION = "2.20.2"  # the release whose rules apply where Transformer Engine is not installed
_MODELOPT = re.compile(r"--(export|finetune|modelopt)-|--(enable-gpt-oss|qad-train-target)$")
"""Flags that Megatron's scripts have where nvidia-modelopt is installed."""
VOCABULARY = 131_072  # if only the tokenizer knows it
_DETERMINISTIC_PACK = 1 << 30
_HOPPER, _BLACKWELL = (9, 0), (10, 0)
_OF_BLACKWELL = 150 * 2**30  # memory that no Hopper GPU has
_ON_HOPPER = "graphs hold dropless experts on Hopper GPUs alone"
_LOCAL = "--transformer-impl local computes them one by one and reads their counts on the CPU"
_BATCH = "give a --global-batch-size that is a multiple of --micro-batch-size x data-parallel ranks"
_OF_TE = (
    "megatron.core.transformer.moe.moe_utils",
    "megatron.core.models.common.embeddings.rope_utils",
)
"""Modules with fused functions of TE that Megatron's rules ask for; None where it is missing."""


@dataclass(frozen=True)
class Settings:
    args: Any  # Megatron's namespace, validated if Megatron accepted it
    run: RunArguments
    graph: GraphArguments
    broken: tuple[Violation, ...]  # of our rules, then Megatron's own, which is named ``megatron``
    notes: tuple[str, ...] = ()
    against_experts: str = ""  # why no graph can hold dropless experts


class _Parser(argparse.ArgumentParser):
    """Raises LaunchLineError where argparse would end the process."""

    def error(self, message: str) -> Any:
        raise LaunchLineError(message)


@cache
def _parser() -> argparse.ArgumentParser:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about packages that the machine of the run has
        from megatron.training import arguments
    parser = _Parser(allow_abbrev=False, add_help=False)
    return add_arguments(arguments.add_megatron_arguments(parser))


def settings_of(
    line: LaunchLine, gpus: int = 1, room: int = 0, *, megatron: bool = True
) -> Settings:
    """What the line's flags mean on ``gpus`` of ``room`` bytes; else by our rules only.

    Raises LaunchLineError in the user's terms.
    """
    hint = require_model(line)
    try:
        args, unknown = _parser().parse_known_args(line.words)
    except KeyError as error:
        # Megatron looks a scope up in its enumeration, and argparse lets that error through.
        text = f"--cuda-graph-modules has no {error}: give any of {', '.join(SCOPES)}. {hint}"
        raise LaunchLineError(text.rstrip(". ")) from None
    except (LaunchLineError, AssertionError, ValueError, SyntaxError) as error:
        raise LaunchLineError(f"the flags cannot be read: {error}. {hint}".rstrip(". ")) from None
    args._is_global_batch_size_explicitly_specified = args.global_batch_size is not None
    args.rank, args.world_size = 0, gpus
    run, graph, is_megatrons = read_run(args), read_graph(args), Path(line.script).name in MEGATRONS
    gemm = graph.cg_grouped_gemm
    here = Environment.read(BACKENDS[graph.cg_backend])
    where = replace(
        here,
        versions={"transformer-engine": TE_VERSION, **here.versions},
        variables={**here.variables, **line.variables},
        lacks_device_counts="",
    )
    capability = _BLACKWELL if room > _OF_BLACKWELL else _HOPPER
    broken = (*violations(run, graph, where), *_of_plan(args, run, graph, capability))
    notes = [*notices(run, where), *_limits(args, run)]
    if capability == _BLACKWELL:
        notes.append("Blackwell GPUs were not measured: start with megatron-cg align on one host")
    elif gemm != "te":
        notes.append(f"--cg-grouped-gemm {gemm} needs Hopper GPUs: else plan the line with te")
    if gemm == "cublas" and here.lacks_device_counts:
        notes.append(f"--cg-grouped-gemm cublas needs a newer cuBLASLt on each host: {UPGRADE}")
    if own := [word for word in unknown if "$" not in word]:
        _check_unknown(own, line)
        by = "ModelOpt's" if is_megatrons and not line.source else "the script's own"
        notes.append(f"not Megatron's, so taken for {by}: {' '.join(own)}")
    if not is_megatrons and not line.source:
        notes.append(f"{line.script} is not here: it is taken to train the model of its flags")
    gpu = _gpu(line.variables, Configuration(run, graph, where).counts_on_device, capability)
    if megatron and (why := _megatrons_error(args, gpu)):
        remedy = _BATCH if re.search("batch_size.* must be divisible", why) else ""
        broken += (Violation("megatron", "Megatron stops", why, remedy),)
    if hint and (broken or any("$" in word for word in unknown)):
        notes.insert(0, hint)
    against = _LOCAL if args.transformer_impl == "local" else _ON_HOPPER * (capability > _HOPPER)
    return Settings(args, run, graph, broken, tuple(notes), against)


def require_model(line: LaunchLine) -> str:
    """Raise LaunchLineError for a line without a model; a hint if there are variables in it."""
    if line.has("--yaml-cfg"):
        raise LaunchLineError("--yaml-cfg is not read: give the settings on the command line")
    if variables := [word for word in line.words if "$" in word]:
        return f"{' '.join(variables)}: give the line as the shell expands it"
    if not line.has("--hidden-size"):
        text = "there is no --hidden-size: give a model's flags, also with --use-checkpoint-args,"
        page = "clients.md#transformers" if "accelerate" in line.before else "graph_units.md"
        raise LaunchLineError(f"{text} or see docs/{page} if the script is not Megatron's")
    return ""


def _of_plan(
    args: Any, run: RunArguments, graph: GraphArguments, capability: tuple[int, int]
) -> Iterator[Violation]:
    """What Megatron or a capture finds on the GPU alone, and what cannot be planned."""
    if run.is_moe and "E" not in (run.hybrid_layer_pattern or "E"):
        found = f"--num-experts {run.num_experts} with a hybrid pattern that has no E"
        reason = "Megatron would make no experts, so the layers are the script's own, and not known"
        yield Violation("own-layers", found, reason, "give the pattern of Megatron's own model")
    if capability == _BLACKWELL:
        if graph.cg_grouped_gemm != "te":
            found = f"--cg-grouped-gemm {graph.cg_grouped_gemm} on Blackwell"
            yield Violation("gpu", found, _ON_HOPPER, "drop it, and plan the line again")
        return
    mxfp8 = run.fp8 is not None and run.fp8_recipe == "mxfp8"
    if mxfp8 or run.fp4 is not None:
        found = "--fp8-recipe mxfp8" if mxfp8 else "--fp4-format"
        instead = "--fp8-recipe blockwise" if mxfp8 else "--fp8-format hybrid"
        remedy = f"type {instead}, or plan a Blackwell GPU, as with --gpu-memory 180"
        yield Violation("gpu", found, "GPUs of this memory are older than Blackwell", remedy)
    heads = (args.num_attention_heads or 0) // args.tensor_model_parallel_size
    size = (graph.cg_packed_samples or 1) * heads * (args.seq_length or 0) ** 2
    packs = run.packs_sequences and run.captures("attn")
    if packs and args.deterministic_mode and size >= _DETERMINISTIC_PACK:
        found = f"--deterministic-mode with packs of {args.seq_length} tokens in captured attention"
        reason = (
            "on Hopper cuDNN then computes attention only if samples x heads of a rank x tokens of "
            "the pack ** 2 is below 2 ** 30, and other kernels have other bits in a graph"
        )
        remedy = "type a smaller --seq-length, or drop --deterministic-mode"
        yield Violation("packed-deterministic", found, reason, remedy)


@cache
def _nearest(name: str) -> list[str]:
    return get_close_matches(name.replace("_", "-"), _parser()._option_string_actions, 1, 0.85)


def _check_unknown(words: Sequence[str], line: LaunchLine) -> None:
    """Raise LaunchLineError for flags that Megatron refuses and the script does not add."""
    is_megatrons, source = Path(line.script).name in MEGATRONS, line.source
    added = [f for f in line.flags if f.name and (_MODELOPT.match(f.name) or f.name in source)]
    own = [word for flag in added for word in flag.words]
    for flag in line.flags if is_megatrons else ():
        if flag.name not in words and flag.values[1:] and {*flag.values[1:]} <= {*words}:
            text = f"{flag.name} takes fewer values than {' '.join(flag.values)}"
            raise LaunchLineError(f"{text}: quote a value that has spaces")
    for word in [word for word in words if word not in own and (is_megatrons or word[:2] == "--")]:
        near = _nearest(word)
        if near or is_megatrons:
            meant = f": did you mean {near[0]}?" if near else "."
            known = f"megatron-core {installed_version('megatron-core')} does not know it"
            instead = "If the script adds it, leave it out of the planned line"
            raise LaunchLineError(f"Megatron would refuse {word}: {known}{meant} {instead}")


def _limits(args: Any, run: RunArguments) -> Iterator[str]:
    if args.fp4 or args.fp8:
        yield "activations, and FP8 or FP4 weights, are counted as in BF16: the run may need less"
    if args.use_checkpoint_args:
        yield "--use-checkpoint-args: the checkpoint is not read, only the flags are"
    if run.custom_layers and not args.hybrid_layer_pattern:
        yield "a layer spec decides the layers; they are counted as those of the other flags"
    if args.padded_vocab_size is None and args.vocab_size is None:
        yield f"the tokenizer's vocabulary is counted as {VOCABULARY:,}; --vocab-size says it"


def _megatrons_error(args: Any, gpu: AbstractContextManager[None]) -> str | None:
    """The error of ``validate_args`` or of the model's config; validates ``args``."""
    from megatron.training import arguments
    from megatron.training.argument_utils import core_transformer_config_from_args

    with gpu, redirect_stdout(io.StringIO()), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            arguments.validate_args(args)
            core_transformer_config_from_args(copy.copy(args))
            _check_experts(args)
        except (Exception, SystemExit) as error:
            return _text_of(error)
    return None


def _check_experts(args: Any) -> None:
    """What Megatron finds only when it makes process groups and the model."""
    parts = args.expert_model_parallel_size * args.expert_tensor_parallel_size
    parts *= args.num_distributed_optimizer_instances
    if args.world_size % parts:
        raise ValueError(
            f"{args.world_size} GPUs are not divisible by --expert-model-parallel-size x "
            f"--expert-tensor-parallel-size x --num-distributed-optimizer-instances ({parts})"
        )
    frequency = args.moe_layer_freq
    if args.num_experts and isinstance(frequency, list) and len(frequency) != args.num_layers:
        raise ValueError(f"--moe-layer-freq has not one entry for each of {args.num_layers} layers")


@contextmanager
def _gpu(
    variables: Mapping[str, str], dropless: bool, capability: tuple[int, int]
) -> Iterator[None]:
    """Let Megatron's rules see a GPU, Transformer Engine, the run's variables and our changes."""
    import torch
    from megatron.core import utils

    from megatron_cg.upstream.patch import set_attribute

    before = dict(os.environ)
    major, minor = capability
    gpu = SimpleNamespace(major=major, minor=minor, multi_processor_count=132)
    with ExitStack() as undo:
        undo.callback(os.environ.update, before)
        undo.callback(os.environ.clear)
        os.environ.update(variables)
        undo.callback(set_attribute(torch.cuda, "get_device_capability", lambda *_a: capability))
        undo.callback(set_attribute(torch.cuda, "get_device_properties", lambda *_a: gpu))
        if utils.get_te_version() == Version("0.0.0"):
            undo.callback(set_attribute(utils, "_te_version", Version(TE_VERSION)))
        for module in map(importlib.import_module, _OF_TE):
            missing = [name for name, value in vars(module).items() if value is None]
            for name in [name for name in missing if name.startswith("fused_")]:
                undo.callback(set_attribute(module, name, lambda *_a, **_n: None))
        if extensions.is_installed("recompute"):
            undo.callback(extensions.allow_full_recompute())
        if dropless and extensions.is_installed("experts"):
            from megatron_cg.experts.install import allow_dropless_experts

            undo.callback(allow_dropless_experts())
        yield


def _text_of(error: BaseException) -> str:
    """An error in one line; for a bare assertion, what Megatron asserts, in flags."""
    if text := " ".join(str(error).split()).removesuffix(" with:"):  # as Megatron's own end
        return text
    line = traceback.extract_tb(error.__traceback__)[-1].line or type(error).__name__
    flags = re.sub(r"\bargs\.(\w+)", lambda name: f"--{name[1].replace('_', '-')}", line)
    return flags.replace("assert ", "it requires ", 1).replace(" is not None", "")
