"""A plain module as a unit: a replay runs instead of its whole forward."""

import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_flatten

from megatron_cg.replay.guard import Mismatch
from megatron_cg.replay.guarded_graph import Prepared, replay_instead
from megatron_cg.replay.unit import ManualHook, Unit
from megatron_cg.units.call import in_parts
from megatron_cg.units.layouts import Gradients
from megatron_cg.units.observe import ObservedCall, not_recomputed
from megatron_cg.units.results import Results, attributes_of
from megatron_cg.units.sums import Autocast
from megatron_cg.upstream.patch import combine_undos, replace_function


class ModuleUnit(Unit):
    """The whole forward of one module; ``backward`` is around its backward passes."""

    sets_attributes = True

    def __init__(
        self, name: str, module: nn.Module, seen: ObservedCall, backward: Autocast
    ) -> None:
        super().__init__(name, module, tuple(module.modules()), inputs=seen.form.names)
        self._eager: Callable[..., Any] = module.forward
        self._form, self._seen, self._backward = seen.form, seen, backward
        self._gradients = Gradients()
        self._results: Results | None = None
        """The form of the passes of the capture."""
        self._without_gradient: set[str] | None = None
        """The arguments that needed no gradient in the capture."""

    def in_forward(self) -> AbstractContextManager[None]:
        return torch.autocast(**self._seen.autocast)

    def in_backward(self) -> AbstractContextManager[None]:
        return torch.autocast(**self._backward)

    @contextmanager
    def taking_tensors(self, samples: Sequence[Any], named: Mapping[str, Any]) -> Iterator[None]:
        """Inside the block the module takes and returns only tensors, as capture calls it.

        Capture calls it with these samples, under the autocast of backward passes.
        """

        def forward(*args: Any, **kwargs: Any) -> Any:
            with self.in_forward():
                return self.run(args, kwargs)

        with ExitStack() as stack:
            stack.callback(combine_undos(self._gradients.note_arguments(samples, named)))
            stack.callback(replace_function(self.layer, "forward", forward))
            yield

    def run(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """One pass, as its graph returns it: see ``results.py``."""
        given = self._form.join(args, kwargs)
        leaves, spec = tree_flatten(in_parts(given))
        before = attributes_of(self.graphed)
        gradients = self._counts()
        value = self._eager(*given[0], **given[1])
        if gradients != self._counts():
            raise self.refused(
                "runs a backward pass in its forward pass, which adds to gradients of weights",
                "A replay would not add them. Call torch.autograd.grad and return the gradients.",
            )
        left, left_spec = tree_flatten(in_parts(given))
        if left_spec != spec or any(map(operator.is_not, left, leaves)):
            raise self.refused(
                "changes a list, dict or object that it is given, in its forward pass",
                "A replay runs no Python, so the caller would not see it. Return the tensors, or "
                "set them as attributes of the module.",
            )
        after = attributes_of(self.graphed)
        attributes = {p: tensor for p, tensor in after.items() if before.get(p) is not tensor}
        arguments = self._form.by_name(args, kwargs)
        if self._without_gradient is None:
            self._without_gradient = {n for n, t in arguments.items() if not t.requires_grad}
        results, tensors = Results.of(
            value,
            attributes,
            arguments,
            without_gradient=arguments.keys() & self._without_gradient,
            seen=self._seen.layouts,
            laid_out=self._laid_out,
        )
        problem = results.problem(self._results)
        if problem is not None:
            raise self.refused(
                problem,
                "Return tensors, None, numbers and strings, also in tuples, dicts or dataclasses.",
            )
        self._results = results
        return tuple(tensors)

    def _counts(self) -> list[tuple[int, int]]:
        """Which gradients its weights have, and how often these were written."""
        grads = (weight.grad for weight in self.layer.parameters())
        return [(id(grad), grad._version) for grad in grads if grad is not None]

    def _laid_out(self, number: int, output: torch.Tensor, key: Any) -> torch.Tensor:
        return self._gradients.result(number, output, self._seen.gradients.get(key))

    def to_graph(
        self, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> tuple[Sequence[Any], Mapping[str, Any]]:
        return self._gradients.to_graph(args, kwargs)

    def broken(self, gradients: Sequence[torch.Tensor | None]) -> Mismatch | None:
        return self._gradients.broken(gradients)

    def attach(self, before_replay: Sequence[ManualHook]) -> Callable[[], None]:
        target: Any = self.layer
        results = self._results
        assert results is not None
        mismatches = target.cuda_graphs[0].eager_passes.mismatches
        for layout in results.layouts.values():
            layout.refuse = partial(mismatches.mismatched_in_backward, layer=self.name)

        def prepare(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Prepared:
            graph = target.cuda_graphs[0]
            inputs, by_name, mismatch = self._form.split(args, kwargs)

            def replay() -> Any:
                for hook, arguments in before_replay:
                    hook(*arguments)
                if (mismatch := graph.forbids(inputs, by_name)) is not None:
                    return mismatch
                made = graph.replay(inputs, by_name)
                return results.rebuild(made, self._form.by_name(inputs, by_name))

            return mismatch or not_recomputed() or graph.out_of_order() or replay

        return replay_instead(target, prepare, results.run_eagerly)
