"""NVIDIA Megatron-Bridge 0.6.2: its configuration is checked by the rules that flags have.

``ConfigContainer.validate`` completes and checks a run before the model is made. Our rules come
before Bridge's: ``cfg.mixed_precision`` and ``cfg.comm_overlap`` have been applied to the other
configs by then, and Megatron's ``__post_init__`` has not run.

Note [Before or after]
    A script may import Bridge before or after ``enable()``. We do not import it: that takes half a
    minute, and the script may not need it. A finder in ``sys.meta_path`` has the loader tell us.
"""

import logging
import os
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from functools import cache
from importlib.machinery import ModuleSpec, PathFinder
from types import SimpleNamespace
from typing import Any

from megatron_cg.arguments.megatron import PACKING, run_of_configs
from megatron_cg.arguments.rules import notices, violations
from megatron_cg.arguments.schema import BACKENDS, Environment, GraphArguments, RunArguments
from megatron_cg.errors import ConfigurationError, Violation, speaking
from megatron_cg.integrations.call_arguments import CallVoice
from megatron_cg.upstream.patch import Undo, run_instead
from megatron_cg.upstream.symbols import Symbol

_CONFIG = "megatron.bridge.training.config"
_VALIDATE = Symbol(f"{_CONFIG}:ConfigContainer.validate", "what completes and checks a run")
RELIES_ON = (_VALIDATE,)
_WITHOUT_TRACKER = Violation(
    "te-rng-tracker",
    "cfg.model.use_te_rng_tracker=False",
    "Bridge builds no model for graphs without Transformer Engine's tracker of random numbers",
    "set cfg.model.use_te_rng_tracker=True, in the eager run too, or that draws other weights",
)
_warn_once = cache(logging.getLogger(__name__).warning)  # A run is validated twice.


def before_validation(act: Callable[[Any], None]) -> Undo:
    """Call ``act`` with each ``ConfigContainer`` before it is validated; returns the undo.

    Raises UpstreamChangedError if there is no such method; see Note [Before or after].
    """

    def change() -> None:
        def validate(old: Callable[[Any], None], cfg: Any) -> None:
            act(cfg)
            old(cfg)

        undo.callback(run_instead(_VALIDATE, validate))

    def find_spec(name: str, path: Any, target: Any = None) -> ModuleSpec | None:
        spec = PathFinder.find_spec(name, path, target) if name == _CONFIG else None
        loader: Any = spec and spec.loader
        if loader is not None:
            execute = loader.exec_module

            def exec_module(module: Any) -> None:
                execute(module)
                change()

            loader.exec_module = exec_module
        return spec

    undo, ours = ExitStack(), SimpleNamespace(find_spec=find_spec)
    if _CONFIG in sys.modules:
        change()
    else:
        sys.meta_path.insert(0, ours)
        undo.callback(sys.meta_path.remove, ours)
    return undo.close


def model_of(cfg: Any) -> Any:
    """The config that has Megatron's fields: a ``GPTModelConfig`` holds it."""
    return getattr(cfg.model, "transformer", cfg.model)


def naming_fields(cfg: Any) -> AbstractContextManager[None]:
    """Errors in the block name fields of ``cfg`` and arguments of ``enable()``."""
    names = ("train", "dataset", "optimizer", "ddp", "model", "comm_overlap", "mixed_precision")
    others = ((f"cfg.{name}", getattr(cfg, name)) for name in names)
    # Each overwrites fields of those before it.
    return speaking(CallVoice(configs=[("cfg.model", model_of(cfg)), *others]))


def check(cfg: Any, given: GraphArguments) -> RunArguments | None:
    """Megatron's settings of a run; None if it asks for no layerwise graphs under Megatron-FSDP.

    Raises ConfigurationError with every broken rule, in the names of the fields of ``cfg``, and
    UpstreamChangedError when a config lacks a field.
    """
    model = model_of(cfg)
    sharded = cfg.dist.use_megatron_fsdp or cfg.ddp.use_megatron_fsdp
    # Bridge itself refuses "local" graphs of layers.
    if getattr(model, "cuda_graph_impl", "none") != "transformer_engine":
        return None
    first = os.environ.get("RANK", "0") == "0"
    if not sharded:
        if first:
            _warn_once("megatron_cg: without cfg.ddp.use_megatron_fsdp graphs are Megatron's own")
        return None
    packs = any(getattr(cfg.dataset, name, False) for name in PACKING.values())
    # Bridge's default, not Megatron's.
    split = model.expert_tensor_parallel_size or int(model.expert_model_parallel_size > 1)
    others = {"use_megatron_fsdp": True, "sft": packs, "expert_tensor_parallel_size": split}
    others["micro_batch_size"] = cfg.train.micro_batch_size
    others["te_rng_tracker"] = bool(cfg.rng.te_rng_tracker or model.use_te_rng_tracker)
    run = run_of_configs(cfg.optimizer, cfg.ddp, cfg.model, model, **others)
    environment = Environment.read(BACKENDS[given.cg_backend])
    with naming_fields(cfg):
        broken = violations(run, given, environment)
    broken += (_WITHOUT_TRACKER,) * (not run.te_rng_tracker)
    if broken:
        raise ConfigurationError(broken)
    for line in notices(run, environment) if first else ():
        _warn_once("megatron_cg: %s", line)
    return run
