"""The example script with one thing broken or interrupted on purpose, named by MEGATRON_CG_MUTATE.

Run by the launcher in the place of ``examples/pretrain_gpt.py``; the functional tests look at how
the run ends. Without that variable it is the example as it is.
"""

from __future__ import annotations

import functools
import os
import runpy
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from megatron_cg.align.record import note
from megatron_cg.hooks import HookKind
from megatron_cg.hooks.record import FLAG_REGISTRIES

SCRIPT = Path(__file__).parents[2] / "examples" / "pretrain_gpt.py"
LAYERS = 3  # of the tiny presets that the functional tests train


class Forced(RuntimeError):
    """Raised on purpose."""


def fingerprint(model: torch.nn.Module) -> list[tuple[Any, ...]]:
    """Every hook of every module and raw parameter below ``model``, by identity and in order."""
    found: list[tuple[Any, ...]] = []
    for name, module in model.named_modules():
        for registry in (*(kind.value for kind in HookKind), *FLAG_REGISTRIES):
            found += [
                (name, registry, key, id(fn)) for key, fn in getattr(module, registry).items()
            ]
        own = sorted(set(vars(module)) & {"forward", "_should_call_te_cudagraph", "config"})
        found.append((name, "attributes", *((key, id(vars(module)[key])) for key in own)))
    for index, parameter in enumerate(model.module.param_and_grad_buffer.params):
        for registry in ("_post_accumulate_grad_hooks", "_backward_hooks"):
            hooks = getattr(parameter, registry, None) or {}
            found += [(index, registry, key, id(fn)) for key, fn in hooks.items()]
    return found


def flags() -> dict[str, Any]:
    """What a failed capture of TE or Megatron leaves set."""
    import gc

    from megatron.core.transformer import cuda_graphs
    from megatron.core.transformer.transformer_layer import TransformerLayer
    from transformer_engine.pytorch import graph
    from transformer_engine.pytorch.distributed import get_all_rng_states

    return {
        "megatron capturing": cuda_graphs.is_graph_capturing(),
        "TE capturing": graph.is_graph_capturing(),
        "layer __call__": id(TransformerLayer.__call__),
        "own __call__": "__call__" in TransformerLayer.__dict__,
        "gc": gc.isenabled(),
        "capture function": id(cuda_graphs.make_graphed_callables),
        "stream": torch.cuda.current_stream().cuda_stream,
        "rng": [torch.cuda.get_rng_state().tolist(), torch.get_rng_state().sum().item()],
        "tracked": {
            name: state.get_state().tolist() for name, state in get_all_rng_states().items()
        },
    }


def helper_class() -> Any:
    from megatron_cg.megatron import helper

    return helper.FsdpCudaGraphHelper


def wrap(owner: Any, name: str, make: Callable[[Any], Any]) -> None:
    old = getattr(owner, name)
    new = make(old)
    setattr(owner, name, new if isinstance(owner, type) else functools.wraps(old)(new))


def note_state_around_capture() -> None:
    """Note whether hooks and flags after a failed capture are those of before it."""

    def wrapped(old: Callable[[Any], None]) -> Callable[[Any], None]:
        def create(self: Any) -> None:
            before = (fingerprint(self.model[0]), flags())
            old(self)
            note("after_failure", {"same": before == (fingerprint(self.model[0]), flags())})

        return create

    wrap(helper_class(), "create_cudagraphs", wrapped)


def on_call(number: int, error: BaseException, *, after: bool = False) -> Callable[[Any], Any]:
    """A wrapper that raises ``error`` once, before or after the work of the ``number``-th call."""
    count = iter(range(1, 1 << 30))

    def make(old: Any) -> Any:
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            now = next(count) == number
            if now and not after:
                raise error
            result = old(*args, **kwargs)
            if now:
                raise error
            return result

        return wrapped

    return make


def fail_at(stage: str) -> None:
    """Raise in one stage of capture: sample inputs, warmup or capture of layer 1, publishing."""
    from megatron.core.transformer.transformer_layer import TransformerLayer

    from megatron_cg import session

    note_state_around_capture()
    error: BaseException = Forced(f"forced in {stage}")
    if stage == "memory":
        error = torch.OutOfMemoryError("forced")
    if stage == "samples":
        wrap(helper_class(), "_get_sample_arguments", on_call(1, error))
    elif stage in ("warmup-forward", "memory"):
        wrap(TransformerLayer, "_te_cuda_graph_capture", on_call(2, error))
    elif stage == "warmup-backward":
        wrap(torch.autograd, "backward", in_capture_only(on_call(1, error)))
    elif stage == "capture-forward":
        wrap(torch.cuda.CUDAGraph, "capture_begin", on_call(2, error))
    elif stage == "capture-forward-end":
        wrap(torch.cuda.CUDAGraph, "capture_end", on_call(2, error, after=True))
    elif stage == "invalid":
        wrap(TransformerLayer, "_te_cuda_graph_capture", reading_on_the_host)
    elif stage == "capture-backward":
        layers = LAYERS
        wrap(torch.cuda.CUDAGraph, "capture_begin", on_call(layers + 2, error))
    elif stage == "publish":
        wrap(session, "attach_replay", on_call(2, error))
    else:
        raise ValueError(stage)


def reading_on_the_host(old: Any) -> Any:
    """A forward that reads a tensor on the host: how a capture most often ends for users."""

    def wrapped(self: Any, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if torch.cuda.is_current_stream_capturing():
            print(hidden_states.sum().item())
        return old(self, hidden_states, *args, **kwargs)

    return wrapped


def in_capture_only(make: Callable[[Any], Any]) -> Callable[[Any], Any]:
    def outer(old: Any) -> Any:
        failing = make(old)

        def wrapped(*args: Any, **kwargs: Any) -> Any:
            from megatron.core.transformer.cuda_graphs import is_graph_capturing

            return (failing if is_graph_capturing() else old)(*args, **kwargs)

        return wrapped

    return outer


def delete_after(step: int) -> None:
    """Delete the graphs after ``step`` training steps, and train on eagerly."""
    from megatron.training import training

    made: list[Any] = []

    def remember(old: Callable[[Any], None]) -> Callable[[Any], None]:
        def create(self: Any) -> None:
            made.append((self, fingerprint(self.model[0]), flags()))
            old(self)

        return create

    wrap(helper_class(), "create_cudagraphs", remember)
    count = iter(range(1, 1 << 30))

    def stepping(old: Callable[..., Any]) -> Callable[..., Any]:
        def train_step(*args: Any, **kwargs: Any) -> Any:
            result = old(*args, **kwargs)
            if next(count) == step and made:
                helper, hooks, before = made[0]
                replayed = helper.session.counters.replayed
                helper.delete_cuda_graphs()
                # Training has drawn numbers since.
                after = {**flags(), "rng": before["rng"], "tracked": before["tracked"]}
                same = hooks == fingerprint(helper.model[0]) and before == after
                note("after_delete", {"same": same, "replayed": replayed})
            return result

        return train_step

    wrap(training, "train_step", stepping)


def hooks_without_phase_two() -> None:
    """Hand TE the hooks as Megatron-FSDP made them."""
    from megatron_cg import capture
    from megatron_cg.fsdp.transform import UnitHooks
    from megatron_cg.hooks import module_hooks

    keys = {HookKind.FORWARD_PRE: "forward_pre_hooks", HookKind.FORWARD: "forward_hooks"}

    def untransformed(unit: Any) -> UnitHooks:
        phases: Any = {"backward_pre_hooks": {}, "backward_hooks": {}}
        phases |= {key: {} for key in keys.values()}
        for record in module_hooks(unit.layer):
            phases[keys[record.kind]][record.hook_id] = record.fn
        return UnitHooks(phases)

    capture.read_hooks = untransformed


def hooks_with_a_wrapper_left_in() -> None:
    """Leave the wrapper around the post-backward handler on the unit."""
    from megatron_cg import capture
    from megatron_cg.fsdp import FsdpRole, classify
    from megatron_cg.hooks import HookSnapshot

    def clear(self: HookSnapshot) -> None:
        for record in self.records:
            if classify(record) is not FsdpRole.WRAPS_POST_BACKWARD:
                getattr(self.module, record.kind.value).pop(record.hook_id)

    capture.HookSnapshot.clear = clear  # type: ignore[method-assign]


def parameter_hooks_left_on() -> None:
    """Let the parameters' post-accumulate-grad hooks run in warmup and capture."""
    from megatron_cg import capture

    capture._quiet_parameters = lambda _parameters: lambda: None


def buffer_moved() -> None:
    """After capture, let Megatron-FSDP allocate its unsharded buffers anew."""
    from megatron_cg.megatron.helper import FsdpCudaGraphHelper

    kept: list[Any] = []

    def moving(old: Callable[[Any], None]) -> Callable[[Any], None]:
        def create(self: Any) -> None:
            old(self)
            for pool in unsharded_pools():
                kept.append(dict(pool.buffer))
                pool.buffer.clear()

        return create

    wrap(FsdpCudaGraphHelper, "create_cudagraphs", moving)


def unsharded_pools() -> Iterator[Any]:
    from megatron.core.distributed.fsdp.src.megatron_fsdp import utils

    yield utils.get_global_memory_buffer()


def main() -> None:
    """Tamper, then run the example."""
    name, _, detail = os.environ.get("MEGATRON_CG_MUTATE", "none").partition("@")
    actions: dict[str, Callable[[], None]] = {
        "none": lambda: None,
        "fail": lambda: fail_at(detail),
        "delete": lambda: delete_after(int(detail)),
        "no-phase-two": hooks_without_phase_two,
        "wrapper-left-in": hooks_with_a_wrapper_left_in,
        "parameter-hooks-on": parameter_hooks_left_on,
        "buffer-moved": buffer_moved,
    }
    actions[name]()
    runpy.run_path(str(SCRIPT), run_name="__main__")


if __name__ == "__main__":
    main()
