"""Trains a program eagerly and with graphs, and compares the bits of all that can be seen."""

import random
import re
from collections.abc import Callable
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from megatron_cg import graph_units
from megatron_cg.capture.session import close_all_sessions
from megatron_cg.errors import (
    BufferInUseError,
    ConfigurationError,
    MegatronCGError,
    ReplayMismatchError,
)
from megatron_cg.units.call import separate
from megatron_cg.upstream.patch import combine_undos
from tests.unit.random_units.features import BACKEND, DEVICE, WORLD, W
from tests.unit.random_units.programs import HAPPENS, ROWS, STEPS, Net, Program, draw

WAYS = (
    "abandoned kept hooked by_hidden reused earlier read by_result penalty anomaly retain "
    "by_inputs by_grad detached after writes"
).split()
"""What only some steps do."""


class Run:
    def __init__(self, program: Program) -> None:
        for seed in (torch.manual_seed, random.seed, np.random.seed):
            seed(program.seed)
        self.program, self.trace = program, list[tuple[str, Any]]()
        self.values = torch.Generator(DEVICE).manual_seed(program.seed)
        self.kept: list[Any] = []
        self.hidden: Any = None
        """What the first unit gets."""
        self.made: Any = None
        """What the last unit returns."""
        self.s, self.terms, self.into = 0, list[Any](), dict[str, Any]()
        self.way = self._new_way()
        self.net = Net(program)
        self.model: Any = _wrapped(self.net, program.sharding)
        kinds: dict[str, Any] = {"SGD": torch.optim.SGD, "AdamW": torch.optim.AdamW}
        weights = list(dict.fromkeys(self.net.parameters()))
        self.optimizer = kinds[program.optimizer](weights, lr=0.02)
        self.tally, self.table = torch.zeros(W), torch.linspace(0.5, 1, W)
        self.leaf = torch.ones(W, requires_grad=True)
        self.graphs: Any = None
        self.refused: MegatronCGError | None = None

    def keep(self, gradients: Any) -> None:
        self.kept = [*self.kept[-1:], gradients[0]]

    def see(self, name: str, value: Any) -> None:
        """Note the bits of what the loop reads."""
        self.trace.append((f"step {self.s}: {name}", bits(value)))

    def add(self, term: Any) -> None:
        self.terms.append(term)

    def rand(self, *shape: int) -> torch.Tensor:
        """Random numbers of the loop, which draw nothing from torch's own generator."""
        return torch.rand(shape, generator=self.values)

    def with_graphs(self) -> Any:
        self.graphs = graphs = graph_units(
            self.model,
            ["units.*"],
            backend=BACKEND,  # type: ignore[arg-type]
            warmup_steps=self.program.warmup,
            verify_interval=self.program.verify_interval,
            verify_steps=self.program.verify_steps,
            separate_inputs=self.program.separate,
        )
        try:
            self.train()
        finally:
            self.close()
        return graphs.counters

    def close(self) -> None:
        if self.graphs is not None:
            self.graphs.close()
            self.graphs = None

    def train(self) -> None:
        """All steps; a refused capture leaves the run as an eager one, and so do closed graphs."""
        with_views = self.net.units if self.program.separate else ()
        views = combine_undos(map(separate, with_views if self.graphs is None else ()))
        for self.s in range(STEPS + 1):
            if self.s == STEPS:
                self.close()
                views()
            self.way = self._new_way()
            for step, name, number in self.program.events:
                if step == self.s:
                    HAPPENS[name](self, self.net.units[number])
            for unit in self.net.units:
                for feature in unit.features:  # type: ignore[union-attr]
                    feature.before(self, unit)
            with ExitStack() as stack:
                if self.graphs is not None:
                    try:
                        stack.enter_context(self.graphs.step())
                    except MegatronCGError as error:
                        self.refused = error
                        self.close()
                        views = combine_undos(map(separate, with_views))
                self._step()
            self._look()
        numbers: Any = np.random.get_state()
        self.see("python", [hash(random.getstate()), hash(numbers[1].tobytes()), numbers[2]])

    def _step(self) -> None:
        way = self.way
        if self.graphs is None:
            self._passes()
        else:
            self.graphs.verified(self._again())
        self.see("kept", self.kept)
        for name, parameter in self.net.named_parameters():
            self.see(f"gradient of {name}", parameter.grad)
        self.see("gradient of the leaf", self.leaf.grad)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=way.to_none)
        self.leaf.grad = None
        if way.after is not None:
            was = self.net.training
            self.net.train(way.training)
            with way.after():
                self._forward()
            self.net.train(was)

    def _again(self) -> Callable[[], None]:
        """All passes of a step, with the same batch and as the first ones of the loop each time."""
        before = self.values.get_state(), len(self.trace), WORLD.calls.copy(), [*self.kept]

        def passes() -> None:
            self.values.set_state(before[0])
            del self.trace[before[1] :]
            WORLD.calls, self.kept = before[2].copy(), [*before[3]]
            self._passes()

        return passes

    def _passes(self) -> None:
        way = self.way
        if way.abandoned:
            self._forward()
        with self._autocast("step"):
            for _ in range(way.micro):
                with torch.autograd.detect_anomaly() if way.anomaly else nullcontext():
                    y, loss = self._forward()
                    for _ in range(1, way.forwards):
                        loss = loss + self._forward()[1]
                    with self._autocast("backward"):
                        self._backward(loss)
                self.kept = [*self.kept[-1:], y] if way.kept else self.kept

    def _backward(self, loss: Any) -> None:
        if self.way.by_grad:
            weights = [one for one in self.net.parameters() if one.requires_grad]
            grads = torch.autograd.grad(loss, weights, allow_unused=True)
            for weight, grad in zip(weights, grads, strict=True):
                weight.grad = grad
            return
        if self.way.by_hidden and self.hidden.requires_grad:
            self.keep(torch.autograd.grad(loss, self.hidden, allow_unused=True))
            return
        if self.way.by_result:
            torch.autograd.grad(loss, self.made, retain_graph=True)
        if self.way.penalty:
            (gradient,) = torch.autograd.grad(loss, self.hidden, create_graph=True)
            loss = loss + gradient.square().sum()
        some = [self.made, *self.net.parameters()] if self.way.by_inputs else None
        loss.backward(retain_graph=bool(self.way.retain), inputs=some)
        if some is not None:
            self.see("gradient of the result", self.made.grad)
        if self.way.retain is True:
            loss.backward()

    def _forward(self) -> tuple[Any, Any]:
        self.made = None  # An output that is kept makes its unit give copies.
        x = self.rand(self.way.rows, W).sub(0.5).requires_grad_(self.program.input_grad)
        self.terms = []
        with self._autocast("forward"):
            y = self.model(x, self)
            self.see("output", y)
        loss = y.float().square().mean() + sum(term.float() for term in self.terms)
        self.see("loss", loss)
        return y, loss

    def _autocast(self, place: str) -> Any:
        where, _, how = self.way.autocast.partition(" ")
        if where != place:
            return nullcontext()
        return torch.autocast(DEVICE, torch.bfloat16, cache_enabled=how != "uncached")

    def _look(self) -> None:
        for name, module in self.net.named_modules():
            for key, value in sorted(vars(module).items()):
                if (
                    key[0] != "_"
                    and key != "cuda_graphs"
                    and isinstance(value, torch.Tensor | float | int | list | dict)
                ):
                    self.see(f"{name}.{key}", value)
        for name, value in (*self.net.named_parameters(), *self.net.named_buffers()):
            self.see(name, value)
        differed = self.graphs is not None and self.graphs.counters.steps_differed
        self.see("verified steps that differ", int(differed))
        self.see("world", [WORLD.mask, self.tally, self.table, *WORLD.kept])
        self.trace.append((f"step {self.s}: calls of hooks", dict(WORLD.calls)))
        self.see("random numbers", torch.get_rng_state())
        if DEVICE != "cpu":
            self.see("random numbers of the device", torch.cuda.get_rng_state())

    def _new_way(self) -> Any:
        way = SimpleNamespace(**dict.fromkeys(WAYS), rows=ROWS, to_none=True)
        way.style, way.micro, way.training = self.program.style, self.program.micro, True
        way.around, way.autocast = self.program.around, self.program.autocast
        way.order, way.forwards = self.program.order, 1
        return way


def bits(value: Any) -> Any:
    """What is compared: the bytes of tensors, also inside of containers, and values as text."""
    if isinstance(value, torch.Tensor):
        value = value.to_local() if hasattr(value, "to_local") else value  # FSDP2's DTensor
        plain = value.detach().as_subclass(torch.Tensor).contiguous()
        raw = plain.flatten().view(torch.uint8).cpu().numpy().tobytes()
        return str(value.dtype), tuple(value.shape), value.requires_grad, raw
    if isinstance(value, dict):
        return {key: bits(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [bits(inner) for inner in value]
    return repr(value) if isinstance(value, float | int | str | None) else type(value).__name__


def _wrapped(net: Net, sharding: str) -> Any:
    if not sharding:
        return net
    dist.init_process_group(
        "gloo" if DEVICE == "cpu" else "nccl",
        store=torch._C._distributed_c10d.HashStore(),
        rank=0,
        world_size=1,
    )
    if sharding == "ddp":
        return DistributedDataParallel(net)
    mesh = init_device_mesh(DEVICE, (1,))
    for unit in net.units:
        fully_shard(unit, mesh=mesh)
    return fully_shard(net, mesh=mesh)


def clean() -> None:
    """Everything that programs change in this process is as at its start."""
    close_all_sessions()
    if dist.is_initialized():
        dist.destroy_process_group()
    for name, registry in vars(nn.modules.module).items():
        if name.startswith("_global_") and isinstance(registry, dict):
            registry.clear()
    torch.set_autocast_enabled(DEVICE, False)
    torch.clear_autocast_cache()
    torch.autograd.set_detect_anomaly(False)
    torch.use_deterministic_algorithms(False)
    torch.backends.cuda.enable_flash_sdp(True)
    torch.backends.cudnn.allow_tf32 = True
    torch.set_grad_enabled(True)
    WORLD.reset()


@dataclass(frozen=True)
class Outcome:
    """How a program ended: ``equal``, ``refused``, ``different``, ``hanging`` or ``crashed``.

    Or ``not eager``: eager training raises, or does not give the same twice."""

    kind: str
    reason: str = ""

    @property
    def fails(self) -> bool:
        return self.kind in ("different", "hanging", "crashed")


def eager_trace(program: Program) -> list[Any] | None:
    clean()
    try:
        run = Run(program)
        run.train()
    except Exception:
        return None
    return run.trace


def tried(program: Program, expected: list[Any]) -> Outcome:
    clean()
    run = Run(program)
    try:
        counters = run.with_graphs()
        raised = run.refused
    except MegatronCGError as error:
        raised = error
    except Exception as error:
        return Outcome("crashed", f"{type(error).__name__}: {error}")
    pairs = zip(expected, run.trace, strict=False)
    first = next((one[0] for one, two in pairs if one != two), None)
    if first is None and raised is run.refused and len(expected) != len(run.trace):
        first = "the number of results"
    # Nothing goes on with the numbers of a step that ends in an error.
    is_told = raised is not None and raised is not run.refused
    if first is not None and not (is_told and first.startswith(f"step {run.s}: ")):
        return Outcome("different", f"{first}{' after a refusal' if run.refused else ''}")
    if raised is not None:
        return _refusal(raised, "" if run.refused else "in a step: ")
    if counters.replayed:
        return Outcome("equal")
    if counters.mismatched:
        return Outcome("refused", "eager by mismatch")
    return Outcome("crashed", "nothing was replayed, and nothing says why")


def _refusal(error: MegatronCGError, where: str) -> Outcome:
    if where and not isinstance(error, ReplayMismatchError | BufferInUseError):
        return Outcome("crashed", f"{type(error).__name__}: {error}")
    if "capture failed with" in str(error):
        return Outcome("crashed", f"without a reason that helps: {error}")
    if isinstance(error, ConfigurationError):
        return Outcome(
            "refused", where + " + ".join(sorted({one.rule for one in error.violations}))
        )
    text = re.sub(r"[0-9.]+|(?<=argument )[a-z]", "#", str(error).partition(" at /")[0])
    return Outcome("refused", f"{where}{type(error).__name__}: {text[:100]}")


def outcome_of(
    given: int | Program, eager_done: Callable[[Program], object] = lambda _: None
) -> tuple[Program, Outcome]:
    """How a program ends, or the first one of a seed that trains eagerly with one result."""
    drawn = [given] if isinstance(given, Program) else (draw(given, one) for one in range(50))
    for program in drawn:
        expected = eager_trace(program)
        if expected is None:
            continue
        eager_done(program)
        outcome = tried(program, expected)
        # Only a failure asks whether eager training gives the same a second time.
        if not outcome.fails or eager_trace(program) == expected:
            clean()
            return program, outcome
    return program, Outcome("not eager")
