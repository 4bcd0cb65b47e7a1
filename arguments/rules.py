"""The rules of a run, and the check of all of them at once. Pure: reads nothing but the arguments.

Those about an extension's settings are in its ``rules.py``. Scopes and selectively recomputed
modules that contradict each other are refused by Megatron itself:
``TransformerConfig.__post_init__`` of megatron-core 0.19.2.
"""

import dataclasses
from collections.abc import Iterator

from packaging.version import InvalidVersion, Version

from megatron_cg import extensions
from megatron_cg.arguments import schema
from megatron_cg.arguments.rule import Configuration, Facts, Rule
from megatron_cg.errors import Violation
from megatron_cg.upstream.te import INSTALL

ANY_RUN = ("cg_record", "cg_grouped_gemm")
"""Fields of GraphArguments that are useful without graphs."""


def _flags_without_effect(given: Configuration) -> list[Facts]:
    if given.run.wants_graphs:
        return []
    flags = []
    for field in dataclasses.fields(given.graph):
        value = getattr(given.graph, field.name)
        if value != field.default and field.name not in ANY_RUN:
            words = " ".join(value) if isinstance(value, tuple) else str(value)
            flags.append(f"{schema.flag_of(field.name)} {words}")
    fsdp = "with" if given.run.use_megatron_fsdp else "without"
    return [{"flags": " ".join(flags), "fsdp": fsdp}] if flags else []


def _without_their_extension(given: Configuration) -> list[Facts]:
    settings = (vars(given.run) if given.run.wants_graphs else {}) | vars(given.graph)
    return [
        {"folder": folder, "setting": schema.flag_of(field), "value": value}
        for folder in given.environment.without
        for field, values in extensions.EXTENSIONS[folder].items()
        if (value := settings.get(field)) is not None and (not values or value in values)
    ]


extension_missing = Rule(
    "extension-missing",
    _without_their_extension,
    "{flag:{setting} {value}}",
    "it needs the extension megatron_cg/{folder}, which is not installed",
    "install the whole package again with pip, or {drop:{setting}}",
    without_graphs=True,
)

_OF_SETTINGS = (
    extension_missing,
    Rule(
        "flags-without-graphs",
        _flags_without_effect,
        "{flag:{flags}} with {flag:--cuda-graph-impl {run.cuda_graph_impl}} {fsdp} "
        "{flag:--use-megatron-fsdp}",
        "the flag only affects layerwise graphs under Megatron-FSDP, which this run does not "
        "request, so it would have no effect",
        "{add:--use-megatron-fsdp --cuda-graph-impl transformer_engine}, or drop the flag",
        without_graphs=True,
    ),
)


def _fp8_weights(given: Configuration) -> bool:
    return given.run.fp8 is not None and given.run.fp8_param_gather


def _under_v2(given: Configuration) -> bool:
    return given.run.megatron_fsdp_version == 2


_OF_FSDP = (
    Rule(
        "implementation",
        lambda c: c.run.cuda_graph_impl == "local",
        "{flag:--cuda-graph-impl local} with {flag:--use-megatron-fsdp}",
        "only graphs made by Transformer Engine take the hooks of FSDP units into capture",
        "{type:--cuda-graph-impl transformer_engine}",
    ),
    Rule(
        "double-buffer",
        lambda c: not c.run.fsdp_double_buffer and not _under_v2(c),
        "{flag:--use-megatron-fsdp} without {flag:--fsdp-double-buffer}",
        "unsharded parameters are then allocated anew in each iteration, so they move, and a "
        "replayed graph reads memory that was freed",
        "{add:--fsdp-double-buffer} ({flag:--use-nccl-ub} and "
        "{flag:--megatron-fsdp-max-pool-double-buffer} imply it)",
    ),
    Rule(
        "persistent-fallback",
        lambda c: not c.run.fsdp_db_use_persist_buf_on_alloc_fail and not _under_v2(c),
        "{flag:--use-megatron-fsdp} without {flag:--fsdp-db-use-persist-buf-on-alloc-fail}",
        "an FSDP unit that does not fit the double buffers then falls back to a buffer that moves, "
        "and a replayed graph reads memory that was freed",
        "{add:--fsdp-db-use-persist-buf-on-alloc-fail}",
    ),
    Rule(
        "v2-persistent-fallback",
        lambda c: c.run.fsdp_db_use_persist_buf_on_alloc_fail and _under_v2(c),
        "{flag:--fsdp-db-use-persist-buf-on-alloc-fail} with {flag:--megatron-fsdp-version 2}",
        "version 2 has no such buffers and refuses the flag, when the model is built already",
        "{drop:--fsdp-db-use-persist-buf-on-alloc-fail --fsdp-double-buffer}",
    ),
    Rule(
        "v2-symmetric-memory",
        lambda c: c.run.nccl_ub and _under_v2(c),
        "{flag:--use-nccl-ub} with {flag:--megatron-fsdp-version 2}",
        "units are then gathered into symmetric memory, which has not been tried with graphs",
        "{drop:--use-nccl-ub}",
    ),
    Rule(
        "gradient-accumulation-fusion",
        lambda c: c.run.gradient_accumulation_fusion,
        "gradient accumulation fusion, which is on by default",
        "a layer then writes its weights' gradients into Megatron-FSDP's buffers and says so from "
        "Python, which a replay does not run; a graph has to hand its gradients over",
        "{add:--no-gradient-accumulation-fusion}",
    ),
    Rule(
        "expert-parallel-overlap",
        lambda c: c.run.overlap_moe_expert_parallel_comm,
        "{flag:--overlap-moe-expert-parallel-comm}",
        "Megatron-FSDP does the 1F1B overlap with expert parallel neither with double buffers nor "
        "with layerwise graphs",
        "{drop:--overlap-moe-expert-parallel-comm}, or {type:--cuda-graph-impl none}",
    ),
    Rule(
        "optimizer-graph",
        lambda c: c.run.optimizer_cuda_graph,
        "{flag:--optimizer-cuda-graph}",
        "Megatron-FSDP begins to gather the first weights at the end of the optimizer's step. "
        "Inside of a graph no forward pass could wait for that. A graph of the step saves nothing "
        "beside the fast path",
        "{drop:--optimizer-cuda-graph}",
    ),
    Rule(
        "optimizer-offload",
        lambda c: c.run.optimizer_cpu_offload,
        "{flag:--optimizer-cpu-offload} with {flag:--use-megatron-fsdp}",
        "the optimizer on the CPU (megatron-core 0.19.2) pins a copy of each parameter, and torch "
        "cannot pin the sharded ones of Megatron-FSDP (DTensor), so eager runs fail too",
        "{drop:--optimizer-cpu-offload}: Megatron-FSDP shards the optimizer's state over ranks",
    ),
    Rule(
        "pipeline-parallel",
        lambda c: c.run.pipeline_model_parallel_size > 1,
        "{flag:--pipeline-model-parallel-size {run.pipeline_model_parallel_size}}",
        "in megatron-core 0.19.2 pipeline stages under Megatron-FSDP fail with an einops error "
        "before any graph is captured",
        "{type:--pipeline-model-parallel-size 1}, and shard over data or expert parallel ranks",
    ),
    Rule(
        "fp16",
        lambda c: c.run.fp16,
        "{flag:--fp16} with {flag:--use-megatron-fsdp}",
        "before it unscales, Megatron's optimizer (megatron-core 0.19.2) reads the gradient of "
        "every parameter, and under Megatron-FSDP some have none, so eager runs fail too",
        "{drop:--fp16}, and {type:--bf16} or train in fp32",
    ),
    Rule(
        "fp8-primary-weights",
        lambda c: _fp8_weights(c) and not c.run.keep_fp8_transpose_cache,
        "{flag:--fp8-param-gather} without {flag:--keep-fp8-transpose-cache}",
        "Megatron-FSDP then throws the weights' transposes away after each use and makes new ones "
        "elsewhere, and a replayed backward reads the old places: the gradient norm is NaN",
        "{add:--keep-fp8-transpose-cache}, or {drop:--fp8-param-gather} and keep "
        "{flag:--fp8-format}",
    ),
    Rule(
        "fp8-primary-weights-recipe",
        lambda c: _fp8_weights(c) and c.run.fp8_recipe not in ("delayed", "tensorwise"),
        "{flag:--fp8-param-gather} with {flag:--fp8-recipe {run.fp8_recipe}}",
        "not solved yet: with blockwise weights Megatron-FSDP asks for more buffers than "
        "{flag:--fsdp-double-buffer} has ('No buffer found for bucket_id'), and other recipes were "
        "never seen to work",
        "{type:--fp8-recipe delayed} or {flag:--fp8-recipe tensorwise}, or "
        "{drop:--fp8-param-gather}",
    ),
    Rule(
        "native-backend-fp8",
        lambda c: c.environment.backend == schema.NATIVE and c.run.has_low_precision,
        "FP8 or FP4 with {flag:--cg-backend native}",
        "graphs of the native backend do not update the scales of quantized tensors",
        "{drop:--fp8-format --fp4-format}, or {type:--cg-backend te}",
    ),
)

_PACKS = (
    "packed sequences ({flag:--sft}, {flag:--rl-use-sequence-packing} or "
    "{flag:--dataloader-inter-document-masking})"
)
_BEHIND = "leave attn out of {flag:--cuda-graph-modules}: name scopes behind attention"


def _captures_packs(given: Configuration) -> bool:
    return given.run.packs_sequences and given.run.captures("attn")


def _layer_selection(given: Configuration) -> list[Facts]:
    """``--cg-layers`` must be well formed and match the run's scopes and layers."""
    selection, broken = given.selection
    unfit = selection.violations(given.run.cuda_graph_modules, given.run.num_layers)
    return [vars(violation) for violation in (*broken, *unfit)]


def _captures_router(given: Configuration) -> bool:
    run = given.run
    return run.is_moe and (run.captures("moe") or run.captures("moe_router"))


PACKED_ATTENTION = (
    Rule(
        "packed-rope",
        lambda c: _captures_packs(c) and c.run.rotates_positions and not c.run.apply_rope_fusion,
        f"{_PACKS} with {{flag:--no-rope-fusion}} and captured attention",
        "Megatron then rotates the samples of a pack one after another, and reads where they begin "
        "on the CPU, which a capture does not allow",
        f"{{drop:--no-rope-fusion}}, or {_BEHIND}",
    ),
    Rule(
        "packed-unmeasured",
        lambda c: _captures_packs(c) and c.run.unmeasured_with_packs != "",
        f"{_PACKS} with {{flag:{{run.unmeasured_with_packs}}}} and captured attention",
        "whether attention gives the same bits in a graph, which takes the longest sample to be as "
        "long as the pack, was measured without",
        f"leave that out ({{type:--attention-dropout 0}} for Megatron's 0.1), or {_BEHIND}",
    ),
    Rule(
        "packed-attention-backend",
        lambda c: _captures_packs(c) and c.run.attention_backend not in ("auto", "fused"),
        f"{_PACKS} with {{flag:--attention-backend {{run.attention_backend}}}} and captured "
        "attention",
        "a graph takes the longest sample to be as long as the pack; cuDNN gives the same bits for "
        "both, Transformer Engine's unfused attention does not, and flash-attn was not tried",
        f"{{type:--attention-backend fused}}, or {_BEHIND}",
    ),
    Rule(
        "packed-context-parallel",
        lambda c: _captures_packs(c) and c.run.context_parallel_size > 1,
        f"{_PACKS} with {{flag:--context-parallel-size {{run.context_parallel_size}}}} and "
        "captured attention",
        "ranks then divide each sample, at places that depend on its length, and that has not been "
        "tried in a graph",
        f"{{type:--context-parallel-size 1}}, or {_BEHIND}",
    ),
)
"""Of packed sequences with attention in graphs."""

LARGEST_LOGITS = Rule(
    "largest-attention-logits",
    lambda c: c.run.captures("attn") and (c.run.qk_clip or c.run.log_max_attention_logit),
    "{flag:--qk-clip} or {flag:--log-max-attention-logit} with captured attention",
    "Python code of the attention hands the largest logits of a step over to the optimizer "
    "and the log, and a replay does not run it: nothing would be clipped or logged",
    "{drop:--qk-clip --log-max-attention-logit}, or {type:--cuda-graph-modules} with scopes "
    "other than attn",
)

_OF_SCOPES = (
    Rule(
        "preprocess-shared-expert",
        lambda c: "moe_preprocess" in c.run.cuda_graph_modules and c.run.moe_shared_expert_overlap,
        "{flag:--cuda-graph-modules moe_preprocess} with {flag:--moe-shared-expert-overlap}",
        "the graph would end between two stages of the shared expert, which Megatron (0.19.2) "
        "leaves in a state that its next pass does not accept",
        "drop moe_preprocess from {flag:--cuda-graph-modules}, or "
        "{drop:--moe-shared-expert-overlap}",
    ),
    Rule(
        "scope-selects-nothing",
        lambda c: c.layers is not None and not any(captured for _, captured in c.layers),
        "no layer of the model has a scope that {flag:--cuda-graph-modules} and {flag:--cg-layers} "
        "select",
        "nothing would be captured",
        "{type:--cuda-graph-modules attn mlp} (dense) or "
        "{flag:--cuda-graph-modules attn moe_router} (MoE), and {drop:--cg-layers}",
    ),
    Rule("cg-layers", _layer_selection, "{found}", "{reason}", "{remedy}"),
    Rule(
        "recompute-of-attention",
        lambda c: (
            c.run.captures("attn")
            and c.run.recomputes("core_attn")
            and c.run.sequence_parallel
            and c.run.hidden_dropout != 0.0
        ),
        "{flag:--recompute-modules core_attn} with captured attention, {flag:--sequence-parallel} "
        "and dropout",
        "attention advances the random state that dropout reads too. Where it is recomputed, an "
        "eager pass does that twice and a graph, in which Megatron recomputes nothing, once",
        "{drop:--recompute-granularity}, or core_attn alone from {flag:--recompute-modules}, which "
        "saves nothing in graphs; or {type:--hidden-dropout 0}",
    ),
    Rule(
        "recompute-of-mhc",
        lambda c: c.run.recomputes("mhc"),
        "{flag:--recompute-modules mhc}",
        "layers then share checkpoints, which are recomputed together behind the last of them. A "
        "replay adds none, and the pass that it is compared with adds some that nothing recomputes",
        "drop mhc from {flag:--recompute-modules}",
    ),
    Rule(
        "activation-offloading",
        lambda c: c.run.fine_grained_activation_offloading,
        "{flag:--fine-grained-activation-offloading}",
        "the backward graph of a layer reloads activations of the layer before it, so one layer "
        "that runs eagerly beside replays would make gradients wrong, without an error",
        "{drop:--fine-grained-activation-offloading}",
    ),
    Rule(
        "routing-replay",
        lambda c: c.run.moe_enable_routing_replay and _captures_router(c),
        "{flag:--moe-enable-routing-replay} with a captured MoE router",
        "Python code of the router records or repeats its choices, and a replay does not run it",
        "{drop:--moe-enable-routing-replay}, or {type:--cuda-graph-modules attn}",
    ),
    Rule(
        "sinkhorn-router",
        lambda c: "sinkhorn" in c.run.moe_router_load_balancing_type and _captures_router(c),
        "{flag:--moe-router-load-balancing-type sinkhorn} with a captured MoE router",
        "its iteration ends when a value on the GPU is small enough, so the CPU waits for it in "
        "each round, which a capture does not allow",
        "{type:--moe-router-load-balancing-type aux_loss}, or {type:--cuda-graph-modules attn}",
    ),
    LARGEST_LOGITS,
    Rule(
        "packed-mamba",
        lambda c: (
            c.run.packs_sequences
            and (
                "mamba" in c.run.cuda_graph_modules
                or any("mamba" in has and captured for has, captured in c.layers or ())
            )
        ),
        f"{_PACKS} with captured Mamba mixers",
        "which token belongs to which sample reaches them in a PackedSeqParams, and Megatron's "
        "graphs take only tensors",
        "leave mamba out of {flag:--cuda-graph-modules}, such as "
        "{type:--cuda-graph-modules attn mlp}",
    ),
    Rule(
        "packed-micro-batch",
        lambda c: c.run.packs_sequences and c.run.micro_batch_size > 1,
        f"{_PACKS} with {{flag:--micro-batch-size {{run.micro_batch_size}}}}",
        "Megatron makes one long pack of a microbatch, with other shapes than its graphs are "
        "captured with",
        "{type:--micro-batch-size 1}, with longer packs for as many tokens",
    ),
    *PACKED_ATTENTION,
)

_SEEN = {
    "megatron-core": (0, 19, 2),
    "megatron-fsdp": (0, 6, 1),
    "transformer-engine": (2, 20, 2),
    "torch": (2, 11, 0),
    "megatron-bridge": (0, 6, 2),
    "torchtitan": (0, 3, 0),
}
"""The versions that this package was written for and measured with."""


def _release(version: str) -> tuple[int, ...] | None:
    try:
        return Version(version).release
    except InvalidVersion:
        return None


def _with_expandable_segments(given: Configuration) -> list[Facts]:
    """The variable that turns them on.

    torch 2.11 also reads PYTORCH_ALLOC_CONF; Megatron's own check does not.
    """
    variables = given.environment.variables
    if given.environment.backend == schema.TAPE or variables.get("NCCL_GRAPH_REGISTER") == "0":
        return []
    return [
        {"name": name, "value": variables[name]}
        for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
        if "expandable_segments:True" in variables.get(name, "").replace(" ", "")
    ]


def _without_new_engine(given: Configuration) -> list[Facts]:
    """What is installed, if that is nothing or older than 2.19."""
    if given.environment.backend != schema.TRANSFORMER_ENGINE:
        return []
    version = given.environment.versions.get("transformer-engine")
    if version is None:
        return [{"version": "is not installed"}]
    release = _release(version)
    return [{"version": version}] if release is not None and release < (2, 19) else []


engine_too_old = Rule(
    "transformer-engine-version",
    _without_new_engine,
    "transformer-engine {version}",
    "before 2.19 make_graphed_callables has no capture_time_hooks, so the hooks of FSDP units "
    "cannot run during capture",
    f"type {INSTALL}, or capture without it: {{flag:--cg-backend native}}",
)
"""Transformer Engine is optional, so an installation may lack it."""

expandable_segments = Rule(
    "expandable-segments",
    _with_expandable_segments,
    "{name}={value} without NCCL_GRAPH_REGISTER=0",
    "NCCL registers the buffers of a captured collective, and with expandable segments their "
    "memory may be unmapped later: illegal memory access in a replay",
    "type export NCCL_GRAPH_REGISTER=0, or take expandable_segments:True out of {name}",
)

max_connections = Rule(
    "max-connections",
    lambda c: c.environment.variables.get("CUDA_DEVICE_MAX_CONNECTIONS") == "1",
    "CUDA_DEVICE_MAX_CONNECTIONS=1",
    "all streams then share one hardware queue, so Megatron-FSDP's gathers wait for the compute "
    "they should overlap with, and it refuses to start",
    "type unset CUDA_DEVICE_MAX_CONNECTIONS",
)

RULES: tuple[Rule, ...] = (
    *(*_OF_SETTINGS, *_OF_FSDP, *_OF_SCOPES, *extensions.rules()),
    *(engine_too_old, expandable_segments, max_connections),
)


def violations(
    run: schema.RunArguments, graph: schema.GraphArguments, environment: schema.Environment
) -> tuple[Violation, ...]:
    """Every broken rule, in the order of :data:`RULES`; empty when the run can be graphed.

    In a run without layerwise graphs under Megatron-FSDP only the rules ``without_graphs`` apply:
    flags of ours that would have no effect, and the grouped GEMM.
    """
    given = Configuration(run, graph, environment)
    return tuple(
        violation
        for rule in RULES
        if run.wants_graphs or rule.without_graphs
        for violation in rule(given)
    )


def notices(run: schema.RunArguments, environment: schema.Environment) -> Iterator[str]:
    if not run.wants_graphs:
        return
    yield from unseen_versions(environment)
    if not run.te_rng_tracker:
        yield (
            "--te-rng-tracker was not given and Megatron turns it on for graphs. An eager run "
            "draws the same weights and dropout masks only with --te-rng-tracker."
        )


def unseen_versions(environment: schema.Environment) -> Iterator[str]:
    """A sentence for each installed version that this package was not measured with."""
    for name, seen in _SEEN.items():
        version = environment.versions.get(name)
        if version is None:
            continue
        release = _release(version)
        if release is not None and release[: len(seen)] == seen and not Version(version).pre:
            continue
        measured = ".".join(map(str, seen))
        yield (
            f"{name} {version} was not measured with this package, {measured} was. Compare a short "
            "run with and without graphs before a long one: megatron-cg align."
        )
