"""A function that a new release changes turns off its replacement, and nothing else."""

from __future__ import annotations

import importlib
import inspect
import linecache
import logging
import sys
import textwrap
from typing import Any

import pytest

from megatron_cg.backends.tape.tape_backend import TapeBackend
from megatron_cg.fastpath import install_parts as path
from megatron_cg.fastpath.local_tensors import REPLACES
from megatron_cg.tools.doctor import relied_on
from megatron_cg.tools.doctor.checks import examine
from megatron_cg.tools.doctor.finding import Level
from megatron_cg.upstream.fingerprints import of_source
from megatron_cg.upstream.symbols import Symbol, installed_version, lookup
from tests.unit.te_sources import source_of_te
from tests.unit.tools.doctor.systems import of_level, system

FSDP = "megatron.core.distributed.fsdp.src.megatron_fsdp"
ALL = [
    pytest.param(symbol, id=f"{symbol.distribution}:{symbol.path.rpartition('.')[2]}")
    for name in relied_on.modules_that_rely()
    for symbol in importlib.import_module(name).RELIES_ON
    if symbol.fingerprints and symbol.distribution != "transformer-engine"
]
HOOKS = "megatron_fsdp:MegatronFSDP._register_fsdp_hooks"
STORE = "param_and_grad_buffer:ParamAndGradBuffer"
PIPELINE = "param_and_grad_buffer:AllGatherPipeline"
WITH_GRADIENTS = {"gradients", "detached-weights", "detached-weights-of-graphs"}
CASES = [
    (HOOKS, "_process_post_backward_gradients", WITH_GRADIENTS),
    (HOOKS, "release_module_parameters", {"unshard", *WITH_GRADIENTS}),
    (f"{PIPELINE}.async_bucket_gather", "", {"gathers"}),
    (f"{STORE}.update_main_grads", "", {"main-gradients"}),
    (f"{STORE}.copy_main_weights_to_model_weights", "", {"main-weights"}),
]


@pytest.mark.parametrize("symbol", ALL)
def test_a_fingerprint_is_that_of_the_installed_release(symbol: Symbol) -> None:
    if installed_version(symbol.distribution) is None:
        pytest.skip(f"{symbol.distribution} is not installed")
    assert symbol.unknown_body() is None


@pytest.mark.parametrize("symbol", REPLACES, ids=lambda symbol: symbol.path.rpartition(":")[2])
def test_a_fingerprint_is_that_of_the_released_transformer_engine(symbol: Symbol) -> None:
    module, _, name = symbol.path.partition(":")
    assert module.startswith("transformer_engine.pytorch.")
    *folders, file = module.split(".")[2:]
    found = source_of_te(*folders, f"{file}.py")
    assert symbol.fingerprints == (of_source(found.read_text(), name),)


def test_only_code_counts() -> None:
    one = of_source("def f(a, b=1):\n    return a + b")
    same = (
        "@d\ndef g(): ...\n"
        'def f(a: int, b: int = 1) -> int:\n    """Adds."""\n    # both\n    return (a +\n  b)'
    )
    assert of_source(same, "f") == one is not None
    others = [
        "def f(a, b=2):\n    return a + b",
        "def f(a, b=1):\n    a()\n    return a + b",
        "@d\ndef f(a, b=1):\n    return a + b",
    ]
    assert one not in {of_source(other) for other in others}
    assert of_source("def f(:") is None and of_source("x = 1", "f") is None
    assert (
        of_source(
            "class A:\n  def f(a, b=1):\n    if a: ...\n    def f(a, b=1):\n      return a + b",
            "A.f.<locals>.f",
        )
        == one
    )


def changed(target: str, inner: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Add a line to upstream's function, or to one inside it, as a new release might."""
    owner_path, _, name = target.rpartition(".")
    owner = lookup("megatron-core", f"{FSDP}.{owner_path}", "for a test")
    function = inspect.unwrap(inspect.getattr_static(owner, name))
    lines = textwrap.dedent(inspect.getsource(function)).splitlines(keepends=True)
    start = next(n for n, line in enumerate(lines) if f"def {inner or name}(" in line)
    end = next(n for n in range(start, len(lines)) if lines[n].rstrip().endswith(":"))
    indent = " " * (len(lines[start]) - len(lines[start].lstrip()) + 4)
    lines.insert(end + 1, f"{indent}a_new_line = None\n")
    source = f"class {owner.__name__}:\n" + textwrap.indent("".join(lines), "    ")
    file = f"<changed {target} {inner}>"
    linecache.cache[file] = (len(source), None, source.splitlines(keepends=True), file)
    scope: dict[str, Any] = {}
    exec(compile(source, file, "exec"), vars(sys.modules[function.__module__]), scope)
    monkeypatch.setattr(owner, name, vars(scope[owner.__name__])[name])


def train(trainer: Any, *, graphs: bool) -> list[Any]:
    from megatron_cg.telemetry.record_shards import parameter_digests

    numbers = [trainer.step()]
    if graphs:
        trainer.capture(TapeBackend())
    numbers += [trainer.step() for _ in range(3)]
    return [numbers, parameter_digests(trainer.model)]


@pytest.mark.parametrize(
    ("target", "inner", "off"), CASES, ids=[case[1] or case[0].rpartition(".")[2] for case in CASES]
)
def test_a_changed_function_turns_its_part_off(
    one_rank: None,
    target: str,
    inner: str,
    off: set[str],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    from megatron.core import parallel_state

    from megatron_cg.tools.cpu.train import Trainer
    from megatron_cg.tools.cpu.training_plan import CpuModelConfig, TrainingPlan

    importlib.import_module(FSDP)
    monkeypatch.setattr(path, "_warned", set())
    trainers: list[Any] = []
    found = []
    for changes, graphs in ((False, False), (False, True), (True, True), (True, True)):
        if changes and len(trainers) == 2:
            changed(target, inner, monkeypatch)
        trainer = Trainer(TrainingPlan(CpuModelConfig(layers=2), graphs=graphs))
        trainers.append(trainer)
        found.append(train(trainer, graphs=graphs))
        if trainer.session is not None:
            trainer.session.close()
        parallel_state.destroy_model_parallel()
    assert all(numbers == found[0] for numbers in found)
    whole, part = (trainer.session.fast_path for trainer in trainers[1:3])
    expected = [name for name in whole.parts if name not in off]
    assert part.parts == expected and off & set(whole.parts) == off - {"detached-weights"}
    function = inner or target.rpartition(".")[2]
    named = [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]
    named = [text for text in named if f".{function} of megatron-core" in text]
    replaced = off - {"detached-weights", "detached-weights-of-graphs"}
    assert len(named) == len(replaced)  # once, though two models were trained
    rows = [row for row in relied_on.look_up("tape") if row["unknown"] is not None]
    # The CPU fakes replace a function of Megatron that only compiled/ relies on.
    rows = [row for row in rows if not row["module"].startswith("megatron_cg.compiled.")]
    assert {row["symbol"].rpartition(".")[2] for row in rows} == {function}
    here = system(backend="tape")
    here.answers["symbols"] = {"found": rows}
    (warning,) = of_level(examine(here), Level.WARNING)
    assert "stay off" in warning.why
