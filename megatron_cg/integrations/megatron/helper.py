"""Graphs of the layers of a model under Megatron-FSDP, captured by Megatron's own helper.

Megatron's ``TECudaGraphHelper`` finds the layers, makes their sample inputs and calls Transformer
Engine. Here it does so inside a transaction, by a backend of this package, in steps that some loop
announces (``steps.py``).
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from megatron.core.transformer import cuda_graphs, transformer_layer
from megatron.core.transformer.cuda_graphs import TECudaGraphHelper
from megatron.core.transformer.enums import CudaGraphModule
from megatron.core.utils import get_attr_wrapped_model
from torch.utils._pytree import tree_map

from megatron_cg.arguments.layers import read_tokens
from megatron_cg.arguments.megatron import run_of, scope_names
from megatron_cg.arguments.rule import WITHOUT_FIXED_SHAPES
from megatron_cg.arguments.rules import violations
from megatron_cg.arguments.schema import Environment, GraphArguments
from megatron_cg.backends.base import Backend
from megatron_cg.backends.te_backend import request_of
from megatron_cg.capture.session import GraphController, Phase, Session
from megatron_cg.consensus.exchange import Agreement
from megatron_cg.errors import ConfigurationError, HookError, Violation, say, speaking
from megatron_cg.extensions import experts_of, recompute_in_layers
from megatron_cg.fsdp.sharding import let_gradients_go, of_megatron
from megatron_cg.integrations.call_arguments import ENABLE, CallVoice, by_argument, require_same
from megatron_cg.integrations.megatron import megatron_unit
from megatron_cg.integrations.megatron.packs import Packs, agreed_packs
from megatron_cg.integrations.megatron.steps import Source, Steps, repeat_if_needed
from megatron_cg.replay.mismatch_policy import ReplayPolicy
from megatron_cg.replay.unit import SCALE
from megatron_cg.upstream.patch import Undo, combined_undo, replace_function, set_attribute
from megatron_cg.upstream.symbols import Symbol, changed

_GRAPHS = "megatron.core.transformer.cuda_graphs"
_HELPER = f"{_GRAPHS}:TECudaGraphHelper"
_TRANSFORMER = "megatron.core.transformer"
_SET_SCALE = "set_loss_scale"
RELIES_ON = (
    Symbol(
        f"{_TRANSFORMER}.transformer_config:TransformerConfig",
        "the model's config",
        attributes=("mtp_num_layers", "mtp_use_repeated_layer"),
    ),
    Symbol(f"{_HELPER}._discover_layers", "which layers are captured"),
    Symbol(f"{_HELPER}._get_sample_arguments", "static inputs"),
    Symbol(f"{_HELPER}._reset_after_capture", "gradients cleared"),
    Symbol(f"{_GRAPHS}:HAVE_TE_GRAPHS", "what the helper asserts"),
    Symbol(f"{_GRAPHS}:is_te_min_version", "what asks for TE's release"),
    Symbol(f"{_TRANSFORMER}.transformer_layer:is_te_min_version", "what asks for TE's release"),
    Symbol(
        f"{_TRANSFORMER}.module:GraphableMegatronModule.get_layer_static_inputs",
        "what makes hidden states for captures",
    ),
)
_TABLE = "rotary_pos_emb"
_NO_DECODER = (
    "a model without a decoder",
    "graphs hold layers of the decoder of a GPT or hybrid model, and others, such as BERT, have "
    "none",
)
for _symbol in RELIES_ON:
    _symbol.find()


class FsdpHelper:
    """Captures one model's layers, and replaces methods of Megatron's helper until it is closed.

    All ranks create it together. ``made`` makes Megatron's helper. ``source`` announces the steps;
    None if the caller runs :attr:`steps` itself. ``agreement`` is of :func:`meet`.
    """

    def __init__(
        self,
        made: Callable[[], Any],
        backend: Backend,
        given: GraphArguments | None = None,
        source: Source | None = None,
        agreement: Agreement | None = None,
    ) -> None:
        self.given, self._backend = given or GraphArguments(), backend
        self._agreement = agreement or Agreement()
        with ExitStack() as undo:
            undo.callback(_capture_without_te())
            self.helper = made()
            if not self.helper.flattened_callables:
                remedy = say("{type:--cuda-graph-impl none}, or use a loop with graph_units")
                raise ConfigurationError([Violation("no-decoder", *_NO_DECODER, remedy)])
            sharding: Any = of_megatron(self.helper.model[0])
            self.fsdp: Any = sharding.wrapped
            self._scopes = megatron_unit.LayerScopes(
                self.helper, read_tokens(self.given.cg_layers)[0]
            )
            self._layers: list[Any] = self.helper.flattened_callables
            if sharding.megatron_fsdp is None:  # Version 2 may not gather a layer by itself.
                units = {unit.name: unit.layer for unit in megatron_unit.units_of(self._layers)}
                if broken := list(sharding.refusals(units)):
                    raise ConfigurationError(broken)
            megatron_unit.require_forward_of_megatron(self._layers)
            self._inputs = megatron_unit.ObservedInputs(self._layers)
            self._packs: Packs | None = None
            undo.callback(let_gradients_go(self.fsdp))
            self.controller = GraphController(
                self._agreement, self._capture, eager_on_failure=self.given.cg_on_failure == "eager"
            )
            self.steps = Steps(self.controller, self._inputs)
            undo.callback(self.steps.close)
            model, optimizers = self.helper.model, self.helper.optimizers
            verifies = self.given.cg_verify_steps > 0
            undo.callback(repeat_if_needed(model, optimizers, self.steps, verifies=verifies))
            undo.callback(self._replace_methods())
            if source is not None:
                undo.callback(source(self.steps, optimizers))
            self.undo = undo.pop_all()

    @property
    def session(self) -> Session | None:
        return self.controller.session

    def capture(self) -> None:
        """Capture, as Megatron does, inside a transaction; see ``Session.capturing``.

        Raises CaptureError. With ``--cg-on-failure eager`` the failure is logged instead, and
        training continues without graphs.
        """
        self.steps.end()
        self.controller.capture()
        if self.controller.gave_up:
            self.helper._reset_after_capture()
            self.helper._capture_finished = True
            if (experts := experts_of(self.fsdp)) is not None:
                experts.forget()

    def close(self) -> None:
        """Release the graphs, stop following steps and voting, and undo all changes.

        Safe to call twice. Training is over, or goes on without graphs on all ranks.
        """
        with self.undo:
            # disable() closed the session already, maybe after the process groups were destroyed.
            if self.session is not None and self.session.phase is Phase.REPLAYING:
                self.controller.release()

    @combined_undo
    def _replace_methods(self) -> Iterator[Undo]:
        """Megatron's loop and others call these of Megatron's helper."""
        yield replace_function(self.helper, "create_cudagraphs", self.capture)
        yield replace_function(self.helper, "delete_cuda_graphs", self.controller.delete)
        # Hooks of Megatron-FSDP run around each replay.
        yield replace_function(self.helper, "cuda_graph_set_manual_hooks", lambda: None)
        make = self.helper._get_sample_arguments
        yield replace_function(self.helper, "_get_sample_arguments", partial(self._samples, make))

    def _samples(
        self, make: Callable[..., Any], *args: Any, **kwargs: Any
    ) -> tuple[list[Any], list[Any]]:
        """Megatron's samples in the model's dtype, and packs; tables for layers with attention.

        Megatron decides on the table once for the whole model; with ``--cg-layers`` it depends on
        the layer. A replay copies into samples, and Megatron's table may be the model's own. One
        sample is enough for all layers that get one table.
        """
        sample_args, sample_kwargs = make(*args, **kwargs)
        tables: dict[int, Any] = {}
        for index, layer in enumerate(self._layers):
            named = sample_kwargs[index] = dict(sample_kwargs[index])
            table = named.pop(_TABLE, None)
            has_attention = CudaGraphModule.attn in self._scopes.of(layer)
            if table is not None and (has_attention or self._scopes.is_of_run(layer)):
                key = id(table) if self._inputs.is_one(_TABLE) else index
                if key not in tables:
                    tables[key] = tree_map(torch.clone, table)
                named[_TABLE] = tables[key]
            if self._packs is not None and megatron_unit.takes_packs(layer):
                named |= self._packs.sample(sample_args[index][0].device)
        return in_dtype(sample_args, self.helper.config), sample_kwargs

    def _capture(self) -> Session:
        self._packs = None
        if any(map(megatron_unit.takes_packs, self._layers)):
            # First: ranks vote on packs, whatever fails later on one of them.
            tokens, room = self.helper.seq_length, self.given.cg_packed_samples
            self._packs = agreed_packs(self._inputs.packs, self._agreement, tokens, room)
        captured: list[int] = []

        def capture(layers: Any, *args: Any, **kwargs: Any) -> Any:
            captured.append(len(layers))
            return session.capture(request_of(layers, *args, **kwargs))

        megatron_unit.require_forward_of_megatron(self._layers)
        self.helper._capture_finished = False
        if hasattr(self.fsdp, "param_and_grad_buffer"):
            # A step begins by clearing gradients, and so does Megatron after a capture.
            self.fsdp.zero_grad_buffer()
        _make_loss_scales()
        with ExitStack() as changes:
            changes.callback(setattr, self.helper, "_graphs_created", False)
            changes.callback(self._change_layers())
            session = self._new_session()
            if (experts := experts_of(self.fsdp)) is not None:
                experts.expect(self._layers)
            with session.capturing(), ExitStack() as stack:
                stack.callback(replace_function(cuda_graphs, "make_graphed_callables", capture))
                stack.callback(cuda_graphs._set_capture_end)
                TECudaGraphHelper.create_cudagraphs(self.helper)
                if captured != ([len(self._layers)] if self._layers else []):
                    expected = "one call of that module's make_graphed_callables for all layers"
                    raise changed("megatron-core", f"{_HELPER}.create_cudagraphs", expected)
                if experts is not None:
                    changes.callback(experts.hold())
            if self._packs is not None:
                self._packs.begin(session)
            session.on_close(changes.pop_all().close)
        return session

    def _new_session(self) -> Session:
        given, sharding = self.given, of_megatron(self.helper.model[0])
        assert sharding is not None
        policy = ReplayPolicy(given.cg_on_mismatch, given.cg_verify_interval, given.cg_verify_steps)
        return Session(
            sharding,
            megatron_unit.units_of(self._layers, self._packs),
            self._backend,
            self._agreement,
            run_remaining_hooks=given.cg_on_failure == "eager",
            policy=policy,
            fast_path=not given.cg_no_fsdp_fast_path,
            optimizers=self.helper.optimizers,
        )

    @combined_undo
    def _change_layers(self) -> Iterator[Undo]:
        yield megatron_unit.without_unused_masks(self._layers, self._inputs)
        yield partial(megatron_unit.shared_experts_idle, self._layers)
        yield recompute_in_layers(self.helper.model[0], self._inputs)
        yield self._scopes.give(self._layers)
        if self._packs is not None:
            yield self._packs.install(self.helper.model[0], self._layers)


def meet(call: str, backend: str, settings: GraphArguments, given: Mapping[str, Any]) -> Agreement:
    """The votes of all ranks, which have the same settings; all of them call it together.

    ``call`` is our function that has the settings, empty for a Megatron script; ``given`` are
    arguments of Megatron's helper. Raises AgreementError, with what ranks differ in.
    """
    by_name = by_argument(settings) if call else vars(settings)
    by_name = by_name | {"backend" if call else "cg_backend": backend}
    sizes = {name: given.get(name) for name in ("seq_length", "micro_batch_size")}
    sizes["cuda_graph_warmup_steps"] = getattr(given["config"], "cuda_graph_warmup_steps", None)
    sizes["cuda_graph_modules"] = scope_names(getattr(given["config"], "cuda_graph_modules", None))
    agreement = Agreement(alone="Ask for graphs (cuda_graph_impl) on all ranks, or on none.")
    with ExitStack() as failed:
        failed.callback(agreement.close)
        require_same(agreement, call, by_name | sizes)
        failed.pop_all()
    return agreement


def check_model(model: Any, optimizer: Any, given: GraphArguments, backend: str) -> None:
    """Raise for a model that cannot be graphed, with every reason, in the names of its configs.

    ``model`` is megatron-core's ``FullyShardedDataParallel`` around one model. Raises
    ConfigurationError for broken rules, and HookError if it is another model or wants no graphs.
    """
    sharding = of_megatron(model)
    if sharding is None:
        raise HookError(
            f"{type(model).__name__} is not under Megatron-FSDP: wrap the model in "
            "megatron.core.distributed.fsdp.mcore_fsdp_adapter.FullyShardedDataParallel first."
        )
    fsdp: Any = sharding.wrapped
    ddp_config = getattr(fsdp, "ddp_config", None) or model.ddp_config  # v2's wrapper has it
    configs = (getattr(optimizer, "config", None), ddp_config, model.config)
    inner = None
    with suppress(RuntimeError):  # It has none.
        inner = get_attr_wrapped_model(model, "decoder", allow_none=False, return_model_obj=True)
    run = run_of(inner, *reversed(configs))
    if run.cuda_graph_impl == "none":
        raise HookError(
            "cuda_graph_impl of the model's config is none: build it with "
            'TransformerConfig(cuda_graph_impl="transformer_engine", cuda_graph_modules=["attn"]).'
        )
    # What counts is what the model was built with.
    experts, cause = experts_of(fsdp), ""
    if experts is not None:
        given = replace(given, **experts.settings)
    elif given.cg_grouped_gemm != "te":
        cause = f"; the model was built before {ENABLE}(), or with another dispatcher than alltoall"
        given = replace(given, cg_grouped_gemm="te")
    with speaking(CallVoice(configs=[(type(config).__name__, config) for config in configs])):
        found = violations(run, given, Environment.read(backend))
    broken = [
        replace(one, reason=one.reason + cause) if one.rule == WITHOUT_FIXED_SHAPES else one
        for one in found
    ]
    if broken:
        raise ConfigurationError(broken)


def in_dtype(
    samples: Sequence[tuple[torch.Tensor, ...]], config: Any
) -> list[tuple[torch.Tensor, ...]]:
    """Positional sample inputs (s, b, h) in the dtype that a model of ``config`` gives its layers.

    Megatron makes bfloat16 whatever the model's dtype. Samples that shared a tensor still do.
    """
    dtype = torch.float32 if config.fp32_residual_connection else config.params_dtype
    given = {id(tensor): tensor for args in samples for tensor in args}
    made = {
        key: tensor.detach().to(dtype).requires_grad_(tensor.requires_grad)
        for key, tensor in given.items()
    }
    return [tuple(made[id(tensor)] for tensor in args) for args in samples]


def _make_loss_scales() -> None:
    """Make the scales of auxiliary losses as Megatron's schedules do, before the first step.

    The backward pass of a graph reads a scale in place. A backward pass that made it would give it
    no dimension, and a schedule could not copy into it.
    """
    for scaler in torch.autograd.Function.__subclasses__():
        if getattr(scaler, SCALE, False) is None and hasattr(scaler, _SET_SCALE):
            getattr(scaler, _SET_SCALE)(torch.ones(1, device=torch.cuda.current_device()))


@combined_undo
def _capture_without_te() -> Iterator[Undo]:
    """Let Megatron's helper and layers capture where TE is not installed; returns the undo.

    The helper asserts that TE is there. Both ask for its release to know what graphs take: keyword
    arguments, as many layers as each chunk has, shared buffers. Every backend here takes all that.
    """
    if not cuda_graphs.HAVE_TE_GRAPHS:
        yield set_attribute(cuda_graphs, "HAVE_TE_GRAPHS", True)
        for module in (cuda_graphs, transformer_layer):
            yield replace_function(module, "is_te_min_version", lambda *_release, **_options: True)
