"""Changes a launch line until Megatron and this package accept it and it fits the GPU.

What the user wrote stays if it can. Rules that one flag mends are in ``_FIXES``, which change no
number of the training. For the rest, scopes are tried in an order: the best first.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from megatron_cg.arguments.layout import available_scopes
from megatron_cg.errors import Violation
from megatron_cg.tools.launch_line import Gpus, LaunchLine, gpus_of
from megatron_cg.tools.plan.layers import Layer, layers_of
from megatron_cg.tools.plan.memory import Memory, memory_of
from megatron_cg.tools.plan.settings import Reader, Settings, fewest_gpus

_MODULES, _GEMM = "--cuda-graph-modules", "--cg-grouped-gemm"
_EXCHANGE, _ROWS, _LAYERS = "--cg-moe-exchange", "--cg-moe-rows", "--cg-layers"
_RECOMPUTE = "--recompute-modules"
_ORDER = ("mamba", "attn", "mlp")
_LARGE_GEMM = 2e11
"""Operations of an expert's first GEMM beyond which one launch for all experts gains little."""
_PIPELINE = (
    "--pipeline-model-parallel-size --num-layers-per-virtual-pipeline-stage "
    "--num-virtual-stages-per-pipeline-rank --pipeline-model-parallel-layout "
    "--decoder-first-pipeline-num-layers --decoder-last-pipeline-num-layers "
    "--account-for-embedding-in-pipeline-split --account-for-loss-in-pipeline-split "
    "--virtual-pipeline-model-parallel-size --overlap-param-gather-with-optimizer-step"
)
_NO_PIPELINE = "; ".join(f"drop {name}" for name in _PIPELINE.split())
_NO_OVERLAP = "drop --overlap-moe-expert-parallel-comm; drop --delay-wgrad-compute"
_FIXES = {
    "implementation": "add --cuda-graph-impl transformer_engine",
    "double-buffer": "add --fsdp-double-buffer",
    "persistent-fallback": "add --fsdp-db-use-persist-buf-on-alloc-fail",
    "gradient-accumulation-fusion": "add --no-gradient-accumulation-fusion",
    "expert-parallel-overlap": _NO_OVERLAP,
    "delayed-weight-gradients": _NO_OVERLAP,
    "optimizer-graph": "drop --optimizer-cuda-graph",
    "pipeline-parallel": _NO_PIPELINE,
    "max-connections": "set CUDA_DEVICE_MAX_CONNECTIONS 8",
    "expandable-segments": "set NCCL_GRAPH_REGISTER 0",
    "fp8-primary-weights": "add --keep-fp8-transpose-cache",
    "fp8-primary-weights-recipe": "drop --fp8-param-gather; drop --keep-fp8-transpose-cache",
    "native-backend-fp8": "drop --cg-backend",
    "moe-without-drop-and-pad": f"add {_GEMM} torch",
    "grouped-gemm-delayed-gradients": _NO_OVERLAP,
    "experts-delayed-gradients": "drop --overlap-dispatch-backward-with-experts-wgrad",
    "experts-tensor-parallel": "add --expert-tensor-parallel-size 1",
    "cg-layers": f"drop {_LAYERS}",
    "distributed-full-recompute": "drop --distribute-saved-activations",
    "full-recompute-of-parts": "selective",
    "dropout-in-full-recompute": "selective",
    "jitter-in-full-recompute": "selective",
    "low-precision-full-recompute": "selective",
    "hybrid-full-recompute": "selective",
    "repeated-prediction-full-recompute": "add --recompute-method block",
    "moe-recompute-around-router": "instead moe moe_act",
    "jitter-in-recomputed-moe": "instead moe moe_act",
    "dropout-in-recomputed-attention": "instead core_attn",
    "dropout-in-recomputed-mlp": "instead mlp; instead moe",
    "cpu-offloading": "drop --cpu-offloading-num-layers",
    "activation-offloading": "drop --fine-grained-activation-offloading; drop --offload-modules",
}
"""By rule of this package: what to change. ``instead`` is about modules of selective recompute."""
_MEGATRONS = (
    (r"fsdp_dtensor` checkpointing format", "add --ckpt-format fsdp_dtensor"),
    (r"CUDA_DEVICE_MAX_CONNECTIONS", "set CUDA_DEVICE_MAX_CONNECTIONS 8"),
    (r"NCCL_GRAPH_REGISTER=0", "set NCCL_GRAPH_REGISTER 0"),
    (r"overlap-param-gather with --overlap-grad-reduce", "add --overlap-grad-reduce"),
    (r"check_weight_hash", "drop --check-weight-hash-across-dp-replicas-interval"),
    (r"moe_single_grouped", "drop --moe-single-grouped-weight; drop --moe-single-grouped-bias"),
    (r"cross entropy loss fusion is disabled", "add --cross-entropy-fusion-impl native"),
    (r"Delayed scaling does not support", "instead layernorm; instead moe_act"),
    (r"pipeline|interleaved schedule|virtual", _NO_PIPELINE),
    (r"overlap_moe_expert_parallel|delay_wgrad", _NO_OVERLAP),
    (r"Meta device initialization", "drop --init-model-with-meta-device"),
    (r"apply_rope_fusion", "add --no-rope-fusion"),
    (r"recompute method is not yet supported", "drop --recompute-method"),
)
"""By Megatron's own error: what to change."""
_DEPRECATED = ("--enable-cuda-graph", "--external-cuda-graph", "--cuda-graph-scope")


@dataclass(frozen=True)
class Choice:
    """A way to capture: scopes, and what experts need."""

    scopes: tuple[str, ...]
    why: str = ""
    flags: tuple[tuple[str, str], ...] = ()
    layers: tuple[str, ...] = ()

    def __str__(self) -> str:
        words = [_MODULES, *self.scopes, *(word for flag in self.flags for word in flag)]
        return " ".join([*words, *((_LAYERS, *self.layers) if self.layers else ())])


@dataclass(frozen=True)
class Tried:
    """A choice, and what came of it; ``memory`` is None if it was refused."""

    choice: Choice | None
    line: LaunchLine
    settings: Settings
    reasons: dict[str, str]
    layers: tuple[Layer, ...] = ()
    memory: Memory | None = None

    def fits(self, room: int) -> bool:
        """Whether the run has room."""
        return self.memory is not None and self.memory.total <= room


@dataclass(frozen=True)
class Edited:
    """A line that was changed, and how it compares."""

    given: LaunchLine
    gpus: Gpus
    best: Tried
    tried: tuple[Tried, ...]
    eager: Memory | None
    room: int

    @property
    def accepted(self) -> bool:
        """Whether the changed line starts and fits."""
        return self.best.fits(self.room)


def edit(given: LaunchLine, reader: Reader, room: int, gpus: int | None = None) -> Edited:
    """Change ``given`` so that it trains with graphs in ``room`` bytes, on ``gpus`` if given.

    Raises LaunchLineError if the flags cannot be read.
    """
    args, _ = reader.parse(given)
    args.pipeline_model_parallel_size = 1
    known = Gpus(gpus) if gpus else gpus_of(given, fewest_gpus(args))
    editor = _Editor(reader, known.count, given)
    settings = editor.start()
    tried: list[Tried] = []
    for choice in _choices(settings, known, given):
        tried.append(editor.attempt(choice))
        if tried[0].fits(room):
            break
    if not tried[0].fits(room):
        clean = [found for found in tried if found.memory is not None]
        large = [found for found in clean if not found.fits(room)]
        tried += filter(None, [_fewer_layers(editor, found, room) for found in large])
    fitting = [found for found in tried if found.fits(room)]
    clean = [found for found in tried if found.memory is not None]
    best = max(fitting, key=_captured_parts) if fitting else (clean or tried)[0]
    if best.choice is not None and best is not tried[0]:
        best = _told(best, tried[0], room)
    return Edited(given, known, best, tuple(tried), _eager(best), room)


def _captured_parts(found: Tried) -> int:
    return sum(len(layer.captured) for layer in found.layers)


def _told(best: Tried, first: Tried, room: int) -> Tried:
    """``best`` with the reason why it is not the first choice."""
    if first.memory is not None:
        reason = f"{_gib(first.memory.total)} of {_gib(room)} would be needed otherwise"
    else:
        problem = unfixed(first)[0]
        reason = f"{problem.found}: {problem.reason}"
    return replace(best, reasons={**best.reasons, _MODULES: reason, _LAYERS: reason})


def _gib(size: int) -> str:
    return f"{size / 2**30:,.1f} GiB"


def _eager(best: Tried) -> Memory | None:
    """The memory of the same run without graphs."""
    if best.memory is None:
        return None
    run = replace(best.settings.run, cuda_graph_impl="none")
    return memory_of(replace(best.settings, run=run))


def _fewer_layers(editor: _Editor, found: Tried, room: int) -> Tried | None:
    """The same choice on as many of the first layers as fit; None if not even one does."""
    count = sum(not layer.name.startswith("MTP") for layer in found.layers)
    choice = found.choice or Choice(found.settings.run.cuda_graph_modules)
    few, many, best = 0, count, None
    while many - few > 1:
        middle = (few + many) // 2
        layers = tuple(f"{scope}:0-{middle - 1}" for scope in choice.scopes or ("layer",))
        tried = editor.attempt(replace(choice, layers=layers))
        if tried.fits(room):
            few, best = middle, tried
        else:
            many = middle
    return best


@dataclass
class _Editor:
    """Applies fixes to a line; ``reasons`` has why, by flag."""

    reader: Reader
    gpus: int
    line: LaunchLine
    reasons: dict[str, str] = field(default_factory=dict)

    def start(self) -> Settings:
        """Add what every run with graphs needs; returns the settings before."""
        settings = self.reader.settings(self.line, self.gpus, megatron=False)
        run, args = settings.run, settings.args
        if not self.line.starts_graphs:
            self.line = self.line.with_launcher()
            self.reasons["-m megatron_cg"] = "Megatron alone captures no layers under Megatron-FSDP"
        if not run.use_megatron_fsdp:
            why = "graphs of this package are captured under Megatron-FSDP"
            self._do("add --use-megatron-fsdp", why)
            self._do("add --data-parallel-sharding-strategy optim_grads_params", why)
            self._do("drop --use-torch-fsdp2", why)
        if run.cuda_graph_impl != "transformer_engine" or not run.wants_graphs:
            for name in _DEPRECATED[:2]:
                self._do(f"drop {name}", "--cuda-graph-impl replaces it")
            self._do("add --cuda-graph-impl transformer_engine", "layerwise graphs")
        if args.gradient_accumulation_fusion:
            why = "Megatron's output layer needs Apex for the fusion, and no verified run had it"
            self._do("add --no-gradient-accumulation-fusion", why)
        if not args.te_rng_tracker:
            why = "graphs turn it on; an eager run that you compare with needs it too"
            self._do("add --te-rng-tracker", why)
        masks = args.create_attention_mask_in_dataloader and not args.reset_attention_mask
        if masks and not (run.sft or run.dataloader_inter_document_masking):
            layers = sum("attn" in has for has in available_scopes(run) or ())
            size = (args.micro_batch_size or 1) * (args.seq_length or 0) ** 2 * layers
            why = (
                "causal attention needs no mask; with one, each replay copies it and graphs hold "
                f"{_gib(size)} of masks"
            )
            self._do("add --no-create-attention-mask-in-dataloader", why)
        return settings

    def attempt(self, choice: Choice | None) -> Tried:
        """The line with a choice (None: the scopes it has) and with all fixes that it needs."""
        trial = _Editor(self.reader, self.gpus, self.line, dict(self.reasons))
        if choice is not None:
            trial.apply(choice)
        settings = trial.fixed()
        tried = Tried(choice, trial.line, settings, trial.reasons)
        if settings.broken or settings.megatron:
            return tried
        layers = layers_of(settings)
        return replace(tried, layers=layers, memory=memory_of(settings, layers))

    def apply(self, choice: Choice) -> None:
        """Set the flags of a choice, and drop those that it does not have."""
        self._do("drop --cuda-graph-scope", "--cuda-graph-modules replaces it")
        if choice.scopes:
            self._do(" ".join(["add", _MODULES, *choice.scopes]), choice.why)
        flags = dict(choice.flags)
        for name in (_GEMM, _EXCHANGE, _ROWS):
            if name in flags:
                self._do(f"add {name} {flags[name]}", _WHY[name])
            else:
                self._do(f"drop {name}", "the captured scopes hold no dropless experts")
        if choice.layers:
            self._do(" ".join(["add", _LAYERS, *choice.layers]), "as many layers as fit")
        else:
            self._do(f"drop {_LAYERS}", "the scopes are others than before")

    def fixed(self) -> Settings:
        """Fix what ``_FIXES`` can, until nothing changes; the settings of what came of it."""
        seen = set()
        while True:
            settings = self.reader.settings(self.line, self.gpus)
            before = str(self.line)
            if before in seen:
                return settings
            seen.add(before)
            for violation in settings.broken:
                for fix in _FIXES.get(violation.rule, "").split("; "):
                    self._do(fix, f"{violation.found}: {violation.reason}")
            if str(self.line) == before and settings.megatron:
                for pattern, fixes in _MEGATRONS:
                    if re.search(pattern, settings.megatron):
                        for fix in fixes.split("; "):
                            self._do(fix, f"Megatron: {settings.megatron}")
                        break
            if str(self.line) == before:
                return settings

    def _do(self, fix: str, reason: str) -> None:
        verb, *words = fix.split() or [""]
        verbs: dict[str, Callable[..., LaunchLine]] = {
            "add": self.line.with_flag,
            "drop": self.line.without,
            "set": self.line.with_variable,
            "instead": self._recompute_instead,
            "selective": self._selective,
        }
        if not verb:
            return
        before = self.line
        self.line = verbs[verb](*words)
        if self.line != before:
            for name in _differing(before, self.line):
                self.reasons[name] = reason
            if verb == "set":
                self.reasons[words[0]] = reason

    def _recompute_instead(self, module: str, other: str = "") -> LaunchLine:
        """The line that recomputes ``other`` instead of ``module``, or nothing."""
        line = self.line.without("--moe-layer-recompute")
        given = line.values(_RECOMPUTE) or ("core_attn",)
        if module not in given:
            return line
        kept = [name for name in given if name != module]
        if other and module in given and self.line.values("--moe-grouped-gemm") is not None:
            kept += [other] * (other not in kept)
        if kept:
            return line.with_flag(_RECOMPUTE, *kept)
        for name in (_RECOMPUTE, "--recompute-granularity", "--recompute-activations"):
            line = line.without(name)
        return line

    def _selective(self) -> LaunchLine:
        """The line with selective recompute of what graphs can recompute."""
        line = self.line.without("--recompute-method").without("--recompute-num-layers")
        modules = ["layernorm"]
        if line.values("--moe-grouped-gemm") is not None:
            modules.append("moe_act")
        if line.values("--multi-latent-attention") is not None:
            modules.append("mla_up_proj")
        line = line.with_flag("--recompute-granularity", "selective")
        return line.with_flag(_RECOMPUTE, *modules)


def _differing(old: LaunchLine, new: LaunchLine) -> list[str]:
    names = {flag.name for flag in (*old.flags, *new.flags)}
    return [name for name in names if old.values(name) != new.values(name)]


_WHY = {
    _GEMM: "counts of tokens stay on the GPU, so graphs can hold dropless experts",
    _EXCHANGE: "expert-parallel ranks of one host exchange tokens without padding",
    _ROWS: "room for this many times the average rows, so that it fits; a step with more is "
    "repeated eagerly, as happens often while a router learns to balance",
}


def _choices(settings: Settings, gpus: Gpus, given: LaunchLine) -> Iterator[Choice | None]:
    """Ways to capture, the best first; None stands for the scopes that the line has."""
    run, args = settings.run, settings.args
    whole = run.cuda_graph_impl == "transformer_engine" and run.wants_graphs
    if whole or given.values(_MODULES) or given.values("--cuda-graph-scope"):
        yield None
    available = available_scopes(run) or (frozenset({"attn", "moe" if run.is_moe else "mlp"}),)
    here = frozenset().union(*available)
    base = tuple(scope for scope in _ORDER if scope in here)
    why = "all of each layer that graphs can hold"
    if "moe" in here:
        against = _against_whole(run, args, gpus)
        if run.drops_and_pads:
            yield Choice((*base, "moe"), why)
        elif not against:
            many = "with many small experts, whole MoE layers in graphs save most launches"
            ranks = args.expert_model_parallel_size
            flags = ((_GEMM, "torch"), (_EXCHANGE, "peer"))[: 1 + (ranks > 1)]
            yield Choice((*base, "moe"), many, flags)
            for rows in ("2", "1.5", "1.25") if ranks > 1 else ():
                yield Choice((*base, "moe"), many, (*flags, (_ROWS, rows)))
        yield Choice((*base, "moe_router"), f"experts stay eager: {against or 'they do not fit'}")
    if base:
        yield Choice(base, why)
    for scope in base if len(base) > 1 else ():
        yield Choice((scope,), why)


def _against_whole(run: Any, args: Any, gpus: Gpus) -> str:
    """Why graphs cannot hold whole MoE layers, or are not likely to pay; empty if they are."""
    ranks = args.expert_model_parallel_size
    tokens = (args.micro_batch_size or 1) * (args.seq_length or 0) * ranks * args.moe_router_topk
    wide = 2 * (args.moe_ffn_hidden_size or args.ffn_hidden_size or 0)
    reasons = {
        "torch's grouped GEMM needs --bf16": not run.bf16,
        "torch's grouped GEMM has no FP8 and FP4": run.fp8 or run.fp4,
        "torch's grouped GEMM adds no bias": run.add_bias_linear,
        "they are not grouped (--moe-grouped-gemm)": not run.moe_grouped_gemm,
        f"the dispatcher is {run.moe_token_dispatcher_type}, not alltoall": (
            run.moe_token_dispatcher_type != "alltoall"
        ),
        f"{ranks} expert-parallel ranks are on several hosts": ranks > 1 and gpus.per_node % ranks,
        "they are few and large, and whole MoE layers do not pay": (
            2.0 * tokens / args.num_experts * args.hidden_size * wide > _LARGE_GEMM
        ),
    }
    return next((reason for reason, holds in reasons.items() if holds), "")


def unfixed(tried: Tried) -> tuple[Violation, ...]:
    """What keeps a line from starting that no fix mends."""
    broken = tried.settings.broken
    if tried.settings.megatron:
        broken += (Violation("megatron", "Megatron stops", tried.settings.megatron, ""),)
    return broken
