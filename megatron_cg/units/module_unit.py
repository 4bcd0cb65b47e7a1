"""A plain module as a unit: a replay runs instead of its whole forward.

A graph returns tensors and nothing else. A unit may return them in containers, beside constants,
one tensor twice, or its own argument: each replay then gives the caller's own.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from megatron_cg.replay.borders import spec_of
from megatron_cg.replay.guard import Mismatch
from megatron_cg.replay.guarded_graph import Prepared, forward_of, replay_instead
from megatron_cg.replay.plain import attribute, is_plain, same_value
from megatron_cg.replay.unit import ManualHook, Unit
from megatron_cg.units.call import in_parts, not_recomputed
from megatron_cg.units.layouts import Gradients, Layout, ReadOnly, UsedResult, awaited, is_awaited
from megatron_cg.units.observe import ObservedCall, tensors_of
from megatron_cg.units.sums import Autocast
from megatron_cg.upstream.patch import Undo, combined_undo, replace_function

_KEPT = Mismatch(
    "order",
    "the outputs and input gradients of earlier passes",
    "released after their backward",
    "still in use",
    "A replay would overwrite them. The unit runs eagerly until they are dropped, and gives copies "
    "from then on, which takes time: copy what you keep.",
)
"""See Note [Outputs that outlive their pass] in ``replay/guarded_graph.py``."""


class _Tensor(NamedTuple):
    """Stands for an output of the graph, by number, or for a tensor that the caller gave."""

    key: int | str


@dataclass(frozen=True)
class Results:
    """The form of what one pass returned."""

    leaves: Sequence[Any]
    """The leaves of what it returned, with marks for tensors."""
    spec: TreeSpec
    """The containers around them; all types that torch's pytrees know."""
    layouts: Mapping[int, Layout]
    """Of outputs of the graph that are DTensors, by number."""

    def rebuild(self, outputs: Sequence[Any], given: Mapping[str, Any]) -> Any:
        """What the pass returns, with these tensors."""
        tensors: dict[Any, Any] = {**given, **dict(enumerate(outputs))}
        for number, layout in self.layouts.items():
            tensors[number] = layout.from_graph(tensors[number])
        filled = [tensors[leaf.key] if isinstance(leaf, _Tensor) else leaf for leaf in self.leaves]
        return tree_unflatten(filled, self.spec)

    def problem(self, before: Results | None) -> str | None:
        """Why no graph can return this form, after the pass ``before``; None if one can."""
        for leaf in self.leaves:
            if not isinstance(leaf, _Tensor) and not is_plain(leaf):
                return f"returns a {type(leaf).__name__}"
        if before is None or (
            (self.spec, self.layouts) == (before.spec, before.layouts)
            and all(map(same_value, self.leaves, before.leaves))
        ):
            return None
        return "returns something else in each pass"


class ModuleUnit(Unit):
    """The whole forward of one module; ``backward`` is around its backward passes."""

    is_plain_module = True

    def __init__(
        self, name: str, module: nn.Module, seen: ObservedCall, backward: Autocast
    ) -> None:
        super().__init__(name, module, tuple(module.modules()), inputs=seen.form.names)
        self._eager: Callable[..., Any] = forward_of(module)
        self._form, self._seen, self._backward = seen.form, seen, backward
        used = [key for key, one in seen.gradients.items() if one.inside is not None]
        self._watches: list[tuple[Any, Callable[..., ReadOnly | UsedResult]]] = [
            *((key, UsedResult) for key in used),
            *((key, partial(ReadOnly, shares=one)) for key, one in seen.unwritten.items()),
        ]
        """The numbers of results, and names of arguments that may not be used in any way behind a
        replay."""
        self.watched: list[ReadOnly | UsedResult] = []
        """Those of the last replay, and those that share memory of others in this step."""
        self._gradients = Gradients()
        self.to_graph = self._gradients.to_graph  # type: ignore[method-assign]
        self.broken = self._gradients.broken  # type: ignore[method-assign]
        self._results: Results | None = None
        """The form of the passes of the capture."""

    def in_forward(self) -> AbstractContextManager[None]:
        return torch.autocast(**self._seen.autocast)

    def in_backward(self) -> AbstractContextManager[None]:
        return torch.autocast(**self._backward)

    @combined_undo
    def taking_tensors(self, samples: Sequence[torch.Tensor]) -> Iterator[Undo]:
        """Let the module take and return only tensors; returns the undo.

        Capture calls it with these samples, under the autocast of backward passes.
        """

        def forward(*tensors: torch.Tensor) -> Any:
            with self.in_forward():
                return self.run(tensors, {})

        yield from self._gradients.note_arguments(samples)
        yield replace_function(self.layer, "forward", forward)

    def run(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """One pass, as its graph returns it; it takes no keywords."""
        given = self._form.join(args)
        leaves, spec = tree_flatten(in_parts(given))
        attributes, gradients = self._attributes(), self._counts()
        value = self._eager(*given[0], **given[1])
        if [(id(g), n) for g, n in gradients] != [(id(g), n) for g, n in self._counts()]:
            raise self.refused(
                "runs a backward pass in its forward pass, which adds to gradients of weights",
                "A replay would not add them. Call torch.autograd.grad and return the gradients.",
            )
        left, left_spec = tree_flatten(in_parts(given))
        if left_spec != spec or any(map(operator.is_not, left, leaves)):
            raise self.refused(
                "changes a list, dict or object that it is given, in its forward pass",
                "A replay runs no Python, so the caller would not see it. Return the tensors.",
            )
        now = self._attributes()
        if changed := [name for name in now if attributes.get(name) is not now[name]]:
            raise self.refused(
                f"sets attribute {changed[0]} in its forward pass",
                "A replay would not set it. Return the value, or write into a buffer.",
            )
        results, tensors = self._results_of(value, self._form.by_name(args))
        if (problem := results.problem(self._results)) is not None:
            raise self.refused(
                problem,
                "Return tensors, None, numbers and strings, also in tuples, lists or dicts.",
            )
        self._results = results
        return tuple(tensors)

    def _attributes(self) -> dict[str, torch.Tensor]:
        """The tensors that its modules have as attributes."""
        return {
            attribute(path, name): value
            for path, module in self.layer.named_modules()
            for name, value in vars(module).items()
            if isinstance(value, torch.Tensor)
        }

    def _results_of(
        self, value: Any, arguments: Mapping[str, torch.Tensor]
    ) -> tuple[Results, list[torch.Tensor]]:
        """The form of a pass that returned ``value``, and the tensors that its graph returns.

        ``arguments`` are the tensors that it was given.
        """
        tensors: list[torch.Tensor] = []
        layouts: dict[int, Layout] = {}
        keys = {id(tensor): key for key, tensor in enumerate(tensors_of(value))}
        # With separate_inputs the graph returned a view of an argument that needs no gradient now.
        before = None if self._results is None else self._results.leaves
        marks = {id(t): _Tensor(name) for name, t in arguments.items()}
        marks = {key: one for key, one in marks.items() if before is None or one in before}

        def marked(leaf: Any) -> Any:
            is_distributed = spec_of(leaf) is not None
            is_tensor = type(leaf) in (torch.Tensor, nn.Parameter) or is_awaited(leaf)
            if not is_tensor and not is_distributed:
                return leaf
            if id(leaf) not in marks:
                if type(leaf) is torch.Tensor and vars(leaf):
                    raise self.refused(
                        f"returns a tensor with an attribute {next(iter(vars(leaf)))}",
                        "What a replay returns has none. Return the value beside the tensor.",
                    )
                number, seen = len(tensors), self._seen.gradients.get(keys.get(id(leaf)))
                marks[id(leaf)], made = _Tensor(number), awaited(leaf)
                if is_distributed:
                    layouts[number] = Layout(leaf, f"result {number}")
                    made = layouts[number].to_graph(leaf)
                tensors.append(self._gradients.result(number, made, seen))
            return marks[id(leaf)]

        leaves, spec = tree_flatten(value, is_plain)
        form = [marked(leaf) for leaf in leaves]
        return Results(form, spec, layouts), tensors

    def _watch(
        self, value: Any, arguments: Mapping[str, torch.Tensor]
    ) -> Iterator[ReadOnly | UsedResult]:
        """Watch what a replay was given and has returned."""
        known: dict[Any, Any] = {**arguments, **dict(enumerate(tensors_of(value)))}
        for key, kind in self._watches:
            one = known.get(key)
            if isinstance(one, torch.Tensor) and (one.requires_grad or kind is not UsedResult):
                yield kind(one)

    def _counts(self) -> list[tuple[torch.Tensor, int]]:
        """The gradients that its weights have, and how often each was written."""
        grads = (weight.grad for weight in self.layer.parameters())
        return [(grad, grad._version) for grad in grads if grad is not None]

    def attach(self, before_replay: Sequence[ManualHook]) -> Callable[[], None]:
        target: Any = self.layer
        results = self._results
        assert results is not None
        mismatches = target.cuda_graphs[0].mismatches
        for layout in results.layouts.values():
            layout.refuse = partial(mismatches.mismatched_in_backward, layer=self.name)

        def prepare(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Prepared:
            graph = target.cuda_graphs[0]
            inputs, mismatch = self._form.split(args, kwargs)

            def replay() -> Any:
                for hook, arguments in before_replay:
                    hook(*arguments)
                # A result may lie in the graph's own inputs, which any replay writes.
                watched = [w for w in self.watched if isinstance(w, ReadOnly) and w.shares]
                unwritten = [one for one in watched if not one.is_found()]
                mismatch = graph.forbids(inputs, {})
                made: Any = None if mismatch is not None else graph.replay(inputs, {})
                for one in unwritten:
                    one.begin()
                if mismatch is not None:
                    return mismatch
                given = self._form.by_name(inputs)
                value = results.rebuild(made, given)
                if self._watches:
                    kept = [one for one in self.watched if one.shares]
                    self.watched = [*kept, *self._watch(value, given)]
                return value

            mismatch = mismatch or not_recomputed() or graph.waits()
            return mismatch or (_KEPT if graph.results_in_use() else replay)

        return replay_instead(target, prepare)
