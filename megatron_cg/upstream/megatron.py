"""What several rooms rely on in megatron-core: the capturing flag, the rules, and the config.

Note [The capturing flag]
    The flag tells a MoE layer where to stop: its graph holds only a part of the layer. Megatron
    sets it around a capture (``_set_capture_start``, ``_set_capture_end``), and here
    ``MegatronUnit.run`` does around that part as plain Python.

Note [One config]
    All modules of a Megatron model share one ``TransformerConfig``. At capture and at replay, the
    layer (``transformer_layer.py``) and its ``MoELayer`` (``moe_utils.py``) read
    ``cuda_graph_modules`` from it, which is what a graph covers. The block reads
    ``recompute_granularity`` from it (``transformer_block.py``); megatron-core 0.19.2.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from megatron_cg.upstream.patch import Undo, replace_function, undone_after
from megatron_cg.upstream.symbols import Symbol

_START, _END, _IS_CAPTURING = (
    Symbol(f"megatron.core.transformer.cuda_graphs:{name}", "part of Megatron's capturing flag")
    for name in ("_set_capture_start", "_set_capture_end", "is_graph_capturing")
)
_RULES = Symbol(
    "megatron.core.transformer.transformer_config:TransformerConfig.__post_init__",
    "Megatron's rules of a model",
)
RELIES_ON = (_START, _END, _IS_CAPTURING, _RULES)

_eager_regions = 0
"""How many blocks of :func:`not_capturing` have been entered."""


@contextmanager
def not_capturing() -> Iterator[None]:
    """In the block, a region runs the operations of an eager pass; see :func:`is_capturing`."""
    global _eager_regions
    _eager_regions += 1
    try:
        yield
    finally:
        _eager_regions -= 1


@contextmanager
def capturing_flag() -> Iterator[None]:
    """Set Megatron's capturing flag in the block.

    In the backward pass of a region too: there Megatron then skips its own recomputation
    (megatron-core 0.19.2).
    """
    _START.cached()
    with undone_after(_END.cached):
        yield


def is_running_region() -> bool:
    return bool(_IS_CAPTURING.cached())


def is_capturing() -> bool:
    """Whether a capture runs, warmup included; False in :func:`not_capturing`."""
    return is_running_region() and _eager_regions == 0


def relax_rules(applies: Callable[[Any], bool], **fields: tuple[Any, Any]) -> Undo:
    """Let Megatron's rules see other values in some of the configs that are made from now on.

    A config of which ``applies`` is true has the first value of each field while its rules run, and
    then the second. Returns the undo. Raises UpstreamChangedError if Megatron has no such rules.
    """
    rules = _RULES.find()

    def __post_init__(self: Any) -> None:
        with ExitStack() as then:
            for name, (meanwhile, after) in fields.items() if applies(self) else ():
                setattr(self, name, meanwhile)
                then.callback(setattr, self, name, after)
            rules(self)

    return replace_function(*_RULES.place(), __post_init__)


class LayerConfig:
    """A config with some fields of its own; the others are those of ``config``."""

    def __init__(self, config: Any, **fields: Any) -> None:
        vars(self).update(fields, _config=config)

    def __getattr__(self, name: str) -> Any:
        return getattr(vars(self)["_config"], name)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Copy the model's config, not this view."""
        return vars(self)["_config"].__reduce_ex__(protocol)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(vars(self)["_config"], name, value)

    @property  # type: ignore[misc]
    def __class__(self) -> Any:
        """The config's class, since Megatron asks ``isinstance(config, TransformerConfig)``."""
        return type(vars(self)["_config"])
