"""The grouped GEMM against one GEMM per expert, with the counts on the host and on the device."""

import re
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron_cg.errors import ConfigurationError
from megatron_cg.experts import grouped_gemm
from megatron_cg.experts.grouped_gemm import GroupedGemm, on_device, refuse_other
from megatron_cg.experts.install import _LAYER_OF_TE
from tests.unit.grouped_linear import SETTINGS, _GroupedLinear
from tests.unit.te_sources import fingerprint_in, source_of_te

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
