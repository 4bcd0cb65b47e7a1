"""What ``use_device_counts`` changes in Megatron, and when it does not."""

import re
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from megatron.core import parallel_state
from megatron.core.transformer.moe import experts, moe_layer
from megatron.core.transformer.moe.moe_utils import get_default_pg_collection
from megatron.core.transformer.moe.token_dispatcher import MoEAlltoAllTokenDispatcher
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig

from megatron_cg.arguments.schema import GraphArguments
from megatron_cg.errors import ConfigurationError, UpstreamChangedError
from megatron_cg.experts import install
from megatron_cg.experts.grouped_gemm import GroupedGemm
from megatron_cg.experts.install import DISPATCHING, use_device_counts
from megatron_cg.experts.row_bound import RowBound
from megatron_cg.experts.slots import PeerMemory
from megatron_cg.integrations.megatron.helper import check_model
from megatron_cg.tape.training_plan import CpuModelConfig
from megatron_cg.upstream.patch import replace_function
from megatron_cg.upstream.symbols import Symbol
from tests.unit import grouped_linear
from tests.unit.trainers import new_trainer

WHOLE = CpuModelConfig(
    layers=1, experts=4, grouped=grouped_linear.grouped_experts, graph_modules=("attn", "moe")
)
DROP_AND_PAD = {"moe_expert_capacity_factor": 1.0, "moe_pad_expert_input_to_capacity": True}


def config(kind: Any = TransformerConfig, **changes: Any) -> Any:
    given = {
        "num_layers": 2,
        "hidden_size": 8,
        "num_attention_heads": 2,
        "num_moe_experts": 4,
        "moe_token_dispatcher_type": "alltoall",
        "cuda_graph_impl": "transformer_engine",
        "cuda_graph_modules": ["attn", "moe"],
        "add_bias_linear": False,
    }
    return kind(**{**given, **changes})


@pytest.fixture
def in_place_of_te() -> Iterator[None]:
    with grouped_linear.in_place_of_te():
        yield


@pytest.fixture
def model_parallel(one_rank: None) -> None:
    parallel_state.initialize_model_parallel()


@pytest.fixture
def used(in_place_of_te: None) -> Iterator[None]:
    undo = use_device_counts()
    yield
    undo()


def dispatcher(given: Any = None, **changes: Any) -> Any:
    groups = get_default_pg_collection()
    return moe_layer.MoEAlltoAllTokenDispatcher(
        4, list(range(4)), config=given or config(**changes), pg_collection=groups
    )


CAPTURED: tuple[dict[str, Any], ...] = (
    {},
    {"cuda_graph_modules": ["moe"]},
    {"cuda_graph_modules": []},
    {"cuda_graph_modules": "attn,moe"},
    {"cuda_graph_modules": "full", "cuda_graph_scope": ["attn", "moe"]},
    {"moe_expert_capacity_factor": -1.0},
    {"kind": MLATransformerConfig},
)
OTHERS: tuple[dict[str, Any], ...] = (
    {"cuda_graph_modules": ["attn", "moe_router"]},
    DROP_AND_PAD,
    {"cuda_graph_impl": "none"},
)


@pytest.mark.parametrize("changes", [*CAPTURED, *OTHERS], ids=str)
def test_dropless_experts_may_be_captured_and_get_the_dispatcher(
    model_parallel: None, used: None, changes: dict[str, Any]
) -> None:
    made = dispatcher(**changes)
    ours = changes in CAPTURED
    assert isinstance(made, MoEAlltoAllTokenDispatcher)
    assert (type(made) is not MoEAlltoAllTokenDispatcher) == ours
    assert made.config.moe_pad_expert_input_to_capacity == (changes == DROP_AND_PAD)
    assert (made.config.moe_expert_capacity_factor is None) == (changes != DROP_AND_PAD)


def test_megatrons_other_rules_hold(used: None) -> None:
    with pytest.raises(ValueError, match="none load balancing"):
        config(moe_router_load_balancing_type="quantile_balancing")
    with pytest.raises(AssertionError, match="both moe and moe_router"):
        config(cuda_graph_modules=["moe", "moe_router"])
    assert config(**DROP_AND_PAD).moe_pad_expert_input_to_capacity
    with pytest.raises(ValueError, match="moe_expert_capacity_factor must be set"):
        config(moe_pad_expert_input_to_capacity=True)


def test_one_kernel_computes_every_pass_and_in_captures_rows_are_padded_already(
    model_parallel: None, in_place_of_te: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    undo, passed = use_device_counts(RowBound(1.25), gemm="cublas"), list[Any]()
    assert (dispatcher().gemm, dispatcher().multiple) == ("cublas", 1)
    assert not hasattr(dispatcher(**DROP_AND_PAD), "gemm")
    quantized, others = config(), config(cuda_graph_modules=["attn"])
    quantized.fp8, quantized.fp8_recipe, others.fp8 = "hybrid", "tensorwise", "hybrid"
    assert dispatcher(quantized).multiple == 16
    assert not experts.skip_routed_expert_padding(quantized)
    with monkeypatch.context() as capturing:
        capturing.setattr(install, "is_capturing", lambda: True)
        assert experts.skip_routed_expert_padding(quantized)
        assert not experts.skip_routed_expert_padding(others)

    def forward(self: Any, _inp: Any, splits: Any, **_named: Any) -> None:
        passed.append((self.use_grouped_tensor, splits))

    layer, on_gpu = SimpleNamespace(use_grouped_tensor=False), SimpleNamespace(is_cuda=True)
    for recipe in (None, *(SimpleNamespace(float8_block_scaling=lambda v=v: v) for v in (0, 1))):
        monkeypatch.setattr(install, "fp8_recipe", lambda recipe=recipe: recipe)
        for splits in ([1, 2], on_gpu):
            install._by_one_kernel(forward)(layer, torch.ones(3, 1), splits)
    assert layer.use_grouped_tensor is False
    assert [used for used, _ in passed] == [True, True, True, True, False, True]
    assert passed[0][1].tolist() == [1, 2] == passed[4][1]
    undo()
    with pytest.raises(AssertionError, match="drop-padding"):
        config()


def test_a_function_that_is_wrapped_here_already_is_a_known_one() -> None:
    symbol = DISPATCHING[-1]
    undo = replace_function(*symbol.place(), install._by_one_kernel(symbol.find()))
    symbol.require_known_body()
    undo()


@pytest.mark.parametrize(("gemm", "other"), [("cublas", "torch"), ("torch", "cublas")])
def test_the_undo_puts_everything_back_and_a_second_kernel_changes_nothing(
    in_place_of_te: None, gemm: Any, other: Any
) -> None:
    def found() -> list[Any]:
        return [
            moe_layer.MoEAlltoAllTokenDispatcher,
            TransformerConfig.__post_init__,
            *(grouped_linear.GroupedLinear.forward, experts.skip_routed_expert_padding),
            grouped_linear._GroupedLinear,
        ]

    before = found()
    first = use_device_counts(gemm=gemm)
    during = found()
    changed = [a is not b for a, b in zip(before, during, strict=True)]
    assert changed == [True, True, *[gemm == "cublas"] * 2, gemm == "torch"]
    use_device_counts(gemm=gemm)()
    assert found() == during and (gemm == "cublas" or during[-1] is GroupedGemm)
    with pytest.raises(ConfigurationError, match=r"call megatron_cg.disable\(\) before"):
        use_device_counts(gemm=other)
    assert found() == during
    first()
    assert found() == before
    use_device_counts(gemm=other)()


def test_a_changed_dispatcher_is_refused_before_anything_is_changed(
    in_place_of_te: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def token_dispatch(self: Any, rows: torch.Tensor, probs: torch.Tensor) -> Any:
        return rows, probs

    before = grouped_linear._GroupedLinear
    monkeypatch.setattr(MoEAlltoAllTokenDispatcher, "token_dispatch", token_dispatch)
    with pytest.raises(UpstreamChangedError, match=r"token_dispatch.*another body"):
        use_device_counts()
    assert grouped_linear._GroupedLinear is before
    assert moe_layer.MoEAlltoAllTokenDispatcher is MoEAlltoAllTokenDispatcher


def test_only_dispatchers_in_graphs_are_bounded(model_parallel: None, used: None) -> None:
    assert dispatcher().bound is None
    bound = RowBound(1.25)
    undo = use_device_counts(bound)
    assert dispatcher().bound is bound
    assert not hasattr(dispatcher(cuda_graph_impl="none"), "bound")
    undo()
    assert dispatcher().bound is None


def test_dispatchers_of_a_group_share_peer_memory(
    model_parallel: None, used: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    undo = use_device_counts(by_peers=True)
    assert dispatcher().transport is None  # One rank exchanges nothing.
    monkeypatch.setattr(MoEAlltoAllTokenDispatcher, "__init__", of_two_ranks)
    one, other = dispatcher().transport, dispatcher().transport
    assert isinstance(one, PeerMemory) and one is other
    undo()
    assert dispatcher().transport is None


def of_two_ranks(self: Any, *args: Any, **named: Any) -> None:
    self.ep_size, self.ep_group = 2, torch.distributed.group.WORLD


def test_a_model_without_the_dispatcher_is_refused_for_what_may_be_the_cause(
    one_rank: None, in_place_of_te: None
) -> None:
    undo = install.allow_dropless_experts()
    trainer = new_trainer(WHOLE)
    undo()
    cause = r"was built before megatron_cg.enable\(\), or with another dispatcher than alltoall"
    with pytest.raises(ConfigurationError) as default:
        check_model(trainer.model, None, GraphArguments(), "tape", "GraphedLayers")
    assert re.search(cause, str(default.value)) is None
    with pytest.raises(ConfigurationError, match=cause):
        given = GraphArguments(cg_grouped_gemm="torch")
        check_model(trainer.model, None, given, "tape", "GraphedLayers")


@pytest.mark.parametrize(
    ("lacks", "supported", "words"),
    [
        ("cuBLASLt is 13.1.0", True, "13.1.0"),
        ("", False, "no such kernel for torch.f"),
        ("", True, ""),
    ],
)
def test_a_gpu_or_a_recipe_without_the_kernel_is_refused_in_the_first_pass(
    lacks: str, supported: bool, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(install, "fp8_recipe", lambda: None)
    monkeypatch.setattr(install, "_lacking", lambda: lacks)
    monkeypatch.setattr(Symbol, "find", lambda _: lambda _recipe, _dtype: supported)
    forward = install._by_one_kernel(lambda self, _inp, _splits: self.use_grouped_tensor)
    layer = SimpleNamespace(use_grouped_tensor=False)
    on_gpu = SimpleNamespace(is_cuda=True, dtype=torch.float32)
    if words:
        with pytest.raises(ConfigurationError, match=words):
            forward(layer, on_gpu, on_gpu)
    else:
        assert forward(layer, on_gpu, on_gpu)
