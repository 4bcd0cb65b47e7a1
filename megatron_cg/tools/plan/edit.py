"""Changes a launch line until Megatron and this package accept it and it fits the GPU.

What the user wrote stays if it can. Rules that flags mend are in ``_FIXES``, which change no number
of the training. For the rest, scopes are tried in an order: the best first.
"""

import re
from argparse import Namespace
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from megatron_cg.arguments.layers import available_scopes
from megatron_cg.arguments.megatron import scope_names
from megatron_cg.arguments.rule import Configuration
from megatron_cg.arguments.rules import LARGEST_LOGITS, PACKED_ATTENTION
from megatron_cg.arguments.schema import RunArguments
from megatron_cg.errors import Violation
from megatron_cg.tools.launch_line import Gpus, LaunchLine, gpus_of
from megatron_cg.tools.plan.memory import Layer, Memory, layers_of, memory_of
from megatron_cg.tools.plan.settings import Settings, require_model, settings_of

_MODULES, _SCOPE, _GEMM = "--cuda-graph-modules", "--cuda-graph-scope", "--cg-grouped-gemm"
_EXCHANGE, _STASH, _ROWS = "--cg-moe-exchange", "--cg-moe-stash", "--cg-moe-rows"
_RECOMPUTE, _MASK = "--recompute-modules", "--no-create-attention-mask-in-dataloader"
LAUNCHER, _FORMAT = "-m megatron_cg", "--ckpt-format"
_CONVERT = (
    " A checkpoint in {} {} has to be converted from torch_dist first: torchrun "
    "tools/checkpoint/checkpoint_inspector.py convert-torch-dist-to-fsdp-dtensor, of Megatron-LM"
)
_WHY = "all of each layer that graphs can hold"
_CHOSEN = {
    _MODULES: _WHY,
    _GEMM: "counts of tokens stay on the GPU, so graphs can hold dropless experts",
    _EXCHANGE: "expert-parallel ranks of one host exchange tokens without padding",
    _STASH: "layers keep only used rows, with room for this many times those before the capture",
    _ROWS: "a rank has room for this many times the rows that it gets on average",
}
"""The flags of a choice, and why they are given."""
_BOUNDS = {
    _STASH: "Each step takes longer, and routing that is unbalanced before the capture needs more "
    "memory than is counted here: docs/experts.md#memory",
    _ROWS: "Those are most steps of a model whose router has not learned to balance. Graphs "
    "without experts are faster there: --cuda-graph-modules attn moe_router",
}
"""Flags that bound rows, and what it costs beside steps that are repeated."""
_REPEATED = "Steps in which a rank gets more rows are repeated eagerly"
_LESS = "Less is recomputed, so activations take more memory"
COSTLY = {
    **dict.fromkeys((_RECOMPUTE, "--recompute-granularity", "--moe-layer-recompute"), _LESS),
    "--fp8-param-gather": "Weights stay in BF16, and each GPU keeps FP8 copies of all of them",
    "--optimizer-cpu-offload": "The optimizer's state stays on the GPUs, which share it",
}
"""Flags whose change takes memory, and for what; of two with one text the last counts."""
_ORDER = ("mamba", "attn", "mlp")
_ROUNDS = 30  # each mends at least one error, or is the last
_FULL_ITERATION = Violation(
    "full-iteration",
    "--cuda-graph-impl full_iteration",
    "one graph then holds all passes of a step. Of a dense model on two H200s a step took 87.3 ms "
    "with it and 85.0 ms with graphs of layers, which reserve less: docs/megatron_graphs.md",
    "keep the line as it is, or drop --cuda-graph-impl and --cuda-graph-scope and plan it again",
)
"""It is not replaced: the line can train as it is."""
_RECOMPUTED = Violation(
    "recomputed-attention",
    "recomputed attention with dropout",
    "in a graph it is not recomputed, so dropout would draw other random numbers than eagerly",
    "drop --recompute-activations or --recompute-granularity, or core_attn of --recompute-modules",
)
_PIPELINE = (
    "drop --*pipeline* --overlap-p2p* --overlap-param-gather-with-optimizer-step "
    "--defer-embedding-wgrad-compute --wgrad-deferral-limit"
)
_FUSED = "as in the measured runs; a run to compare with needs it too, as last bits may differ"
_UNEVEN = "layers of all sizes share two buffers; else each of a rarer size has buffers of its own"
_OVERLAP = "drop --overlap-moe-expert-parallel-comm --delay-wgrad-compute"
_SELECTIVE = (
    "drop --recompute-method --recompute-num-layers; add --recompute-granularity selective; "
    f"add {_RECOMPUTE} layernorm"
)
_FIXES = {
    "double-buffer": "add --fsdp-double-buffer",
    "persistent-fallback": "add --fsdp-db-use-persist-buf-on-alloc-fail",
    "gradient-accumulation-fusion": "add --no-gradient-accumulation-fusion",
    "expert-parallel-overlap": _OVERLAP,
    "optimizer-graph": "drop --optimizer-cuda-graph",
    "optimizer-offload": "drop --*optimizer*-offload* --overlap-cpu-optimizer*",
    "pipeline-parallel": _PIPELINE,
    "max-connections": "set CUDA_DEVICE_MAX_CONNECTIONS 8",
    "expandable-segments": "set NCCL_GRAPH_REGISTER 0",
    "fp8-primary-weights": "add --keep-fp8-transpose-cache",
    "fp8-primary-weights-recipe": "drop --fp8-param-gather --keep-fp8-transpose-cache",
    "moe-without-drop-and-pad": f"add {_GEMM} {{kernel}}",
    "experts-tensor-parallel": "add --expert-tensor-parallel-size 1",
    "cg-layers": "drop --cg-layers",
    "full-recompute-of-parts": _SELECTIVE,
    "full-recompute": _SELECTIVE,
}
"""By rule of this package: what to change."""
_MEGATRONS = {
    "fsdp_dtensor` checkpointing format": "add --ckpt-format fsdp_dtensor",
    "check_weight_hash": "drop --check-weight-hash-across-dp-replicas-interval",
    "cross entropy loss fusion is disabled": "add --cross-entropy-fusion-impl native",
    "Delayed scaling does not support": (
        f"replace {_RECOMPUTE} layernorm; replace {_RECOMPUTE} moe_act"
    ),
    "pipeline|interleaved schedule|virtual": _PIPELINE,
    "overlap_moe_expert_parallel|delay_wgrad": _OVERLAP,
    "moe recompute is not": f"drop --moe-layer-recompute; replace {_RECOMPUTE} moe moe_act",
    "CPU offloading": "drop --cpu-offloading-num-layers",
    "apply_rope_fusion": "add --no-rope-fusion",
    "GEMM overlap can happen only": "drop --tp-comm-overlap*",
}
"""By a pattern of Megatron's own error: what to change."""
_Choice = Mapping[str, tuple[str, ...]]
"""Flags of ``_CHOSEN`` with their values."""


@dataclass(frozen=True)
class Tried:
    """A line with all fixes, and what came of it; ``memory`` is None if it is refused."""

    line: LaunchLine
    settings: Settings
    reasons: Mapping[str, str]  # why a flag, a variable or the launcher was changed
    layers: tuple[Layer, ...] = ()
    memory: Memory | None = None

    def fits(self, room: int) -> bool:
        return self.memory is not None and self.memory.total <= room

    def against(self, room: int) -> str:
        choice = " ".join(str(flag) for flag in self.line.flags if flag.name in _CHOSEN)
        if self.memory is not None:
            return f"{choice} would need {gib(self.memory.total)} of {gib(room)}"
        said, broken = [f"{choice} is refused"], self.settings.broken
        # Megatron sees our changes, and beside our rules it refuses what the line does not say.
        for item in [item for item in broken if item.rule != "megatron"] or broken:
            said.append(f"{item.found}: {item.reason.rstrip('.')}")
            said += [f"Instead: {item.remedy.partition(', or ')[0]}"] * bool(item.remedy)
        return ". ".join(said)


@dataclass(frozen=True)
class Edited:
    given: LaunchLine
    gpus: Gpus
    best: Tried
    eager: Memory | None  # of the same run without graphs
    room: int
    asks: tuple[str, ...] = ()  # what the changes take away, which the user may have chosen

    @property
    def accepted(self) -> bool:
        """Whether the changed line starts and fits."""
        return self.best.fits(self.room)


def edit(given: LaunchLine, room: int, gpus: int | None = None) -> Edited:
    """Change ``given`` so that it trains with graphs in ``room`` bytes, on ``gpus`` if given.

    Raises LaunchLineError if the flags cannot be read.
    """
    require_model(given)
    known = gpus_of(given, gpus)
    editor = _Editor(known.count, room, given)
    for name in (_MODULES, _SCOPE):
        if values := given.values(name):
            scopes = scope_names(" ".join(values))
            editor.change(" ".join(["add", name, *scopes]), "spaces separate its values")
    settings = settings_of(editor.line, known.count, room, megatron=False)
    if settings.run.cuda_graph_impl == "full_iteration":
        kept = replace(settings, broken=(_FULL_ITERATION,), notes=())
        return Edited(given, known, Tried(given, kept, {}), None, room)
    for fix, why in _needs(settings, given, known):
        editor.change(fix, why)
    tried: list[Tried] = []
    apart = _on_several_hosts(settings.args, known)
    against = settings.against_experts or (apart and f"{apart}, where whole layers were not tried")
    for choice, why in _choices(settings, against, editor.line):
        tried.append(editor.attempt(choice, why))
        starts = [trial for trial in tried if trial.memory is not None]
        if starts and starts[0].fits(room):
            break
    best = max(
        (trial for trial in tried if trial.fits(room)),
        key=lambda trial: sum(len(layer.captured) for layer in trial.layers),
        default=(starts or sorted(tried, key=lambda trial: len(trial.settings.broken)))[0],
    )
    eager, reasons = None, dict(best.reasons)
    if starts:  # with the recompute of the given line, which some graphs cannot have
        of_line = replace(settings.run, cuda_graph_impl="none")
        eager = memory_of(replace(best.settings, run=of_line))
    for name in _CHOSEN:
        bounds = name in _BOUNDS and best.line.has(name)
        if not bounds and best.line.values(name) != tried[0].line.values(name):
            reasons[name] = tried[0].against(room)
    for name in ("--load", "--pretrained-checkpoint") if _FORMAT in reasons else ():
        if path := given.values(name):
            reasons[_FORMAT] += _CONVERT.format(name, *path)
    best = replace(best, reasons=reasons)
    asks = (*_asks(settings, known.count), *_asks_of_choice(settings, against, best))
    return Edited(given, known, best, eager, room, asks)


def gib(size: int) -> str:
    return f"{size / 2**30:,.1f} GiB"


def _asks(settings: Settings, gpus: int) -> tuple[str, ...]:
    """What Megatron-FSDP and these graphs replace or break in a run, and what to do instead."""
    run, args = settings.run, settings.args
    ranks = gpus // (args.tensor_model_parallel_size * args.context_parallel_size)
    accumulates = (args.global_batch_size or 0) > (args.micro_batch_size or 1) * ranks
    alone = run.is_moe and gpus == args.expert_model_parallel_size * run.expert_tensor_parallel_size
    now = "torch's FSDP2" if args.use_torch_fsdp2 else "DDP"
    stages = run.pipeline_model_parallel_size
    texts = {
        "Warning: each expert is on one rank. Megatron-FSDP then scales its gradients wrongly, "
        "also without graphs, unless you add --calculate-per-token-loss: docs/troubleshooting.md"
        "#expert-gradients-with-ep-dp": alone and accumulates and not args.calculate_per_token_loss,
        f"Warning: {stages} pipeline stages are dropped, so each GPU gathers the weights of all "
        "layers. Where that does not fit or is too slow, keep the line as it is": stages > 1,
        f"{now} is replaced by Megatron-FSDP, which shards weights, gradients and optimizer state, "
        "and has checkpoints of its own. Graphs under DDP: docs/megatron_graphs.md": (
            not run.use_megatron_fsdp
        ),
        "Megatron's local graphs are replaced by Transformer Engine's. Keep them if this run also "
        "generates text, as for RL": run.cuda_graph_impl == "local",
    }
    return tuple(text for text, holds in texts.items() if holds)


def _asks_of_choice(settings: Settings, against: str, best: Tried) -> Iterator[str]:
    """What the chosen graphs leave out or do, which another line could change."""
    run = settings.run
    costs = {cost: best.reasons[name] for name, cost in COSTLY.items() if name in best.reasons}
    yield from (f"{cost}. {why}" for cost, why in costs.items())
    is_partial = run.is_moe and "moe" not in (best.line.values(_MODULES) or ())
    lacks = ["--moe-grouped-gemm"] * (not run.moe_grouped_gemm)
    if run.moe_token_dispatcher_type != "alltoall":
        lacks.append("--moe-token-dispatcher-type alltoall")
    if is_partial and lacks and not against:
        yield (
            f"Experts stay eager. Add {' '.join(lacks)} to capture whole MoE layers: with "
            "many small experts a step was 2 to 3 times as fast as with these graphs"
        )
    if _MODULES in best.reasons and "attn" not in (best.line.values(_MODULES) or ()):
        for item in _against_attention(settings.run):
            text = f"Attention stays eager, because of {item.found}: {item.reason}"
            yield f"{text}. Instead: {item.remedy.partition(', or ')[0]}"
    bounds = [name for name in _BOUNDS if name in best.reasons and best.line.has(name)]
    for name in bounds:
        yield f"{name} makes it fit. {_REPEATED}. {_BOUNDS[name]}"
    is_less = bool(bounds) or "would need" in best.reasons.get(_MODULES, "")
    if is_less and run.recompute_granularity != "full" and not run.has_low_precision:
        yield "With full recompute layers need less memory: docs/performance.md#full-recompute"


def _against_attention(run: RunArguments) -> tuple[Violation, ...]:
    """Broken rules of captured attention that a choice of scopes avoids."""
    given = Configuration(run=replace(run, cuda_graph_modules=("attn",)))
    broken = [item for rule in (*PACKED_ATTENTION, LARGEST_LOGITS) for item in rule(given)]
    draws = run.attention_dropout or (run.sequence_parallel and run.hidden_dropout)
    return (*broken, *[_RECOMPUTED] * bool(run.recomputes("core_attn") and draws))


def _needs(settings: Settings, given: LaunchLine, gpus: Gpus) -> Iterator[tuple[str, str]]:
    run, args = settings.run, settings.args
    apart = _on_several_hosts(args, gpus)
    if apart and given.values(_EXCHANGE) == ("peer",):
        yield f"drop {_EXCHANGE}", f"{apart}, and peer memory is of one"
    if not given.starts_graphs:
        yield "launch", "Megatron alone captures no layers under Megatron-FSDP"
    if not run.use_megatron_fsdp:
        add = "add --use-megatron-fsdp; add --data-parallel-sharding-strategy optim_grads_params"
        yield f"drop --use-torch-fsdp2; {add}", "graphs are captured under Megatron-FSDP"
    yield "add --overlap-grad-reduce; add --overlap-param-gather", "as in the measured runs"
    if run.is_moe and not args.moe_permute_fusion:
        yield "add --moe-permute-fusion", _FUSED
    if run.cuda_graph_impl != "transformer_engine" or not run.wants_graphs:
        yield "drop --enable-cuda-graph --external-cuda-graph", "--cuda-graph-impl replaces it"
        yield "add --cuda-graph-impl transformer_engine", "layerwise graphs"
    yield "add --te-rng-tracker", "graphs turn it on; a run to compare with needs it too"
    masks, resets = args.create_attention_mask_in_dataloader, args.reset_attention_mask
    if args.sft and (resets or args.reset_position_ids):
        yield "drop --reset-*", "--sft begins anew with each sample: its data loader stops at these"
    if args.sft and masks:
        yield f"add {_MASK}", "--sft makes no masks: without this flag its data loader stops"
    elif masks and not (resets or run.packs_sequences):
        yield f"add {_MASK}", "causal attention needs no mask, and each replay would copy one"


@dataclass
class _Editor:
    """Applies fixes to a line; ``reasons`` has why, by flag."""

    gpus: int
    room: int
    line: LaunchLine
    reasons: dict[str, str] = field(default_factory=dict)

    def attempt(self, choice: _Choice, why: str) -> Tried:
        trial = _Editor(self.gpus, self.room, self.line, dict(self.reasons))
        trial.change(f"drop {_SCOPE}", "--cuda-graph-modules replaces it")
        for name, reason in {**_CHOSEN, _MODULES: why}.items():
            if name in choice:
                trial.change(" ".join(["add", name, *choice[name]]), reason)
            else:
                trial.change(f"drop {name}", "it is not about what is captured now")
        settings = trial.fixed()
        if settings.broken:
            return Tried(trial.line, settings, trial.reasons)
        layers = layers_of(settings)
        args = Namespace(**vars(settings.args) | {"megatron_fsdp_max_pool_double_buffer": True})
        pooled = replace(settings, args=args)
        memory, less = (memory_of(one, layers) for one in (settings, pooled))
        if less.total < memory.total and not settings.run.fp8_param_gather:
            trial.change("add --megatron-fsdp-max-pool-double-buffer", _UNEVEN)
            settings, memory = pooled, less
        return Tried(trial.line, settings, trial.reasons, layers, memory)

    def fixed(self) -> Settings:
        """Fix what the tables can, until nothing changes; the settings of what came of it."""
        for _ in range(_ROUNDS):
            before, settings = self.line, settings_of(self.line, self.gpus, self.room)
            for violation in settings.broken:
                fixes = _FIXES.get(violation.rule, "").format(kernel=settings.run.one_kernel)
                if violation.rule == "megatron" and self.line == before:
                    found = (f for p, f in _MEGATRONS.items() if re.search(p, violation.reason))
                    fixes = next(found, "")
                self.change(fixes, f"{violation.found}: {violation.reason}")
            if self.line == before:
                break
        return settings

    def change(self, fixes: str, reason: str) -> None:
        """Apply fixes, separated by semicolons, for a reason."""
        for fix in filter(None, fixes.split("; ")):
            verb, *words = fix.split(" ")
            before, self.line = self.line, _VERBS[verb](self.line, *words)
            names = {flag.name for flag in (*before.flags, *self.line.flags)}
            touched = [name for name in names if before.values(name) != self.line.values(name)]
            touched += {"launch": [LAUNCHER], "set": words[:1]}.get(verb, [])
            self.reasons |= dict.fromkeys(touched, reason)


def _replace(line: LaunchLine, name: str, value: str, *others: str) -> LaunchLine:
    """The line with ``others`` instead of one value of a flag, and without one that has none."""
    values = line.values(name) or ()
    if value not in values:
        return line
    kept = [other for other in dict.fromkeys((*values, *others)) if other != value]
    return line.with_flag(name, *kept) if kept else line.without(name)


_VERBS: dict[str, Callable[..., LaunchLine]] = {
    "add": LaunchLine.with_flag,
    "drop": LaunchLine.without,
    "set": LaunchLine.with_variable,
    "launch": LaunchLine.with_launcher,
    "replace": _replace,
}
"""What the first word of a fix does."""


def _choices(settings: Settings, against: str, given: LaunchLine) -> Iterator[tuple[_Choice, str]]:
    """Ways to capture, first what the line says, then the best, and why."""
    run, args = settings.run, settings.args
    stated = {name: v for name in _CHOSEN if (v := given.values(name)) is not None}
    kept = {_GEMM: stated[_GEMM]} if _GEMM in stated else {}
    if scopes := given.values(_SCOPE):
        stated = {_MODULES: scopes, **stated}
    whole = run.cuda_graph_impl == "transformer_engine" and run.wants_graphs
    if whole or _MODULES in stated:
        yield stated, f"{_SCOPE} is its older name"
    available = available_scopes(run) or (frozenset({"attn", "moe" if run.is_moe else "mlp"}),)
    here = frozenset().union(*available)
    every = tuple(scope for scope in _ORDER if scope in here)
    eager = {"mamba"} if run.packs_sequences else set()
    eager |= {"attn"} if _against_attention(run) else set()
    base = tuple(scope for scope in every if scope not in eager)
    alone = (*base, "moe_router") if "moe" in here else base
    if stated.get(_GEMM) == ("te",):
        against = f"{_GEMM} te reads counts on the CPU"
    if "moe" in here and run.drops_and_pads:
        yield {**kept, _MODULES: (*base, "moe")}, _WHY
    elif "moe" in here and not against:
        why = "whole MoE layers in graphs save most launches"
        shared = args.expert_model_parallel_size > 1
        for gemm in dict.fromkeys((*stated.get(_GEMM, ()), run.one_kernel)):
            flags = {_EXCHANGE: ("peer",), **stated} if shared else dict(kept)
            flags |= {_MODULES: (*base, "moe"), _GEMM: (gemm,)}
            yield flags, why
            free = {name: flags[name] for name in flags if name not in _BOUNDS}
            # A stash leaves what FP8 saves by column. With fewer rows a new router repeats steps.
            known = args.load or args.pretrained_checkpoint or args.moe_router_force_load_balancing
            bounds = [_STASH] * (not run.has_low_precision) + [_ROWS] * bool(known)
            for name in bounds if shared else ():
                yield from (({**free, name: (f,)}, why) for f in ("2", "1.5", "1.25"))
    if "moe" in here:
        why = f"experts stay eager: {against or 'they do not fit'}"
        # What was compared with eager training.
        if args.moe_token_dispatcher_type == "alltoall" and not run.has_low_precision:
            yield {**kept, _MODULES: (*alone, "moe_preprocess")}, why
        yield {**kept, _MODULES: alone}, why
    for scopes in dict.fromkeys([base, *((scope,) for scope in alone), every]):
        if scopes:
            yield {**kept, _MODULES: scopes}, _WHY


def _on_several_hosts(args: Any, gpus: Gpus) -> str:
    ranks = args.expert_model_parallel_size
    apart = ranks > 1 and gpus.per_node % ranks
    return f"{ranks} expert-parallel ranks are on several hosts" if apart else ""
