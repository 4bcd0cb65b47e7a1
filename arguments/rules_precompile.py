"""Which layers can run code that was compiled elsewhere, ``--cg-precompile-dir``."""

from __future__ import annotations

from collections.abc import Iterator

from megatron_cg.arguments.rule import Refusal, Rule
from megatron_cg.arguments.schema import Environment, GraphArguments, RunArguments
from megatron_cg.errors import Violation

_DROP = "or drop --cg-precompile-dir"

_OF_RUNS: tuple[Refusal, ...] = (
    Refusal(
        "precompile-local",
        lambda run: run.transformer_impl != "local",
        "--transformer-impl {run.transformer_impl} with --cg-precompile-dir",
        "modules of Transformer Engine forbid that their code is traced",
        f"type --transformer-impl local, {_DROP}",
    ),
    Refusal(
        "precompile-whole-layers",
        lambda run: not run.is_whole_layer,
        "--cuda-graph-modules with --cg-precompile-dir",
        "an artifact holds the code of a whole layer",
        f"drop --cuda-graph-modules, {_DROP}",
    ),
    Refusal(
        "precompile-dense",
        lambda run: run.is_moe,
        "--num-experts {run.num_experts} with --cg-precompile-dir",
        "Megatron's local experts read their numbers of tokens on the host, and its losses of "
        "routers are variables of a module",
        "compile the MoE block by megatron_cg.precompile in your own loop, or drop "
        "--cg-precompile-dir",
    ),
    Refusal(
        "precompile-one-kind",
        lambda run: bool(run.custom_layers or run.hybrid_layer_pattern or run.mtp_num_layers),
        "layers of several kinds (a spec, a pattern or multi-token prediction) with "
        "--cg-precompile-dir",
        "one artifact holds the code of all layers",
        "drop --cg-precompile-dir",
    ),
    Refusal(
        "precompile-dropout",
        lambda run: bool(run.attention_dropout or run.hidden_dropout),
        "--attention-dropout {run.attention_dropout} --hidden-dropout {run.hidden_dropout} with "
        "--cg-precompile-dir",
        "Megatron's random states are not part of compiled code",
        f"type --attention-dropout 0 --hidden-dropout 0, {_DROP}",
    ),
    Refusal(
        "precompile-recompute",
        lambda run: run.recompute_granularity == "selective",
        "--recompute-granularity selective with --cg-precompile-dir",
        "Megatron's checkpoints inside of a layer keep random states, which are not part of "
        "compiled code",
        f"type --recompute-granularity full, {_DROP}",
    ),
    Refusal(
        "precompile-meta-weights",
        lambda run: run.init_model_with_meta_device,
        "--init-model-with-meta-device with --cg-precompile-dir",
        "a step of loaded code is compared with eager before the model is wrapped, and weights "
        "have no values yet",
        f"drop --init-model-with-meta-device, {_DROP}",
    ),
)


def compiled_layers(
    run: RunArguments, graph: GraphArguments, environment: Environment
) -> Iterator[Violation]:
    """What the layers and the run must be."""
    if graph.cg_precompile_dir is None:
        return
    for rule in _OF_RUNS:
        yield from rule(run, graph, environment)
    if run.fused_operations:
        yield Violation(
            "precompile-fusions",
            f"--cg-precompile-dir without {' '.join(run.fused_operations)}",
            "torch compiles these operations to kernels of their own, which round elsewhere than "
            "the separate operations of an artifact",
            f"add {' '.join(run.fused_operations)} to this run and to those that it is compared "
            f"with, {_DROP}",
        )


RULES: tuple[Rule, ...] = (compiled_layers,)
