"""Megatron's capture helper for models under Megatron-FSDP.

Megatron's own method does the capture; this class wraps it in the transaction.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any, cast

from megatron.core.transformer import cuda_graphs
from megatron.core.transformer.cuda_graphs import TECudaGraphHelper
from megatron.core.transformer.enums import CudaGraphModule
from megatron.core.transformer.transformer_layer import TransformerLayer
from torch import nn

from megatron_cg.arguments.layers import LayerSelection
from megatron_cg.arguments.schema import WHOLE_LAYER, GraphArguments, prediction_is_repeated
from megatron_cg.backends.base import Backend
from megatron_cg.backends.native.native_backend import NativeBackend
from megatron_cg.backends.te.te_backend import TransformerEngineBackend
from megatron_cg.capture.controller import GraphController
from megatron_cg.capture.session import Session
from megatron_cg.consensus.exchange import Agreement, AgreementTime
from megatron_cg.fsdp.fsdp_model import find_megatron_fsdp
from megatron_cg.integrations.megatron import repeat
from megatron_cg.integrations.megatron.attach import attach_replay, run_region
from megatron_cg.integrations.megatron.full_recompute import recompute_in_layers
from megatron_cg.integrations.megatron.layer_scopes import give_scopes, leave_out
from megatron_cg.integrations.megatron.loss_scale import make_loss_scale
from megatron_cg.integrations.megatron.masks import ObservedInputs, without_unused_masks
from megatron_cg.integrations.megatron.packs import packs_as_inputs
from megatron_cg.integrations.megatron.region_state import metrics_kept, region_entries
from megatron_cg.integrations.megatron.sample_types import hidden_type, in_type
from megatron_cg.integrations.megatron.steps import StepRoutine
from megatron_cg.integrations.megatron.weight_gradients import weight_gradients_returned
from megatron_cg.integrations.megatron.without_te import capture_without_te
from megatron_cg.memory.release import drop_gradients, let_gradients_go
from megatron_cg.moe.install import peer_memory_of
from megatron_cg.moe.shared_expert import gate_in_region, shared_experts_resume
from megatron_cg.replay.counters import Counters
from megatron_cg.replay.mismatch_policy import ReplayPolicy
from megatron_cg.replay.unit import Unit
from megatron_cg.telemetry.capture_report import follow_captures
from megatron_cg.upstream.capturing_flag import capturing_flag
from megatron_cg.upstream.layer_config import LayerConfig
from megatron_cg.upstream.patch import put_over
from megatron_cg.upstream.symbols import Symbol, changed

_CONFIG = Symbol(
    "megatron-core",
    "megatron.core.transformer.transformer_config:TransformerConfig",
    "the model's config",
    attributes=("mtp_num_layers", "mtp_use_repeated_layer"),
)
RELIES_ON = (
    _CONFIG,
    *(
        Symbol("megatron-core", f"megatron.core.{path}", expected)
        for path, expected in (
            (
                "transformer.cuda_graphs:TECudaGraphHelper._discover_layers",
                "which layers are captured",
            ),
            ("transformer.cuda_graphs:TECudaGraphHelper._get_sample_arguments", "static inputs"),
            ("transformer.cuda_graphs:TECudaGraphHelper._reset_after_capture", "gradients cleared"),
            ("transformer.cuda_graphs:_layer_is_graphable", "which layers have a scope"),
            ("transformer.cuda_graphs:_set_capture_end", "the setter of the capturing flag"),
            (
                "transformer.module:GraphableMegatronModule._should_call_te_cudagraph",
                "asked in __call__",
            ),
            ("transformer.module:GraphableMegatronModule._te_cuda_graph_replay", "the replay"),
            (
                "transformer.module:GraphableMegatronModule._get_submodules_under_cudagraphs",
                "the scope",
            ),
        )
    ),
)
for _symbol in RELIES_ON:
    _symbol.find()


class FsdpCudaGraphHelper(TECudaGraphHelper):  # type: ignore[misc]
    """``TECudaGraphHelper`` that can capture under Megatron-FSDP; otherwise Megatron's own."""

    given: GraphArguments = GraphArguments()
    """All settings as given, for the rules; the members below hold the parsed settings."""
    selection: LayerSelection = LayerSelection.parse(())
    on_failure: str = "error"
    policy: ReplayPolicy = ReplayPolicy()
    fast_path: bool = True
    make_backend: Callable[[], Backend] = TransformerEngineBackend
    live: list[FsdpCudaGraphHelper] | None = None
    """Helpers of models under FSDP add themselves here, to be notified of training steps."""
    callables_per_chunk: list[list[Any]]
    callables_per_chunk_is_mtp: list[list[bool]]
    flattened_callables: list[Any]

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._scopes: dict[nn.Module, list[Any]] = {}
        self.controller: GraphController | None = None
        """Captures of a model under Megatron-FSDP."""
        self.undo = ExitStack()
        """Undoes the changes that last as long as the run."""
        self.steps: StepRoutine | None = None
        (model, *_) = args[0] if args else kwargs["model"]
        with ExitStack() as undo:
            if find_megatron_fsdp(model) and self._captures_without_te():
                undo.callback(capture_without_te())
            super().__init__(*args, **kwargs)
            if self._fsdp is not None:
                self._follow(self._fsdp, undo)
            self.undo = undo.pop_all()

    def _follow(self, fsdp: Any, undo: ExitStack) -> None:
        """Get ready to capture the model in this ``MegatronFSDP``; ``undo`` takes the undo."""
        follow_captures()
        # A collective call: all ranks create this helper.
        self._agreement = Agreement()
        undo.callback(self._agreement.close)
        self._static_inputs = ObservedInputs(self.flattened_callables)
        undo.callback(let_gradients_go(fsdp))
        self.controller = GraphController(
            self._agreement,
            self._capture_under_fsdp,
            self._static_inputs.forget,
            goes_on=self.on_failure == "eager",
            option="--cg-on-failure eager",
            clean_up=self._after_failure,
        )
        self.steps = StepRoutine(self.controller, self._static_inputs)
        undo.callback(repeat.follow(self))
        if self.live is not None:
            self.live.append(self)

    @classmethod
    def _captures_without_te(cls) -> bool:
        return cls.make_backend is not TransformerEngineBackend

    @property
    def session(self) -> Session | None:
        """The current graphs under Megatron-FSDP; None if there are none."""
        return self.controller.session if self.controller is not None else None

    @property
    def step_number(self) -> int | None:
        """The number of the step that runs, from 1; None if the loop does not tell."""
        return self.steps.number if self.steps is not None else None

    def _discover_layers(self) -> None:
        super()._discover_layers()
        self._fsdp = find_megatron_fsdp(self.model[0])
        if self._fsdp is None:
            return
        if self.flattened_callables:
            layers = list(self.chunks_with_decoder[0].decoder.layers)
            for index, layer in enumerate(layers):
                self._scopes[layer] = self._scopes_of(index, len(layers))
        repeated = self._repeated_layers()
        self._keep_only(lambda layer: layer not in repeated and self._is_selected(layer))

    def _repeated_layers(self) -> list[nn.Module]:
        """Prediction layers that run several times in a pass; they stay eager."""
        if not prediction_is_repeated(self.config):
            return []
        pairs = zip(self.flattened_callables, self.flattened_callables_is_mtp, strict=True)
        return [layer for layer, is_mtp in pairs if is_mtp]

    def _scopes_of(self, index: int, num_layers: int) -> list[Any]:
        by_name = {module.name: module for module in self.config.cuda_graph_modules}
        names = self.selection.scopes(index, num_layers, tuple(by_name))
        return [by_name.get(name, name) for name in names]

    def _layer_scopes(self, layer: nn.Module) -> list[Any]:
        """The scopes captured of one layer; for a layer outside the capture, those of the run."""
        return self._scopes.get(layer, self._run_scopes())

    def _run_scopes(self) -> list[Any]:
        return list(self.config.cuda_graph_modules) or [WHOLE_LAYER]

    def _is_selected(self, layer: nn.Module) -> bool:
        scopes = self._layer_scopes(layer)
        if scopes == self._run_scopes():
            return True
        view = LayerConfig(self.config, cuda_graph_modules=scopes)
        return bool(scopes) and bool(cuda_graphs._layer_is_graphable(layer, view))

    def _keep_only(self, wanted: Callable[[nn.Module], bool]) -> None:
        pairs = [
            [(c, mtp) for c, mtp in zip(*chunk, strict=True) if wanted(c)]
            for chunk in zip(self.callables_per_chunk, self.callables_per_chunk_is_mtp, strict=True)
        ]
        self.callables_per_chunk = [[c for c, _ in chunk] for chunk in pairs]
        self.callables_per_chunk_is_mtp = [[mtp for _, mtp in chunk] for chunk in pairs]
        self.num_layers_per_chunk = [len(chunk) for chunk in pairs]
        self.flattened_callables = [c for chunk in pairs for c, _ in chunk]
        self.flattened_callables_is_mtp = [mtp for chunk in pairs for _, mtp in chunk]

    def _get_sample_arguments(self, *args: Any, **kwargs: Any) -> tuple[list[Any], list[Any]]:
        """Megatron's samples in the model's dtype; no rotary table for layers without attention.

        Megatron decides on the table once for the whole model. With ``--cg-layers`` it depends on
        the layer, and TE requires at replay every keyword that it saw at capture.
        """
        sample_args, sample_kwargs = super()._get_sample_arguments(*args, **kwargs)
        if self._fsdp is not None:
            sample_args = in_type(sample_args, hidden_type(self.config))
            for index, layer in enumerate(self.flattened_callables):
                scopes = self._layer_scopes(layer)
                if scopes != self._run_scopes() and CudaGraphModule.attn not in scopes:
                    kept = dict(sample_kwargs[index])
                    kept.pop("rotary_pos_emb", None)
                    sample_kwargs[index] = kept
        return sample_args, sample_kwargs

    def create_cudagraphs(self) -> None:
        """Capture, as Megatron does, inside a transaction; see ``Session.capturing``.

        Raises CaptureError. With ``--cg-on-failure eager`` the failure is logged instead, and
        training continues without graphs.
        """
        if self.controller is None:
            super().create_cudagraphs()
            return
        self.controller.capture()

    def _capture_under_fsdp(self) -> Session:
        self._capture_finished = False
        try:
            return self._capture_in_a_session()
        except Exception:
            self._graphs_created = False
            raise

    def _after_failure(self) -> None:
        self._reset_after_capture()
        self._capture_finished = True
        if (peers := peer_memory_of(self.model[0])) is not None:
            peers.forget()

    def _capture_in_a_session(self) -> Session:
        backend = type(self).make_backend()
        session = Session(
            self.model[0],
            units_of(self.flattened_callables),
            backend,
            self._agreement,
            joins=self.on_failure == "eager",
            policy=type(self).policy,
            static_inputs=self._static_inputs,
            fast_path=self.fast_path,
            optimizers=self.optimizers,
        )
        captured: list[int] = []
        drop_gradients(self._fsdp)
        make_loss_scale(self.config)

        def capture(callables: Any, *args: Any, **kwargs: Any) -> Any:
            captured.append(len(callables))
            return session.capture(callables, *args, **kwargs)

        with ExitStack() as scopes:
            masks = without_unused_masks(self.flattened_callables, self._static_inputs)
            scopes.callback(masks)
            scopes.callback(packs_as_inputs(self.flattened_callables, self._static_inputs))
            scopes.callback(shared_experts_resume(self.flattened_callables))
            returned = weight_gradients_returned(self.model[0], self.flattened_callables)
            scopes.callback(returned)
            scopes.callback(recompute_in_layers(self.model[0], self._static_inputs))
            for layer in self.flattened_callables:
                if self._layer_scopes(layer) != self._run_scopes():
                    scopes.callback(give_scopes(layer, self._layer_scopes(layer)))
            with session.capturing(), ExitStack() as stack:
                stack.callback(put_over(cuda_graphs, "make_graphed_callables", capture))
                stack.callback(cuda_graphs._set_capture_end)
                super().create_cudagraphs()
                layers = len(self.flattened_callables)
                if captured != ([layers] if layers else []):
                    raise changed(
                        "megatron-core",
                        "megatron.core.transformer.cuda_graphs:TECudaGraphHelper.create_cudagraphs",
                        "one call of that module's make_graphed_callables for all layers",
                    )
            session.on_close(scopes.pop_all().close)
        with ExitStack() as failed:
            failed.callback(session.close)
            if (peers := peer_memory_of(self.model[0])) is not None:
                session.on_close(peers.hold())
            session.on_close(self._graphs_are_gone)
            failed.pop_all()
        return session

    def _graphs_are_gone(self) -> None:
        self._graphs_created = False

    def cuda_graph_set_manual_hooks(self) -> None:
        """Megatron's; does nothing under Megatron-FSDP, whose own hooks run around each replay."""
        if self._fsdp is None:
            super().cuda_graph_set_manual_hooks()

    def counted(self) -> tuple[Counters, AgreementTime]:
        """All counts so far, and the time that votes took."""
        assert self.controller is not None
        return self.controller.counters, self._agreement.time

    def delete_cuda_graphs(self) -> None:
        """Delete the graphs and undo all that capture changed."""
        if self.controller is None or self.session is None:
            super().delete_cuda_graphs()
            return
        self.controller.delete()


def settings_of(given: GraphArguments) -> dict[str, Any]:
    """The members of a helper class that follow from this package's own settings."""
    backend = {"make_backend": NativeBackend} if given.cg_backend == "native" else {}
    return {
        **backend,
        "given": given,
        "selection": LayerSelection.parse(given.cg_layers),
        "on_failure": given.cg_on_failure,
        "policy": ReplayPolicy(given.cg_on_mismatch, given.cg_verify_interval),
        "fast_path": not given.cg_no_fsdp_fast_path,
    }


def units_of(layers: Sequence[Any]) -> list[Unit]:
    """Megatron's layers as the units of a capture; each name is the index, from 0."""
    return [
        Unit(
            f"layer {layer.layer_number - 1}",
            layer,
            _graphed(layer),
            collectives=_has_collectives(layer.config),
            leave_out=partial(leave_out, layer),
            entries=region_entries,
            kept=metrics_kept,
            run=run_region,
            in_backward=capturing_flag,
            attach=partial(attach_replay, direct=_is_direct(layer)),
        )
        for layer in layers
    ]


def _is_direct(layer: Any) -> bool:
    """Whether no code of ``layer`` runs before its graph; attention does if it is not captured."""
    scopes = layer.config.cuda_graph_modules
    before = isinstance(layer, TransformerLayer) and bool(scopes)
    return not before or any(scope is CudaGraphModule.attn for scope in scopes)


def _has_collectives(config: Any) -> bool:
    """Whether graphs contain communication that torch does not count; see ``collectives.py``."""
    return bool(config.context_parallel_size > 1 or config.tensor_model_parallel_size > 1)


def _graphed(layer: nn.Module) -> tuple[nn.Module, ...]:
    """The modules below ``layer`` whose forward runs inside its graph."""
    covered = cast(Sequence[nn.Module], cast(Any, layer)._get_submodules_under_cudagraphs())
    inside = [m for root in covered for m in root.modules() if m is not layer]
    return tuple({id(m): m for m in [*inside, *gate_in_region(layer)]}.values())
