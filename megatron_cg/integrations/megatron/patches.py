"""What ``enable()`` patches in Megatron, and how ``disable()`` undoes it.

What is replaced is looked up late: ``parse_and_validate_args`` calls ``add_megatron_arguments`` and
``validate_args`` as globals of their module, ``train`` looks up ``TECudaGraphHelper`` when it runs,
and ``initialize_megatron`` imports ``compile_helpers`` when it runs. Megatron-Bridge binds that by
name at its import, which may be before or after :func:`enable`.

Note [Every helper]
    Loops create ``TECudaGraphHelper``, and may have imported it before :func:`enable`. So its
    constructor is replaced: methods of a helper for a model under Megatron-FSDP become ours.

Note [How long a helper votes]
    All ranks must stop voting at the same point, but garbage collectors run at different times. So
    a helper is kept alive until ``close()`` or :func:`disable`. A second helper for the same model
    closes the first one and deletes its graphs.
"""

import importlib.util
import inspect
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, nullcontext
from functools import partial, wraps
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_cg import extensions
from megatron_cg.arguments import megatron as flags
from megatron_cg.arguments import schema
from megatron_cg.capture.session import close_all_sessions
from megatron_cg.errors import ConfigurationError, Violation, speaking
from megatron_cg.fsdp.sharding import root_of
from megatron_cg.integrations import call_arguments
from megatron_cg.integrations.megatron.steps import by_optimizer, by_train_step, repeat_steps
from megatron_cg.integrations.teardown import close_for_the_end, graphs_close_in_time
from megatron_cg.telemetry import follow_log, is_recorded
from megatron_cg.upstream import patch
from megatron_cg.upstream.symbols import Symbol

if TYPE_CHECKING:
    from megatron_cg.integrations.megatron.helper import FsdpHelper
    from megatron_cg.replay.mismatch_policy import Counters

_PARSER = Symbol("megatron.training.arguments:add_megatron_arguments", "what fills the parser")
_RULES = Symbol("megatron.training.arguments:validate_args", "Megatron's own rules")
_HELPER_OF_TRAIN = Symbol(
    "megatron.training.training:TECudaGraphHelper", "the capture helper that train() makes"
)
_INIT = Symbol(
    "megatron.core.transformer.cuda_graphs:TECudaGraphHelper.__init__",
    "what a capture helper is made with",
    parameters=("model", "config", "optimizers"),
)
_COMPILE = Symbol("megatron.core.datasets.utils:compile_helpers", "what runs make for datasets")
_COMPILE_OF_BRIDGE = Symbol("megatron.bridge.training.initialize:compile_helpers", "the same")
RELIES_ON = (_PARSER, _RULES, _HELPER_OF_TRAIN, _INIT, _COMPILE, _COMPILE_OF_BRIDGE)
_RECOMPUTES = Violation(
    "full-recompute-without-fsdp",
    "recompute_granularity full, and graphs of a model that is not under Megatron-FSDP",
    "such layers recompute themselves in their graphs under Megatron-FSDP alone; Megatron's own "
    "graphs do not",
    "wrap the model in FullyShardedDataParallel, or set recompute_granularity to selective or None",
)
_EXPERTS = Violation(
    "dropless-experts-without-fsdp",
    "dropless experts in graphs of a model that is not under Megatron-FSDP",
    "how many tokens each gets stays on the GPU under Megatron-FSDP alone; Megatron's own graphs "
    "need drop and pad",
    'wrap the model in FullyShardedDataParallel, or set cuda_graph_modules=["attn", "moe_router"]',
)
_NOT_RECORDED = Violation(
    "record-of-own-loop",
    "record in a loop of your own",
    "losses, norms and times of steps are read from Megatron's train() and Megatron-Bridge's alone",
    "leave it out of megatron_cg.enable(); megatron_cg.counters() has the counts",
)


def enable(
    *,
    layers: str | Sequence[str] | None = None,
    backend: call_arguments.BackendName | None = None,
    on_failure: schema.OnFailure | None = None,
    on_mismatch: schema.OnMismatch | None = None,
    verify_interval: int | None = None,
    verify_steps: int | None = None,
    packed_samples: int | None = None,
    fast_path: bool | None = None,
    grouped_gemm: schema.GroupedGemm | None = None,
    moe_rows: float | None = None,
    moe_stash: float | None = None,
    moe_exchange: schema.Exchange | None = None,
    record: str | PathLike[str] | None = None,
    full_recompute: bool = False,
) -> None:
    """Make ``--cuda-graph-impl transformer_engine`` work under Megatron-FSDP in this process.

    Adds our flags and rules to Megatron's parser, and the rules to the validation of
    Megatron-Bridge's configuration, replaces methods of Megatron's capture helper, and releases
    graphs before process groups. A run without graphs under Megatron-FSDP is not affected. Call it
    before arguments are parsed, a configuration is validated or a helper is created.

    Each setting is as the flag of its name, ``verify_interval`` as ``--cg-verify-interval``, and
    ``fast_path=False`` as ``--cg-no-fsdp-fast-path``; ``backend`` may also be ``"tape"``, which
    needs no GPU. A setting is the flag's default, and holds where no flags are parsed, for helpers
    and models that are made from now on. None is the flag's own default, or what an earlier call
    gave. :func:`disable` forgets it, and alone takes another grouped GEMM away.

    With ``moe_rows`` or ``moe_stash`` a loop runs all passes of a step by one call of the function
    that ``megatron.core.pipeline_parallel.get_forward_backward_func()`` returns from now on.
    ``record`` needs Megatron's ``train`` or Megatron-Bridge's; in another loop the creation of a
    helper raises ConfigurationError. ``full_recompute`` is for such loops: whether
    configs that are made from now on may have ``recompute_granularity="full"`` beside graphs, which
    Megatron refuses.

    Raises:
        ArgumentError: with every argument that is wrong; then nothing is changed.
        UpstreamChangedError: a symbol that we replace is missing; then nothing is changed. A later
            import of Megatron-Bridge raises it too.
    """
    global _enabled
    given = call_arguments.settings_in(locals())
    call_arguments.refuse(call_arguments.check_settings(given))
    with ExitStack() as failed:
        here = _enabled or _Enabled()
        if here is not _enabled:
            failed.callback(here.undo.close)
        settings = call_arguments.with_settings(here.settings, given)
        here.undo.callback(_build_models_for(settings, full_recompute=full_recompute))
        if here is not _enabled:
            here.install()
        failed.pop_all()
    here.settings, _enabled = settings, here


def disable() -> None:
    """Release all graphs and undo everything that :func:`enable` did. Safe to call twice.

    While an exception is being handled, as in the ``finally`` of a failed run, graphs that cannot
    be released are logged and nothing is raised, so the original exception survives.
    """
    global _enabled
    try:
        if sys.exception() is None:
            close_all_sessions()
        else:
            close_for_the_end()
    finally:
        before, _enabled = _enabled, None
        if before is not None:
            before.undo.close()


def counters() -> "list[Counters]":
    """The counts of each ``TECudaGraphHelper`` of a model under Megatron-FSDP, the oldest first."""
    return [] if _enabled is None else [one.controller.counters for one in _enabled.helpers]


@patch.combined_undo
def _build_models_for(
    given: schema.GraphArguments, *, full_recompute: bool
) -> Iterator[patch.Undo]:
    """Let models that are built from now on compute as these settings say; returns the undo."""
    yield extensions.allow_graphs_under_v2()
    gemm, factor, stash = given.cg_grouped_gemm, given.cg_moe_rows, given.cg_moe_stash
    bounded = gemm != "te" and (factor or stash)
    if bounded or given.cg_verify_steps:
        yield repeat_steps()
    if gemm != "te":
        by_peers = given.cg_moe_exchange == "peer"
        yield extensions.use_device_counts(gemm, rows=factor, stash=stash, by_peers=by_peers)
    if full_recompute:
        yield extensions.allow_full_recompute()


class _Enabled:
    """What :func:`enable` has changed until :func:`disable`, and whose graphs it has helped."""

    def __init__(self) -> None:
        self.undo = ExitStack()
        self.settings = schema.GraphArguments()
        """They hold for parsers, runs and helpers that come from now on."""
        self.helpers: list[FsdpHelper] = []
        """See Note [How long a helper votes]."""
        self.checked: list[Any] = []
        """The configs of models whose run was checked; their helpers are not checked again."""

    def install(self) -> None:
        """Raises UpstreamChangedError if a symbol is missing; the caller undoes the others."""
        self.undo.callback(patch.run_instead(_PARSER, self._parser))
        self.undo.callback(patch.run_instead(_RULES, self._validate_args))
        if (bridge := extensions.bridge()) is not None:
            self.undo.callback(bridge.before_validation(partial(self._configured, bridge)))
        self.undo.callback(_allow_prebuilt_dataset_helpers())
        self._help_models_under_fsdp()
        self.undo.callback(graphs_close_in_time())

    def _parser(self, old: Callable[[Any], Any], parser: Any) -> Any:
        flags.add_arguments(old(parser)).set_defaults(**vars(self.settings))
        return parser

    def _validate_args(self, old: Callable[..., Any], args: Any, *rest: Any, **kwargs: Any) -> Any:
        vars(args).update(vars(self.settings) | vars(args))
        flags.validate(args, defaults=self.settings)
        result = old(args, *rest, **kwargs)
        run = args if flags.wants_graphs(args) else None
        self._begin_run(settings := flags.read_graph(args), run, "megatron")
        if run is not None:  # Helpers of train() have these settings, and follow its steps.
            of_train = partial(_HELPER_OF_TRAIN.find(), source=by_train_step)
            self.undo.callback(patch.set_attribute(*_HELPER_OF_TRAIN.place(), of_train))
            self.undo.callback(follow_log(counters))
            self.settings = settings
        return result

    def _configured(self, bridge: Any, cfg: Any) -> None:
        run = bridge.check(cfg, self.settings)
        model = bridge.model_of(cfg)
        if all(model is not other for other in self.checked):  # pretrain() validates once more
            if run is not None:
                self.checked.append(model)
                self.undo.enter_context(bridge.naming_fields(cfg))
            self._begin_run(self.settings, run, "bridge")

    def _begin_run(self, settings: schema.GraphArguments, run: Any, loop: str) -> None:
        """Do what a run's settings ask for, in the loop of that name.

        ``run`` has Megatron's settings; None if it asks for no graphs.
        """
        full_recompute = run is not None and schema.recomputes_layers(run)
        self.undo.callback(_build_models_for(settings, full_recompute=full_recompute))
        # Bridge may have validated another configuration before, and the run be recorded.
        if settings.cg_record is not None and not (loop == "bridge" and is_recorded()):
            self.undo.callback(extensions.install_recorder(settings.cg_record, loop))

    def _help_models_under_fsdp(self) -> None:
        """Help each ``TECudaGraphHelper`` that is created; see Note [Every helper].

        Creating one raises ConfigurationError or HookError as ``helper.check_model`` does. Raises
        UpstreamChangedError when Megatron's helper is missing or takes other arguments.
        """
        old, (kind, _) = _INIT.find(), _INIT.place()
        signature = inspect.signature(old)

        @wraps(old)
        def init(helper: Any, *args: Any, source: Any = by_optimizer, **kwargs: Any) -> None:
            given = signature.bind(helper, *args, **kwargs).arguments
            root = root_of(given["model"][0])
            if root is None and schema.recomputes_layers(given["config"]):
                raise ConfigurationError([_RECOMPUTES])
            if root is None and any(map(extensions.experts_of, given["model"])):
                raise ConfigurationError([_EXPERTS])
            if root is None or type(helper) is not kind:
                old(helper, *args, **kwargs)
            else:
                own_loop = source is by_optimizer  # or Megatron-Bridge's
                with speaking(call_arguments.CallVoice()) if own_loop else nullcontext():
                    self._help(helper, partial(old, helper, *args, **kwargs), given, source)

        self.undo.callback(self._close_helpers)
        self.undo.callback(patch.set_attribute(kind, "__init__", init))

    def _close_helpers(self) -> None:
        patch.combine_undos(one.close for one in self.helpers)()

    def _help(
        self, helper: Any, init: Callable[[], Any], given: Mapping[str, Any], source: Any
    ) -> None:
        """Initialise Megatron's ``helper`` and replace its methods."""
        from megatron_cg.integrations.megatron.helper import FsdpHelper, check_model, meet

        model, settings = given["model"][0], self.settings
        backend = call_arguments.backend_of(settings.cg_backend)
        in_own_loop = source is by_optimizer
        call = call_arguments.ENABLE if in_own_loop else ""
        agreement = meet(call, backend.name, settings, given)

        with ExitStack() as failed:
            failed.callback(agreement.close)
            # Megatron's loop has checked its flags.
            if in_own_loop and all(given["config"] is not config for config in self.checked):
                if settings.cg_record and not is_recorded():
                    raise ConfigurationError([_NOT_RECORDED])
                if not given.get("optimizers"):
                    raise ConfigurationError([_NO_OPTIMIZERS])
                check_model(model, given["optimizers"][-1], settings, backend.name)
            for earlier in [ours for ours in self.helpers if ours.fsdp is root_of(model)]:
                earlier.close()
            ours = FsdpHelper(lambda: init() or helper, backend, settings, source, agreement)
            failed.pop_all()
        self.helpers.append(ours)
        ours.undo.callback(self.helpers.remove, ours)


_NO_OPTIMIZERS = Violation(
    "helper-without-optimizers",
    "TECudaGraphHelper without optimizers",
    "a step ends when the last optimizer has stepped, so nothing would be verified or compared "
    "between steps",
    "TECudaGraphHelper(..., optimizers=[optimizer])",
)
_enabled: _Enabled | None = None


@patch.combined_undo
def _allow_prebuilt_dataset_helpers() -> Iterator[patch.Undo]:
    """Let megatron-core run from a wheel, which has compiled dataset helpers and no Makefile."""
    folder = Path(_COMPILE.find().__code__.co_filename).parent
    built = importlib.util.find_spec("megatron.core.datasets.helpers_cpp")
    if (folder / "Makefile").exists() or built is None:
        return
    text = (
        f"megatron_cg: {folder} has no Makefile, as in every wheel of megatron-core; the dataset "
        f"helpers that came compiled with it are used ({built.origin})."
    )
    bound = [_COMPILE_OF_BRIDGE] if "megatron.bridge.training.initialize" in sys.modules else []
    for symbol in (_COMPILE, *bound):
        yield patch.replace_function(*symbol.place(), partial(print, text))
