"""Parses a request's flags with Megatron's own parser, and finds every rule that they break.

Relied on: megatron-core 0.19.2, ``megatron.training.arguments``: ``parse_args`` (which reads
``sys.argv`` and the environment), ``add_megatron_arguments``, ``validate_args``; and
``megatron.training.argument_utils.core_transformer_config_from_args``. Megatron stops at its first
broken rule. Ours are all found, and Megatron's is listed with them.
"""

from __future__ import annotations

import argparse
import io
import math
import os
import sys
import traceback
from collections.abc import Mapping, Sequence
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass, replace
from typing import Any

from megatron_cg.arguments import Environment, GraphArguments, RunArguments, notices, violations
from megatron_cg.arguments.megatron import add_arguments, read
from megatron_cg.arguments.schema import BACKENDS, SCOPES, VARIABLES
from megatron_cg.errors import Violation
from megatron_cg.integrations.megatron.patches import YAML_VIOLATION
from megatron_cg.nearest import did_you_mean
from megatron_cg.tools.cpu.fakes import replaced
from megatron_cg.tools.plan.experts import experts_of
from megatron_cg.tools.plan.fakes.packages import TE_VERSION
from megatron_cg.tools.plan.request import Request

_TE = "transformer-engine"
WITHOUT_TE = (
    f"{_TE} is not installed here; rules are checked as for {TE_VERSION}, and the estimates are "
    "the same with and without it: fakes replace its modules."
)
"""The note of a plan."""
MOST_GPUS = 2**18
"""The largest number of GPUs in a plan: it lists their ranks in memory."""


@dataclass
class Settings:
    """The meaning of the flags, and the errors in them."""

    args: Any
    """Megatron's namespace, validated if Megatron accepted it."""
    run: RunArguments
    graph: GraphArguments
    broken: tuple[Violation, ...]
    megatron: str | None
    """Megatron's own error."""
    notes: list[str]
    usage: str | None = None
    """Why the flags cannot be parsed at all; the other fields are then empty."""


def read_settings(request: Request) -> Settings:
    """Parse the flags, check them by our rules and by Megatron's; mistakes raise nothing."""
    try:
        args, unknown = _parsed(request.words)
        if unknown and not request.own_flags:
            raise _UsageError(_unknown_text(unknown))
        args.world_size = request.nproc or fewest_gpus(args)
        if args.world_size > MOST_GPUS:
            text = f"{args.world_size:,} GPUs, and a plan is made for at most {MOST_GPUS:,}"
            raise _UsageError(text)
    except _UsageError as error:
        return Settings(None, RunArguments(), GraphArguments(), (), None, [], usage=str(error))
    notes: list[str] = []
    if unknown:
        # High cutoff: many flags of a script may resemble one of Megatron's.
        own = " ".join(_with_hints(unknown, cutoff=0.9))
        notes.append(f"not Megatron's, so taken for the script's own: {own}")
    run, graph = read(args)
    where, more = _environment_of_the_run(request.environment, BACKENDS[graph.cg_backend])
    broken = violations(run, graph, where)
    if not run.wants_graphs and not broken:
        broken = (_no_graphs(run),)
    elif run.wants_graphs and request.started_without:
        broken = (_no_launcher(request.started_without), *broken)
    notes += [*more, *notices(run, graph, where)]
    with experts_of(graph):
        megatron = _megatrons_opinion(args)
    return Settings(args, run, graph, broken, megatron, notes)


def fewest_gpus(args: Any) -> int:
    """The smallest number of GPUs for the parallel sizes of ``args``, at least 2."""
    dense = args.tensor_model_parallel_size * args.context_parallel_size
    expert = args.expert_model_parallel_size * (args.expert_tensor_parallel_size or 1)
    return int(max(2, args.pipeline_model_parallel_size * math.lcm(dense, expert)))


class _UsageError(Exception):
    """The parser rejected the command line."""


def _parsed(words: Sequence[str]) -> tuple[Any, list[str]]:
    """Megatron's namespace, and the words that its parser does not know."""
    from megatron.training import arguments

    if any(word.partition("=")[0] == "--yaml-cfg" for word in words):
        raise _UsageError(f"--yaml-cfg: {YAML_VIOLATION.reason}; {YAML_VIOLATION.remedy}")
    parsers: list[argparse.ArgumentParser] = []

    def provider(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
        parsers.append(parser)
        return add_arguments(parser)

    errors = io.StringIO()
    argv = replaced(sys, "argv", ["megatron-cg plan", *words])
    with argv, redirect_stdout(io.StringIO()), redirect_stderr(errors):
        try:
            args = arguments.parse_args(provider, ignore_unknown_args=True)
            return args, parsers[0].parse_known_args()[1]
        except SystemExit as error:
            text = errors.getvalue().strip().splitlines()
            raise _UsageError(text[-1] if text else "--help leaves no run: leave it out") from error
        except KeyError as error:
            # Megatron looks up a scope in its enumeration, and argparse does not catch that error.
            raise _UsageError(_scope_text(str(error.args[0]))) from error


def _scope_text(word: str) -> str:
    hint = did_you_mean(word, SCOPES, cutoff=0.6)
    return f"--cuda-graph-modules has no {word}{hint}: {', '.join(SCOPES)}"


def _unknown_text(unknown: Sequence[str]) -> str:
    flags = [word for word in _with_hints(unknown, cutoff=0.6) if word.startswith("-")]
    return f"Megatron has no such flag: {', '.join(flags) or ' '.join(unknown)}"


def _with_hints(unknown: Sequence[str], *, cutoff: float) -> list[str]:
    """The words; each unknown flag gets the most similar flag of Megatron as a hint."""
    from megatron.training import arguments

    parser = add_arguments(arguments.add_megatron_arguments(argparse.ArgumentParser()))
    known = [*parser._option_string_actions]
    return [
        word + (did_you_mean(word.split("=")[0], known, cutoff) if word.startswith("-") else "")
        for word in unknown
    ]


def _environment_of_the_run(
    given: Mapping[str, str], backend: str
) -> tuple[Environment, list[str]]:
    """Versions and variables of the run, which will run on another machine than the plan."""
    here = Environment.read(backend)
    notes = []
    versions = dict(here.versions)
    if _TE not in versions:
        versions[_TE] = TE_VERSION
        notes.append(WITHOUT_TE)
    variables = {**here.variables, **{n: given[n] for n in VARIABLES if n in given}}
    return replace(here, versions=versions, variables=variables), notes


def _no_graphs(run: RunArguments) -> Violation:
    fsdp = "with" if run.use_megatron_fsdp else "without"
    missing = "" if run.use_megatron_fsdp else "--use-megatron-fsdp "
    return Violation(
        "no-graphs",
        f"--cuda-graph-impl {run.cuda_graph_impl} {fsdp} --use-megatron-fsdp",
        "the run asks for no layerwise graphs under Megatron-FSDP, so nothing would be captured",
        f"type {missing}--cuda-graph-impl transformer_engine",
    )


def _no_launcher(script: str) -> Violation:
    return Violation(
        "launcher",
        f"the command starts {script} without -m megatron_cg",
        "Megatron alone captures no layerwise graphs under Megatron-FSDP",
        f"write -m megatron_cg before {script}, or call megatron_cg.enable() in it before it "
        "parses its arguments",
    )


def _megatrons_opinion(args: Any) -> str | None:
    """The error of ``validate_args`` or of the model's configuration; validates ``args``."""
    from megatron.training import arguments
    from megatron.training.argument_utils import core_transformer_config_from_args

    os.environ["WORLD_SIZE"] = str(args.world_size)
    # Megatron prints every argument.
    with redirect_stdout(io.StringIO()):
        try:
            arguments.validate_args(args)
            core_transformer_config_from_args(args)
        except (Exception, SystemExit) as error:
            return error_text(error)
    return None


def error_text(error: BaseException) -> str:
    """An error in one line; for a bare assertion, the line of Megatron that raises it."""
    # torch appends the addresses of its own functions.
    text = " ".join(str(error).partition("Exception raised from")[0].split())
    if text:
        # The text of Python's own errors, such as "integer modulo by zero", is not enough.
        name = "" if isinstance(error, AssertionError) else f"{type(error).__name__}: "
        return name + text
    last = traceback.extract_tb(error.__traceback__)[-1]
    return f"{last.line} ({type(error).__name__} in {last.name})"
