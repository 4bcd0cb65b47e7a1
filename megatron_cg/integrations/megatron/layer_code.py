"""Code of Megatron's layers that was compiled elsewhere, captured in place of their own.

Note [When the code is loaded]
    Before Megatron-FSDP wraps the model: parameters are whole then, so a step of each layer can be
    compared with eager, and a refusal ends the run before its first step.

Note [What runs the loaded code]
    A capture, with its warmup. Every other pass runs Megatron's own code: the steps before capture,
    evaluation, a pass that the guard does not let replay, and the eager side of a verification.
"""

from __future__ import annotations

import inspect
import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import wraps
from pathlib import Path
from typing import Any

from torch import nn

from megatron_cg.consensus.exchange import Agreement
from megatron_cg.errors import ArtifactRefusedError, PrecompileError
from megatron_cg.integrations.megatron.model_rules import with_decoder
from megatron_cg.integrations.megatron.sample_types import hidden_type
from megatron_cg.precompile.load import OnRefusal, Precompiled, load
from megatron_cg.precompile.megatron_groups import megatron_groups
from megatron_cg.precompile.region import Region
from megatron_cg.replay.verify import synthetic_gradient
from megatron_cg.telemetry.record import note
from megatron_cg.upstream.capturing_flag import is_capturing
from megatron_cg.upstream.patch import Undo, all_of, put_over, set_attribute
from megatron_cg.upstream.symbols import Symbol

NAME = "layer"
"""The artifact of a dense layer."""
RECORDED = "precompiled"
"""Where a run's record says what was loaded; see :class:`LayerCode`."""

_FSDP = "megatron.core.distributed.fsdp.mcore_fsdp_adapter:FullyShardedDataParallel"
_WRAP = Symbol(
    "megatron-core", f"{_FSDP}.__init__", "takes the model", parameters=("config", "module")
)
_LAYER = "megatron.core.transformer.transformer_layer:TransformerLayer"
_CAPTURED = Symbol(
    "megatron-core",
    f"{_LAYER}._te_cuda_graph_capture",
    "for a whole layer, its forward pass; returns the hidden states alone",
    fingerprints=("b86d9a6b2b0f80e1",),
)
_FORWARD = Symbol(
    "megatron-core",
    f"{_LAYER}.forward",
    "returns hidden states and context",
    fingerprints=("8f9ec0dac7627d44",),
)
RELIES_ON = (_WRAP, _CAPTURED, _FORWARD)

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class LayerCall:
    """How a run calls its layers in graphs."""

    sequence: int
    """Tokens of a sequence."""
    batch: int
    """Sequences of a microbatch."""
    masked: bool
    """Whether layers get an attention mask."""

    @classmethod
    def of(cls, args: Any) -> LayerCall:
        """From Megatron's namespace. Steps before capture show that no layer gets a mask."""
        masked = args.create_attention_mask_in_dataloader or args.cuda_graph_warmup_steps < 1
        return cls(args.seq_length, args.micro_batch_size, bool(masked))


def layer_regions(model: nn.Module, call: LayerCall) -> list[Region]:
    """The layers of a model's decoder as regions, with arguments such as their graphs get.

    Args:
        model: Megatron's GPT model, in any wrapper but those that shard; on the meta device or with
            weights. Megatron's process groups are initialised.
        call: how the run calls its layers.

    Raises:
        PrecompileError: the model has no decoder with layers.
    """
    gpt = with_decoder(model)
    layers = list(getattr(getattr(gpt, "decoder", None), "layers", ()))
    if not layers:
        raise PrecompileError(
            f"{type(model).__name__} has no decoder with layers: drop --cg-precompile-dir"
        )
    return [_region(gpt, layer, call) for layer in layers]


def _region(gpt: Any, layer: Any, call: LayerCall) -> Region:
    """As ``TECudaGraphHelper._get_sample_arguments`` makes the samples of a whole layer."""
    inputs = layer.get_layer_static_inputs(call.sequence, call.batch)
    config = layer.config
    given = inputs.pop("hidden_states").detach()
    # Not Megatron's ones, of which a norm makes zeros.
    hidden = synthetic_gradient(given).to(hidden_type(config)).requires_grad_()
    if not call.masked:
        inputs.pop("attention_mask", None)
    if gpt.position_embedding_type == "rope" and not config.multi_latent_attention:
        table: Any = gpt.rotary_pos_emb
        length = table.get_rotary_seq_len(None, gpt.decoder, hidden, config, None)
        inputs["rotary_pos_emb"] = table(length)
    return Region(layer, (hidden,), inputs, megatron_groups(), config)


class LayerCode:
    """The loaded code of a run's layers.

    A run's record has under ``precompiled``: the artifact, the number of layers, the seconds that
    loading took and, as the manifest has it, those that compiling took.

    Args:
        folder: where the artifact is.
        call: how the run calls its layers.
        on_refusal: ``error`` raises on all ranks if one refuses the artifact; ``eager`` lets all
            ranks capture the layers' own code.
    """

    def __init__(self, folder: Path, call: LayerCall, on_refusal: OnRefusal) -> None:
        self._folder, self._call, self._on_refusal = folder, call, on_refusal
        self._code: list[tuple[nn.Module, Precompiled]] = []
        self.loaded: dict[str, Any] | None = None
        """What the record has; None as long as nothing is loaded."""

    def load(self, model: nn.Module) -> None:
        """Load the code of a model's layers, on all ranks together.

        Raises as :func:`megatron_cg.precompile.load.load` and :func:`layer_regions`.
        """
        unknown = _CAPTURED.unknown_body() or _FORWARD.unknown_body()
        if unknown is not None:
            # The same on all ranks, whose versions are the same.
            if self._on_refusal == "error":
                raise ArtifactRefusedError(f"{unknown}: drop --cg-precompile-dir")
            logger.warning("megatron_cg: layers run their own code: %s", unknown)
            return
        began = time.perf_counter()
        first, *others = layer_regions(model, self._call)
        votes = Agreement()
        try:
            compiled = load(
                self._folder,
                NAME,
                first,
                votes,
                on_refusal=self._on_refusal,
                also=[region.module for region in others],
            )
        finally:
            votes.close()
        if compiled is None:
            return
        self._code += [(region.module, compiled) for region in (first, *others)]
        seconds = time.perf_counter() - began
        self.loaded = {
            "artifact": NAME,
            "layers": 1 + len(others),
            "load_seconds": seconds,
            "compile_seconds": compiled.manifest.seconds,
        }
        note(RECORDED, self.loaded)
        logger.warning(
            "megatron_cg: %d layers run code of %s in graphs; loaded in %.2f s, compiled in %.2f s",
            1 + len(others),
            self._folder / f"{NAME}.artifact",
            seconds,
            compiled.manifest.seconds,
        )

    def before_wrapping(self) -> Undo:
        """Load for each model that Megatron-FSDP is about to wrap; returns the undo."""
        old = _WRAP.find()
        signature = inspect.signature(old)

        @wraps(old)
        def init(*args: Any, **kwargs: Any) -> None:
            self.load(signature.bind(*args, **kwargs).arguments["module"])
            old(*args, **kwargs)

        return set_attribute(*_WRAP.place(), init)

    def captured_in(self, layers: Sequence[nn.Module]) -> Undo:
        """Let captures of these layers run the loaded code; returns the undo."""
        captured = set(layers)
        return all_of(_in_captures(layer, code) for layer, code in self._code if layer in captured)


def _in_captures(layer: Any, compiled: Precompiled) -> Undo:
    """See Note [What runs the loaded code]."""
    own = layer._te_cuda_graph_capture

    def run(*args: Any, **kwargs: Any) -> Any:
        if not is_capturing():
            return own(*args, **kwargs)
        hidden, _context = compiled(layer, *args, **kwargs)
        return (hidden,)

    return put_over(layer, "_te_cuda_graph_capture", run)
