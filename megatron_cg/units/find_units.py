"""Finds the modules that the user named, and every reason why one of them cannot be graphed.

Relied on: ``fuse_wgrad_accumulation`` of TE 2.20.2's modules.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping
from fnmatch import fnmatchcase
from itertools import accumulate
from typing import Any

from torch import nn
from torch._dynamo import OptimizedModule

from megatron_cg.arguments.rule import Configuration
from megatron_cg.arguments.rules import expandable_segments
from megatron_cg.arguments.schema import TRANSFORMER_ENGINE, Environment
from megatron_cg.errors import ConfigurationError, HookError, Violation, ranged
from megatron_cg.fsdp.sharding import Sharding
from megatron_cg.hooks import module_hooks
from megatron_cg.units.observe import ObservedCall, Observer

UnitName = str | nn.Module | type[nn.Module]
_MAKES_DTENSORS = "parallelize_module, SimpleFSDP"


def find_units(
    sharding: Sharding, wanted: Iterable[UnitName], backend: str
) -> dict[str, nn.Module]:
    """The modules below ``sharding.network`` that ``wanted`` selects, by name.

    A string is a name as in ``named_modules()`` of the model that was sharded. In it ``*`` matches
    any one part between dots. The model itself has no name, so no string selects it.

    Raises ConfigurationError with every reason why one of them cannot be captured.
    """
    names = {module: name for name, module in sharding.network.named_modules()}
    units: dict[str, nn.Module] = {}
    broken: list[Violation] = []
    for item in wanted:
        matches = [module for module in names if _means(item, names[module], module)]
        if not matches or any(map(_is_container, matches)):
            broken.append(_no_such_unit(item, names, matches))
            continue
        units.update((names[module], module) for module in matches)
    broken += sharding.refusals(units)
    broken += expandable_segments(Configuration(environment=Environment.read(backend)))
    for name, module in units.items():
        if backend == TRANSFORMER_ENGINE and sharding.is_distributed(module):
            found = f"weights of unit {name} are DTensors in its forward pass ({_MAKES_DTENSORS})"
            reason = "graphs of Transformer Engine take and return plain tensors"
            remedy = 'take backend="native", or take the unit out of units'
            broken.append(Violation("te-dtensors", found, reason, remedy))
        broken += _unit_violations(sharding, name, module, units)
    if broken:
        raise ConfigurationError(broken)
    return units


def check_seen(units: Iterable[str], observer: Observer) -> None:
    """Raise ConfigurationError if the observed calls of a unit cannot be captured.

    And HookError if something moves weights for each forward pass.
    """
    if observer.moved:
        raise HookError(
            f"Weights of the units {ranged(observer.moved)}, such as "
            f"{next(iter(observer.moved.values()))}, are elsewhere or of another shape in each "
            "forward pass than when the step began: hooks or the loop swap param.data, as an engine"
            " for sharding does that is not known here. A graph reads weights at one address. Keep "
            "them there, shard by FSDP2 or Megatron-FSDP, or leave these units out of units."
        )
    broken = [*_wrong_around(observer)]
    for name, call in observer.calls.items():
        broken += _wrong_calls(name, call, observer)
    broken += [
        Violation(
            "unit-not-called",
            f"unit {name}",
            "it was not called with model.train() and gradients on in the steps before capture",
            "give more warmup_steps; if it trains in eval mode, call unit.train(), and .eval() on "
            "its dropouts and norms; leave off torch.compile around units (torch_compile of a "
            "Trainer), or take it out of units",
        )
        for name in units
        if name not in observer.calls
    ]
    if broken:
        raise ConfigurationError(broken)


def _wrong_around(observer: Observer) -> Iterator[Violation]:
    for name in observer.written:
        yield Violation(
            "unit-view-written",
            f"unit {name} returns its argument, or one memory twice, and its caller writes there",
            "results of a replay do not share memory with an argument, or for autograd with others",
            "write into a clone, or take the unit out of units",
        )
    for name, argument in observer.overwritten:
        yield Violation(
            "unit-buffer-argument",
            f"unit {name} writes a buffer of its own, which it is given as its argument {argument}",
            "a graph takes a copy of each argument, which the write would not reach",
            "read the buffer as an attribute, pass a clone, or take the unit out of units",
        )
    for name, (what, remedy) in observer.sums.shared.items():
        yield Violation(
            "unit-shared-gradients",
            f"unit {name}: {what}",
            "autograd sums the gradients of all uses one by one, and a graph those of its own uses "
            "apart and in one dtype, so numbers would differ",
            f"{remedy}, or take the unit out of units",
        )


def _wrong_calls(name: str, call: ObservedCall, observer: Observer) -> Iterator[Violation]:
    if observer.keeps_casts(call):
        yield Violation(
            "unit-kept-casts",
            f"unit {name} and its backward pass run under one torch.autocast, which keeps casts of "
            "its weights, while its weights are gathered for each pass",
            "a later microbatch of eager training would use the casts of an earlier one",
            "enter torch.autocast with cache_enabled=False, or around the forward pass alone",
        )
    for problem in call.form.problems():
        # Of transformers, for keys and values.
        without = "call the model with use_cache=False, " if "Cache" in problem else ""
        yield Violation(
            "unit-arguments",
            f"unit {name}: {problem}",
            "a graph takes dense tensors, also in tuples, lists, dicts and a BlockMask; "
            "other arguments must be None, numbers, strings, dtypes or shapes",
            f"{without}pass plain tensors, of a sparse one its indices and values, or take the "
            "unit out of units",
        )
    for varies in filter(None, (one.varies for one in call.gradients.values())):
        yield Violation(
            "unit-layouts",
            f"unit {name}: {varies.subject} is {varies.expected} or {varies.actual}",
            "a graph takes gradients in one layout, of parts as large as those of the result",
            "use what the unit returns in one way, of DTensors with sequence parallelism, or take "
            "the unit out of units",
        )
    if call.recompute is not None:
        shown, *cause = call.recompute
        yield Violation("unit-recomputed", f"unit {name} was called {shown}", *cause)
    if (how := observer.sums.again.get(name)) is not None:
        yield Violation(
            "unit-backward-again",
            f"the backward pass of unit {name} runs {how}",
            "a graph has no second derivative, and its memory no longer holds what a second "
            "backward pass reads",
            "run one backward() over the sum of all losses, or take the unit out of units",
        )


def label_of(item: UnitName) -> str:
    return item if isinstance(item, str) else getattr(item, "__qualname__", type(item).__name__)


def _means(item: UnitName, name: str, module: nn.Module) -> bool:
    if isinstance(item, str):
        parts, pattern = name.split("."), item.split(".")
        return bool(name) and len(parts) == len(pattern) and all(map(fnmatchcase, parts, pattern))
    return module is item if isinstance(item, nn.Module) else isinstance(module, item)


def _no_such_unit(
    item: UnitName, names: Mapping[nn.Module, str], matches: Collection[nn.Module]
) -> Violation:
    known = [name for name in names.values() if name]
    shown = ", ".join(known[:8]) + (f" and {len(known) - 8} more" if len(known) > 8 else "")
    reason = f"the model has no such module; it has {shown}"
    remedy = "give names as in model.module.named_modules(), the modules themselves, or their class"
    label = label_of(item)
    for module, name in names.items():
        if module in matches and _is_container(module):
            reason = f"{name} is a {type(module).__name__}, which has no forward pass"
            remedy = f'type "{name}.*" for the modules in it'
            break
        if not matches and isinstance(item, str) and fnmatchcase(name, f"*.{item}"):
            before = name.split(".")[: -item.count(".") - 1]
            remedy = f'type "{".".join([*before, item, *["*"] * _is_container(module)])}"'
            break
    return Violation("no-such-unit", f"units names {label}", reason, remedy)


def _is_container(module: nn.Module) -> bool:
    return getattr(module.forward, "__func__", None) is nn.Module.forward


def _unit_violations(
    sharding: Sharding, name: str, module: nn.Module, units: Mapping[str, nn.Module]
) -> Iterator[Violation]:
    within = f"{name}." if name else ""
    inside = [other for other in units if other != name and other.startswith(within)]
    inside += [
        f"{within}{child}"
        for child, below in module.named_modules()
        if below is not module
        and sharding.is_unit(below)
        and not any(sharding.hoists_hook(hook.fn) for hook in module_hooks(below))
    ]
    if inside:
        yield Violation(
            "nested-units",
            f"unit {name} contains {inside[0]}",
            "an FSDP unit inside another is gathered by the outer one, and has no graph of its own",
            "name one of the two, and shard only that one (fsdp_unit_modules, fully_shard)",
        )
    if compiled := _compiled(sharding.network, name):
        yield compiled_unit(f"unit {name}: {compiled} is compiled by torch.compile")
    for child, below in module.named_modules():
        # Without a mark on its weights it writes into main_grad unseen: capture cannot refuse it.
        if getattr(below, "fuse_wgrad_accumulation", False):
            yield Violation(
                "gradient-accumulation-fusion",
                f"{within}{child} was made with fuse_wgrad_accumulation=True",
                "Transformer Engine adds gradients to weight.main_grad by itself, also those of "
                "made-up inputs, and a graph to what was main_grad at capture",
                "fuse_wgrad_accumulation=False",
            )


def compiled_unit(found: str) -> Violation:
    reason = "Dynamo would trace what observes the unit and replays its graph"
    remedy = "compile functions or modules inside the unit instead, or take it out of units"
    return Violation("compiled-unit", found, reason, remedy)


def _compiled(network: nn.Module, name: str) -> str | None:
    """The unit or a module around it that torch.compile compiles, in words."""
    modules = dict(network.named_modules())
    for path in ("", *accumulate(name.split("."), "{}.{}".format)):
        module: Any = modules[path]
        if isinstance(module, OptimizedModule) or module._compiled_call_impl is not None:
            return path or "the model"
    return None
