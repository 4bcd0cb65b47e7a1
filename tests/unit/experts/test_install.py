"""What ``use_device_counts`` changes in Megatron and when; the grouped GEMM that it puts there."""

import functools
import re
import sys
from collections.abc import Iterator
from contextlib import nullcontext
from functools import partial
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
from megatron_cg.experts import grouped_gemm, install
from megatron_cg.experts.grouped_gemm import GroupedGemm, on_device, refuse_other
from megatron_cg.experts.install import _LAYER_OF_TE, DISPATCHING, use_device_counts
from megatron_cg.experts.row_bound import RowBound
from megatron_cg.experts.rules import lacks_device_counts
from megatron_cg.experts.slots import PeerMemory
from megatron_cg.integrations.megatron.helper import check_model
from megatron_cg.tape.training_plan import CpuModelConfig
from megatron_cg.upstream.patch import run_instead
from megatron_cg.upstream.symbols import Symbol
from megatron_cg.upstream.te import NOT_LOADED
from tests.unit import grouped_linear
from tests.unit.grouped_linear import SETTINGS, _GroupedLinear
from tests.unit.te_sources import fingerprint_in, source_of_te
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
            install._by_one_kernel(forward, layer, torch.ones(3, 1), splits)
    assert layer.use_grouped_tensor is False
    assert [used for used, _ in passed] == [True, True, True, True, False, True]
    assert passed[0][1].tolist() == [1, 2] == passed[4][1]
    undo()
    with pytest.raises(AssertionError, match="drop-padding"):
        config()


def test_a_function_that_is_wrapped_here_already_is_a_known_one() -> None:
    symbol = DISPATCHING[-1]
    undo = run_instead(symbol, install._by_one_kernel)
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
        check_model(trainer.model, None, GraphArguments(), "tape")
    assert re.search(cause, str(default.value)) is None
    with pytest.raises(ConfigurationError, match=cause):
        given = GraphArguments(cg_grouped_gemm="torch")
        check_model(trainer.model, None, given, "tape")


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
    forward = partial(install._by_one_kernel, lambda self, _inp, _splits: self.use_grouped_tensor)
    layer = SimpleNamespace(use_grouped_tensor=False)
    on_gpu = SimpleNamespace(is_cuda=True, dtype=torch.float32)
    if words:
        with pytest.raises(ConfigurationError, match=words):
            forward(layer, on_gpu, on_gpu)
    else:
        assert forward(layer, on_gpu, on_gpu)


COUNTS = ([3, 5, 4], [0, 12, 0], [12, 0, 0], [0, 0, 0], [1, 0, 11])
IN, OUT = 16, 24


def weights_in_one_bucket(experts: int, dtype: torch.dtype) -> list[torch.Tensor]:
    """As Megatron-FSDP's parameters lie in a bucket, with something between them."""
    bucket = torch.randn(8 + experts * (OUT * IN + 8)).to(dtype)
    starts = (8 + index * (OUT * IN + 8) for index in range(experts))
    parts = (bucket[start : start + OUT * IN].view(OUT, IN) for start in starts)
    return [part.detach().requires_grad_() for part in parts]


def results(function: Any, rows: torch.Tensor, counts: torch.Tensor, weights: Any) -> Any:
    used = int(counts.sum())
    rows = rows.detach().clone().requires_grad_()
    for weight in weights:
        weight.grad = None
    output, copies = function.apply(rows, counts, SETTINGS, None, None, *weights)
    assert copies == [None] * len(weights)
    scale = torch.linspace(-1, 1, OUT).to(output.dtype)
    (output[:used] * scale).sum().backward()
    assert rows.grad is not None
    return [output[:used], rows.grad[:used], *(weight.grad for weight in weights)]


@pytest.mark.parametrize("more", [0, 4], ids=["all rows counted", "more rows"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("given", COUNTS, ids=str)
def test_it_computes_what_one_gemm_per_expert_computes(
    given: list[int], dtype: torch.dtype, more: int
) -> None:
    counts, weights = torch.tensor(given), weights_in_one_bucket(len(given), dtype)
    rows = torch.randn(int(counts.sum()), IN).to(dtype)
    # What lies in rows that no expert has must not reach a result.
    padded = torch.cat([rows, torch.full((more, IN), torch.nan, dtype=dtype)])
    ours = results(GroupedGemm, padded, counts, weights)
    theirs = results(_GroupedLinear, rows, counts, weights)
    assert all(torch.equal(one, other) for one, other in zip(ours, theirs, strict=True))


def test_what_needs_no_gradient_gets_none() -> None:
    weights = [weight.detach() for weight in weights_in_one_bucket(2, torch.float32)]
    rows = torch.randn(2, 2, IN, requires_grad=True)
    apply: Any = GroupedGemm.apply
    given = (torch.tensor([1, 3]), SETTINGS, None, None)
    output, _ = apply(rows, *given, *weights)
    output.sum().backward()
    assert rows.grad is not None
    trained = weights_in_one_bucket(2, torch.float32)
    output, _ = apply(rows.detach(), *given, *trained)
    output.sum().backward()
    # The gradients of weights are views of one tensor, so that one copy moves them.
    assert len({w.grad.untyped_storage().data_ptr() for w in trained if w.grad is not None}) == 1
    with torch.no_grad():
        output, _ = GroupedGemm.forward(None, rows, *given, *weights)
    assert output.shape == (2, 2, OUT)


OTHERWISE: dict[str, Any] = {
    "shuffled": lambda weights: [weights[1], weights[0], weights[2]],
    "apart": lambda weights: [weight.detach().clone() for weight in weights],
    "transposed": lambda weights: [weights[0][:IN, :IN].t(), *(w[:IN, :IN] for w in weights[1:])],
    "misaligned": lambda weights: list(
        torch.cat([torch.zeros(1).bfloat16(), *map(torch.flatten, weights)])[1:].view(3, OUT, IN)
    ),
    "misaligned from the second on": lambda weights: [
        row[:-1].view(OUT, IN) for row in torch.ones(3, OUT * IN + 1).bfloat16()
    ],
    "overlapping": lambda weights: [weights[0][at : at + 2] for at in range(3)],
}


@pytest.mark.parametrize("way", OTHERWISE)
def test_weights_that_lie_otherwise_are_copied(way: str) -> None:
    weights = OTHERWISE[way](weights_in_one_bucket(3, torch.bfloat16))
    with torch.no_grad():
        made = grouped_gemm.stacked(weights)
    assert torch.equal(made, torch.stack(weights)) and made.data_ptr() != weights[0].data_ptr()


@pytest.mark.parametrize(
    ("place", "value", "found"),
    [
        (0, True, "a bias"),
        (2, True, "FP8"),
        (3, True, "FP8"),
        (4, SimpleNamespace(delay_wgrad_compute=lambda: True), "delayed weight gradients"),
        (20, True, "debug tools"),
        (21, True, "one parameter"),
    ],
)
def test_what_it_cannot_compute_is_refused(place: int, value: Any, found: str) -> None:
    settings = [*SETTINGS[:place], value, *SETTINGS[place + 1 :]]
    with pytest.raises(ConfigurationError, match=f"{found}(?s:.)*--cg-grouped-gemm te"):
        refuse_other(settings, torch.empty(OUT, IN))
    for shape in ((OUT, 12), (12, IN)):
        with pytest.raises(ConfigurationError, match="multiples of 8"):
            refuse_other(SETTINGS, torch.empty(shape, dtype=torch.bfloat16))


@pytest.mark.parametrize("capability", [(8, 0), (9, 0), (10, 0), (12, 0)])
def test_only_hopper_is_known_to_be_right(
    capability: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "such a GPU")
    weight = SimpleNamespace(shape=(OUT, IN), itemsize=2, is_cuda=True, device="cuda:0")
    broken = capability[0] != 9
    with pytest.raises(ConfigurationError, match="such a GPU") if broken else nullcontext():
        refuse_other(SETTINGS, weight)  # type: ignore[arg-type]


def test_the_settings_lie_where_transformer_engine_puts_them() -> None:
    """Its source, since it cannot be imported without its compiled part."""
    source = source_of_te("module", "grouped_linear.py").read_text()
    assert fingerprint_in(source, "GroupedLinear.forward") == _LAYER_OF_TE.fingerprints[0]
    listed = re.search(r"non_tensor_args = \((.*?)\n\s*\)\n", source, re.S)
    assert listed is not None
    names = [name.strip() for name in listed[1].split(",\n") if name.strip(" \n,")]
    assert len(names) == len(SETTINGS)
    assert {names[place] for place in (0, 2, 3, 4, 20, 21)} == {
        "self.apply_bias",
        "self.fp8",
        "self.fp8_calibration",
        "self.wgrad_store",
        "debug",
        "self.single_grouped_weight",
    }


def test_a_gradient_of_one_row_may_have_any_strides() -> None:
    weights = weights_in_one_bucket(1, torch.bfloat16)
    rows = torch.randn(1, IN).bfloat16().as_strided((1, IN), (1, 1)).requires_grad_()
    apply: Any = GroupedGemm.apply
    output, _ = apply(rows, torch.tensor([1]), SETTINGS, None, None, *weights)
    output.sum().backward()
    assert rows.grad is not None and torch.equal(output, rows @ weights[0].t())


def test_equal_counts_on_the_host_are_not_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.Tensor, "pin_memory", None)
    assert on_device(torch.tensor([3, 3, 3]), torch.device("meta")).shape == (3,)
    assert on_device(torch.tensor([3, 3, 3]), torch.device("cpu")).tolist() == [3, 3, 3]


HOPPER, BLACKWELL = (9, 0), (10, 0)


class Old:
    def __init__(self, num_gemms: int) -> None: ...


class New:
    def __init__(self, num_gemms: int, use_grouped_tensor: bool = False) -> None: ...


class Wrapped(New):
    __init__: Any = functools.wraps(New.__init__)(lambda *_args, **_named: None)


@pytest.mark.parametrize(
    ("layer", "cublas", "gpu", "missing"),
    [
        (Old, 131000, HOPPER, "transformer-engine is .*, before 2.19"),
        (New, 130700, HOPPER, "cuBLASLt is 13.7.0, before 13.8.1"),
        (New, 131000, None, "no GPU is visible"),
        (New, 131000, BLACKWELL, "the GPU is B, and Hopper alone was tried"),
        (New, 130801, HOPPER, "$"),
        (Wrapped, 130801, HOPPER, "$"),
    ],
)
def test_what_is_missing_is_said(
    monkeypatch: pytest.MonkeyPatch, layer: Any, cublas: int, gpu: Any, missing: str
) -> None:
    of_te = SimpleNamespace(
        GroupedLinear=layer, tex=SimpleNamespace(get_cublasLt_version=lambda: cublas)
    )
    name = "transformer_engine.pytorch.module.grouped_linear"
    monkeypatch.delitem(sys.modules, name, raising=False)
    assert lacks_device_counts() == NOT_LOADED
    monkeypatch.setitem(sys.modules, name, of_te)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpu is not None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: gpu)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "B")
    assert re.match(missing, lacks_device_counts())
