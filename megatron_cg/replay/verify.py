"""Compares a replay with an eager pass on the same inputs bit for bit, and trainings of a step.

Note [Outside of training]
    Both passes run on detached inputs, and everything that they change is restored. Training then
    replays separately. So verification does not change the numbers of a training run. The eager
    pass has autograd on: without it some kernels round differently (seen with the attention of TE
    2.20.2 after query and key norms).

Note [A backward pass in the forward pass]
    Gradients are compared before training's own forward replay. The unit is unsharded then, and
    its backward does not overwrite what those of earlier units will read, since it was captured
    before them. Incoming gradients are synthetic. Parameter hooks are off, so nothing is reduced.
    Weights that the fast path detaches from autograd are attached during the comparison, and
    quantized ones get the transposes that Megatron-FSDP creates before a backward pass. Where
    weights are at another address then, outputs alone are compared, which is counted apart.

Note [Results that differ by themselves]
    Without deterministic algorithms some kernels add in a different order each time (the backward
    pass of attention, scattered tokens). Rounding to bfloat16 hides most of that: one byte of 16
    million differed in one pass of sixteen (Qwen3-MoE shape, H200). So a difference counts only if
    it is there in each of :data:`ROUNDS` replays, and in none of as many eager passes. Ranks whose
    passes hold collectives go on, and decide, together.

Note [Two sums]
    A digest has two sums of a tensor's bit pattern in integers of 64 bits, which wrap: plain, and
    weighted by position. So NaN equals NaN, 0.0 differs from -0.0, and an exchange of two elements
    is seen. With position ``columns * row + column`` the second is made of the sums of rows and of
    columns, and no tensor as large as the first is needed. Sums of integers are exact in any order.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import cached_property, partial
from itertools import compress
from typing import Any, Self

import torch
from torch import nn
from torch.utils._pytree import tree_flatten, tree_map

from megatron_cg.replay.borders import local, same_placements, spec_of
from megatron_cg.replay.guard import Mismatch
from megatron_cg.replay.unit import Unit
from megatron_cg.restore import device_generator

RestoreContext = Callable[[], AbstractContextManager[None]]
_Named = list[tuple[str, torch.Tensor | None]]
_ALIGNED = 16
"""Bytes that kernels read at once, if the address allows it."""
ROUNDS = 8
"""Replays and eager passes that must show a difference without deterministic algorithms."""
_STEPS, _SCALE = 251, 128
"""Synthetic gradients are multiples of 1/128 from -125/128 to 125/128, which are exact in every
floating dtype of training."""
_COLUMNS = 4096
_KINDS = ("result", "gradient", "buffer", "attribute", "random state")
_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def verify(
    unit: Unit,
    graph: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    kept: RestoreContext,
    *,
    gradients: bool = True,
    on_any_rank: Callable[[bool], bool] = bool,
) -> tuple[Mismatch | None, int]:
    """The first output or gradient in which a replay differs from an eager pass, or None.

    And the number of results that are not compared; see Note [Results that differ by themselves].
    Waits for the GPU once for each output and once for each gradient. Writes to no argument.

    ``graph`` has its weights attached to autograd. ``kept`` returns a context that restores what a
    pass changes; in it, no parameter has a gradient or a hook. ``gradients`` says whether those of
    inputs and weights are compared too. ``on_any_rank`` says whether this holds on any of the
    ranks that run the same passes.
    """
    passes = _Passes(unit, args, kwargs, gradients)
    with kept():
        expected = passes.results(passes.eager)
    rounds = 1 if torch.are_deterministic_algorithms_enabled() else ROUNDS
    unstable: set[str] = set()
    left: dict[str, Mismatch] | None = None
    for _ in range(rounds):
        with kept():
            # A graph may read its inputs in place, and gradients are in its own memory.
            found = _differences(expected, passes.results(graph, copies=False))
        somewhere = on_any_rank(bool(found))
        if somewhere and rounds > 1:
            with kept():
                unstable |= _differences(expected, passes.results(passes.eager)).keys()
            found = {n: found[n] for n in found if n not in unstable}
        left = found if left is None else {n: left[n] for n in left if n in found}
        if somewhere and rounds > 1:
            somewhere = on_any_rank(bool(left))
        if not somewhere:
            break
    if not somewhere:
        return None, len(unstable)
    mismatch = next(iter((left or {}).values()), different("a result on another rank"))
    cause = f"{mismatch.cause} Until then: {unit.leave_out(None)}"
    return replace(mismatch, cause=cause), len(unstable)


class _Passes:
    """Passes of a unit on the same inputs."""

    def __init__(self, unit: Unit, args: Any, kwargs: Mapping[str, Any], gradients: bool) -> None:
        self._unit, self._args, self._kwargs = unit, list(args), dict(kwargs)
        self._needs: list[bool] | None = None if gradients else []
        """Which outputs of the first pass a backward pass begins with."""

    def eager(self, *inputs: Any, **keywords: Any) -> Any:
        return self._unit.run(inputs, keywords)

    def results(self, run: Callable[..., Any], *, copies: bool = True) -> _Named:
        """What a pass by ``run`` leaves, by name."""
        unit, own = self._unit, partial(_detached, copies=copies)
        inputs, keywords = tree_map(own, self._args), tree_map(own, self._kwargs)
        with unit.in_forward():
            made, _ = tree_flatten(run(*inputs, **keywords))
        # Copies, which outlive the backward pass.
        results = _copies(unit.layer, made)
        if self._needs is None:
            self._needs = [tensor is not None and tensor.requires_grad for tensor in made]
        if any(self._needs) and len(self._needs) == len(made):
            # A replay's outputs need no gradient if nothing outside of the graph gets one.
            outputs = [one for one in compress(made, self._needs) if one.requires_grad]
            # Synthetic gradients may reach what training masks.
            with unit.in_backward(), torch.autograd.set_detect_anomaly(False):
                if outputs:
                    torch.autograd.backward(outputs, [*map(synthetic_gradient, outputs)])
            names = dict(enumerate(unit.inputs))
            given = ((names.get(n, f"input {n}"), value) for n, value in enumerate(inputs))
            results += [
                (f"the gradient of {name}", value.grad)
                for name, value in (*given, *keywords.items(), *unit.layer.named_parameters())
                if isinstance(value, torch.Tensor) and value.requires_grad
            ]
            # A module may keep what an eager pass gave it (megatron-core 0.19.2: the token
            # dispatcher), and through autograd these leaves.
            for leaf in filter(torch.is_tensor, tree_flatten((inputs, keywords))[0]):
                leaf.grad = None
        return results


def _copies(layer: nn.Module, made: Sequence[torch.Tensor | None]) -> _Named:
    found = [(f"output {index}", tensor) for index, tensor in enumerate(made)]
    found += [(f"buffer {name}", buffer) for name, buffer in layer.named_buffers()]
    copies = [(n, None if tensor is None else tensor.detach().clone()) for n, tensor in found]
    for where, generators in (("host", [torch.default_generator]), ("device", device_generator())):
        states = (one.get_state() for one in generators)
        copies += [(f"state of the {where}'s random generator", state) for state in states]
    return copies


def _detached(value: Any, *, copies: bool) -> Any:
    """A leaf of autograd with the same values.

    Modules may keep what an eager pass gives them (megatron-core 0.19.2: the token dispatcher), and
    it may be another unit's output. So they get copies, unless kernels would round otherwise there.
    """
    if not isinstance(value, torch.Tensor):
        return value
    made = value.detach()
    is_strided = made.layout is torch.strided and not made.is_nested
    if copies and is_strided and made.data_ptr() % _ALIGNED == 0:
        copy = made.clone()
        made = copy if copy.stride() == made.stride() else made
    made.requires_grad_(value.requires_grad)
    vars(made).update({} if isinstance(value, nn.Parameter) else vars(value))
    return made


def synthetic_gradient(output: torch.Tensor) -> torch.Tensor:
    """A synthetic gradient with many values, the same in every pass; draws no random number.

    It lies in memory like the output, as gradients in graphs do: sums depend on that.
    """
    steps = torch.arange(output.numel(), device=output.device, dtype=torch.int64) % _STEPS
    values = (steps - _STEPS // 2).to(torch.float32) / _SCALE
    return torch.empty_like(output).copy_(values.view(output.shape))


def _differences(eager: _Named, replayed: _Named) -> dict[str, Mismatch]:
    if len(eager) != len(replayed):
        name = "the number of outputs"
        return {name: different(name, str(len(eager)), str(len(replayed)))}
    pairs = ((name, difference(a, b)) for (name, a), (_, b) in zip(eager, replayed, strict=True))
    return {name: different(name, *words) for name, words in pairs if words is not None}


def difference(one: torch.Tensor | None, two: torch.Tensor | None) -> tuple[str, str] | None:
    """What each of two results is, in words, if they are not equal bit for bit."""
    if one is None or two is None or _kind(one) != _kind(two):
        return None if one is two else (_kind(one), _kind(two))
    if not same_placements(spec_of(one), spec_of(two)):
        return _kind(one), _kind(two)
    one, two = local(one), local(two)
    if torch.equal(bytes_of(one), bytes_of(two)):
        return None
    count = int((bytes_of(one) != bytes_of(two)).sum())
    return _kind(one), f"different in {count} of {one.nbytes} bytes"


def bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of ``tensor``, so that NaN equals NaN and 0.0 differs from -0.0."""
    own = tensor.int_repr() if tensor.is_quantized else tensor.resolve_conj().resolve_neg()
    return own.contiguous().flatten().view(torch.uint8)


def _kind(tensor: torch.Tensor | None) -> str:
    return "None" if tensor is None else f"{tensor.dtype} of shape {tuple(tensor.shape)}"


def different(subject: str, expected: str = "equal", actual: str = "different") -> Mismatch:
    return Mismatch(
        "verification",
        f"{subject}, replayed beside an eager pass on the same inputs,",
        expected,
        actual,
        "The graph computes something else than the unit, and no guard saw why. Python code of the "
        "unit may read what has changed since the capture: pass it as an argument, or keep it in a "
        "buffer. Please report it, with this line.",
    )


class Digests:
    """The digests of these tensors, by name; None counts as absent. Nothing waits for the GPU."""

    def __init__(self, named: Iterable[tuple[str, Any]]) -> None:
        self._kinds: dict[str, Any] = {}
        self._sums: dict[torch.device, dict[str, torch.Tensor]] = {}
        for first, value in named:
            name, tensor = first, local(value)
            while name in self._kinds:
                name = f"{name}'"
            if isinstance(tensor, torch.Tensor):
                self._kinds[name] = tensor.dtype, tensor.shape
                if not tensor.is_meta:
                    self._sums.setdefault(tensor.device, {})[name] = _sums(tensor.detach())
            elif value is not None:
                self._kinds[name] = repr(value)

    def __str__(self) -> str:
        kinds = Counter(next(filter(name.startswith, _KINDS), "other") for name in self._kinds)
        return ", ".join(f"{count} {kind}{'s' * (count > 1)}" for kind, count in kinds.items())

    def differences(self, other: Self) -> list[str]:
        """The names of what differs, in the order of both. Waits for the GPU."""
        ours, theirs = self._by_name, other._by_name
        return [n for n in dict.fromkeys([*ours, *theirs]) if ours.get(n) != theirs.get(n)]

    @cached_property
    def _by_name(self) -> dict[str, Any]:
        sums: dict[str, list[int]] = {}
        for own in self._sums.values():  # The host waits once for each device.
            sums |= zip(own, torch.stack([*own.values()]).tolist(), strict=True)
        return {name: (kind, sums.get(name)) for name, kind in self._kinds.items()}


def _sums(tensor: torch.Tensor) -> torch.Tensor:
    """See Note [Two sums]."""
    if tensor.layout is not torch.strided:
        tensor = tensor.to_dense()
    words = bytes_of(tensor)
    size = max(n for n in _WORDS if words.numel() % n == 0 and words.storage_offset() % n == 0)
    words = words.view(_WORDS[size])
    whole = words.numel() // _COLUMNS * _COLUMNS
    parts = (words[:whole].view(whole // _COLUMNS, _COLUMNS), words[whole:].unsqueeze(0))
    plain = torch.zeros((), dtype=torch.int64, device=tensor.device)
    weighted = plain.clone()
    for start, part in zip((0, whole), parts, strict=True):
        if part.numel():
            rows, columns = part.sum(1, dtype=torch.int64), part.sum(0, dtype=torch.int64)
            plain += rows.sum()
            weighted += (rows * _places(start, rows.numel(), part.shape[1], rows)).sum()
            weighted += (columns * _places(0, columns.numel(), 1, rows)).sum()
    return torch.stack((plain, weighted))


def _places(start: int, count: int, step: int, like: torch.Tensor) -> torch.Tensor:
    return torch.arange(start + 1, start + 1 + count * step, step, device=like.device)
