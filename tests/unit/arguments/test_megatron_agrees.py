"""Our rules and tables against the real classes of megatron-core, so that they cannot drift."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import pytest
from megatron.core.models.hybrid.hybrid_layer_allocation import Symbols
from megatron.core.transformer.enums import CudaGraphModule
from megatron.core.transformer.transformer_config import TransformerConfig
from packaging.version import Version

from megatron_cg.arguments import GraphArguments, RunArguments, rules_scopes, violations
from megatron_cg.arguments.layout import available_scopes
from megatron_cg.arguments.schema import SCOPES
from tests.unit.arguments.good_configuration import GOOD_ENVIRONMENT, GOOD_RUN
from tests.unit.arguments.rule_cases import MEGATRON_AGREES, Case

_SAME_NAME = (
    "cuda_graph_impl",
    "moe_expert_capacity_factor",
    "moe_pad_expert_input_to_capacity",
    "moe_token_dispatcher_type",
    "recompute_granularity",
    "attention_dropout",
    "hidden_dropout",
    "bf16",
    "cpu_offloading",
)


@pytest.fixture(autouse=True)
def transformer_engine_version(monkeypatch: pytest.MonkeyPatch) -> None:
    """Megatron's config refuses FP8 without TE; only its rules are asked for here."""
    monkeypatch.setattr("megatron.core.utils._te_version", Version("2.20.2"))


def config_of(run: RunArguments) -> TransformerConfig:
    """Megatron's config of the model that ``run`` describes; raises what Megatron raises."""
    settings: dict[str, Any] = {name: getattr(run, name) for name in _SAME_NAME}
    frequency = run.moe_layer_freq
    if run.recompute_granularity == "full":
        settings.update(recompute_method="uniform", recompute_num_layers=1)
    if run.moe_router_padding_for_fp8:
        settings.update(fp8="hybrid", moe_router_padding_for_fp8=True)
    return TransformerConfig(
        num_layers=run.num_layers,
        hidden_size=64,
        num_attention_heads=4,
        num_moe_experts=run.num_experts,
        moe_layer_freq=frequency if isinstance(frequency, int) else list(frequency),
        cuda_graph_modules=list(run.cuda_graph_modules),
        recompute_modules=list(run.recompute_modules),
        cpu_offloading_num_layers=1 if run.cpu_offloading else 0,
        add_bias_linear=False,
        pipeline_dtype=None,
        **settings,
    )


def megatron_refuses(run: RunArguments) -> bool:
    try:
        config_of(run)
    except (AssertionError, ValueError):
        return True
    return False


def test_megatron_takes_the_good_run() -> None:
    assert not megatron_refuses(GOOD_RUN)


_GRAPH_FREE: dict[str, Any] = {"cuda_graph_impl": "none", "cuda_graph_modules": ()}


@pytest.mark.parametrize("case", MEGATRON_AGREES, ids=str)
def test_megatron_refuses_what_we_refuse_and_only_because_of_graphs(case: Case) -> None:
    run = dataclasses.replace(GOOD_RUN, **case.change)
    assert megatron_refuses(run)
    assert not megatron_refuses(dataclasses.replace(run, **_GRAPH_FREE))


_DROP_AND_PAD: dict[str, Any] = {
    "moe_expert_capacity_factor": 1.0,
    "moe_pad_expert_input_to_capacity": True,
}
_MODELS: dict[str, dict[str, Any]] = {
    "dense": {"num_experts": None},
    "one expert": {"num_experts": 1},
    "moe": {},
    "moe by list": {"moe_layer_freq": (1, 1, 1, 1)},
    "mixed": {"moe_layer_freq": 2},
    "mixed by list": {"moe_layer_freq": (0, 1, 0, 1)},
    "drop and pad": _DROP_AND_PAD,
    "capacity": {"moe_expert_capacity_factor": 1.0},
    "capacity, allgather": {
        "moe_expert_capacity_factor": 1.0,
        "moe_token_dispatcher_type": "allgather",
    },
    "padding for fp8": {"moe_router_padding_for_fp8": True},
}
_SUBSETS = [s for n in range(1, len(SCOPES) + 1) for s in itertools.combinations(SCOPES, n)]
_STRICTER = {"scope-selects-nothing"}
"""Megatron leaves a scope that selects nothing alone, but for mlp in a model of experts only."""


@pytest.mark.parametrize("model", _MODELS)
def test_every_set_of_scopes_gets_megatrons_answer(model: str) -> None:
    for scopes in _SUBSETS:
        run = dataclasses.replace(GOOD_RUN, cuda_graph_modules=scopes, **_MODELS[model])
        ours = {
            violation.rule
            for rule in rules_scopes.SCOPE_RULES
            for violation in rule(run, GraphArguments(), GOOD_ENVIRONMENT)
        }
        if megatron_refuses(run):
            assert ours, f"Megatron refuses {scopes}, we do not"
        else:
            assert ours <= _STRICTER, f"we refuse {scopes} ({ours}), Megatron does not"


@pytest.mark.parametrize("granularity", [None, "selective"])
@pytest.mark.parametrize("dropout", [0.0, 0.1])
@pytest.mark.parametrize("module", ["core_attn", "mlp", "moe", "layernorm", "shared_experts"])
def test_every_recomputed_module_gets_megatrons_answer(
    granularity: str | None, dropout: float, module: str
) -> None:
    for scopes in [(), ("attn",), ("mlp",), ("moe",), ("moe_router",), ("attn", "moe_router")]:
        run = dataclasses.replace(
            GOOD_RUN,
            cuda_graph_modules=scopes,
            recompute_granularity=granularity,
            recompute_modules=(module,),
            attention_dropout=dropout,
            hidden_dropout=dropout,
            moe_layer_freq=2,
            **_DROP_AND_PAD,
        )
        ours = violations(run, GraphArguments(), GOOD_ENVIRONMENT)
        assert bool(ours) == megatron_refuses(run), (scopes, ours)


def test_our_scope_names_are_megatrons() -> None:
    assert set(SCOPES) == {module.name for module in CudaGraphModule}


@pytest.mark.parametrize("symbol", sorted(Symbols.VALID_LAYERS))
def test_every_letter_of_a_hybrid_pattern_is_known(symbol: str) -> None:
    run = dataclasses.replace(GOOD_RUN, hybrid_layer_pattern=f"{symbol}|{symbol}/MM")
    layers = available_scopes(run)
    assert layers is not None
    assert len(layers) == 2
    assert layers[0] > {"layer"}


@pytest.mark.parametrize("frequency", [1, 2, 3, (0, 1, 1, 1), (1, 0, 1, 0)], ids=str)
def test_moe_layers_are_where_megatron_puts_them(frequency: int | tuple[int, ...]) -> None:
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_layer_specs
    from megatron.core.transformer.moe.moe_layer import MoELayer

    run = dataclasses.replace(GOOD_RUN, moe_layer_freq=frequency)
    specs = get_gpt_decoder_layer_specs(config_of(run), use_transformer_engine=False)
    real = [issubclass(_module_of(spec.submodules.mlp), MoELayer) for spec in specs]
    ours = available_scopes(run)
    assert ours is not None
    assert ["moe_router" in scopes for scopes in ours] == real
    assert ["mlp" in scopes for scopes in ours] == [not is_moe for is_moe in real]


def _module_of(builder: Any) -> type:
    """The class that a ``functools.partial`` of it, or of a classmethod of it, builds."""
    found = getattr(builder.func, "__self__", builder.func)
    assert isinstance(found, type)
    return found


@pytest.mark.parametrize(
    "change",
    [
        {"num_layers": None},
        {"custom_layers": True},
        {"moe_layer_freq": (1, 0)},
        {"moe_layer_freq": 0},
        {"hybrid_layer_pattern": "M?"},
    ],
    ids=str,
)
def test_a_layout_that_cannot_be_known(change: dict[str, Any]) -> None:
    assert available_scopes(dataclasses.replace(GOOD_RUN, **change)) is None
