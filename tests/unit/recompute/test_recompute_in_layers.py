"""What full recompute changes in Megatron and in layers, and that it is put back."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
from megatron.core import parallel_state, tensor_parallel
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron_cg.errors import ConfigurationError, UpstreamChangedError
from megatron_cg.integrations.megatron.megatron_unit import MegatronUnit, ObservedInputs
from megatron_cg.recompute import layers as full_recompute
from megatron_cg.recompute.layers import allow_full_recompute, recompute_in_layers
from megatron_cg.tape.cpu_model import build, transformer_layers
from megatron_cg.tape.training_plan import CpuModelConfig
from megatron_cg.upstream.megatron import capturing_flag, is_capturing
from tests.functional.loops import GROUPS, RECOMPUTE, Run
from tests.functional.own_loop import make_config, make_model
from tests.unit.recompute.test_full_recompute import BLOCK, CHUNKS


def config(kind: Any = TransformerConfig, **changes: Any) -> Any:
    given = {
        "num_layers": 2,
        "hidden_size": 8,
        "num_attention_heads": 2,
        "cuda_graph_impl": "transformer_engine",
    }
    return kind(**{**given, **RECOMPUTE, **changes})


@pytest.fixture
def allowed() -> Iterator[None]:
    undo = allow_full_recompute()
    yield
    undo()


REFUSED: dict[str, dict[str, Any]] = {
    "only supported with full iteration": {"distribute_saved_activations": True},
    "does not work when activation recomputation": {
        "cpu_offloading": True,
        "cpu_offloading_num_layers": 1,
    },
    'must be "block" or "uniform"': {"recompute_method": None},
}


@pytest.mark.parametrize("said", REFUSED)
def test_megatrons_other_rules_hold(allowed: None, said: str) -> None:
    with pytest.raises((AssertionError, ValueError), match=said):
        config(**REFUSED[said])


@pytest.mark.parametrize("at", range(len(full_recompute.RELIES_ON)))
def test_checkpoints_in_another_place_are_an_error(
    monkeypatch: pytest.MonkeyPatch, at: int
) -> None:
    symbols = list(full_recompute.RELIES_ON)
    symbols[at] = replace(symbols[at], fingerprints=("0",))
    monkeypatch.setattr(full_recompute, "RELIES_ON", tuple(symbols))
    with pytest.raises(UpstreamChangedError, match=r"checkpointed_forward.*another body"):
        allow_full_recompute()
    with pytest.raises(AssertionError, match="only supported with full iteration"):
        config()


@pytest.fixture
def block(one_rank: None, allowed: None) -> Any:
    """A decoder whose first layer alone is recomputed."""
    options = {**BLOCK, "recompute_num_layers": 1}
    model = build(CpuModelConfig(layers=2, graph_modules=(), options=options))
    model.module._replace_param_with_raw_if_needed()
    return model.module.module.module.decoder


def test_everything_is_put_back(block: Any) -> None:
    before = [dict(vars(module)) for module in (block, *block.layers)]
    undo = recompute_in_layers(block)
    assert block.config.recompute_granularity is None
    assert block.config.recompute_method == "block" and block.config.num_layers == 2
    assert block.layers[0].config.recompute_granularity == "full"
    assert "forward" in vars(block.layers[0]) and "forward" not in vars(block.layers[1])
    undo()
    undo()
    assert [dict(vars(module)) for module in (block, *block.layers)] == before


@pytest.mark.parametrize(("recompute", "recomputed"), [(RECOMPUTE, True), (BLOCK, False)], ids=str)
def test_a_prediction_layer_is_recomputed_by_uniform_alone(
    one_rank: None, allowed: None, recompute: dict[str, Any], recomputed: bool
) -> None:

    parallel_state.initialize_model_parallel()
    tensor_parallel.model_parallel_cuda_manual_seed(1)
    group = replace(GROUPS["mtp"], config={**GROUPS["mtp"].config, **recompute})
    model: Any = make_model(group, make_config(group, Run("fp32")))
    (prediction,) = model.mtp.layers
    # In the first pass of its checkpoint, no input of the layer needs a gradient.
    inputs = ObservedInputs([prediction.mtp_model_layer])
    inputs._called(prediction.mtp_model_layer, (), {"hidden_states": torch.zeros(1)})
    undo = recompute_in_layers(model, inputs)
    assert prediction.config.recompute_granularity is None
    assert ("forward" in vars(prediction.mtp_model_layer)) is recomputed
    undo()
    assert prediction.config.recompute_granularity == "full"
    assert "forward" not in vars(prediction.mtp_model_layer)


@pytest.mark.refuses("full-recompute-lost-gradients")
def test_a_first_input_without_gradients_is_refused(one_rank: None, allowed: None) -> None:
    """Inside a chunk of two, no input needs a gradient in the first pass."""
    model = build(CpuModelConfig(layers=2, graph_modules=(), options=CHUNKS))
    first, second = transformer_layers(model)
    inputs = ObservedInputs([first, second])
    inputs._called(second, (), {"hidden_states": torch.zeros(1)})
    recompute_in_layers(model, inputs)()
    inputs._called(first, (), {"hidden_states": torch.zeros(1)})
    with pytest.raises(ConfigurationError, match="train the embedding"):
        recompute_in_layers(model, inputs)
    inputs._called(first, (), {"hidden_states": torch.zeros(1, requires_grad=True)})
    recompute_in_layers(model, inputs)()


@contextmanager
def passes_of(block: Any) -> Iterator[list[tuple[bool, bool]]]:
    """Of each pass of the first layer: whether a capture runs, and whether gradients are on."""
    ran: list[tuple[bool, bool]] = []
    layer = block.layers[0]
    own = layer._forward_mlp

    def forward(*args: Any, **kwargs: Any) -> Any:
        ran.append((is_capturing(), torch.is_grad_enabled()))
        return own(*args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(layer, "_forward_mlp", forward)
        undo = recompute_in_layers(block)
        yield ran
        undo()


def hidden_states() -> torch.Tensor:
    return torch.ones(4, 1, 32, dtype=torch.bfloat16, requires_grad=True)


def test_a_region_is_recomputed_as_it_ran(block: Any) -> None:
    hidden, given = hidden_states(), {"attention_mask": None}
    with passes_of(block) as ran:
        (out,) = MegatronUnit("layer 0", block.layers[0]).run((hidden,), given)
        with capturing_flag():
            out.sum().backward()
    assert ran == [(False, False), (False, True)]
    assert hidden.grad is not None


@pytest.mark.filterwarnings("error:None of the inputs")
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("gradients", [True, False])
def test_only_training_is_recomputed(block: Any, training: bool, gradients: bool) -> None:
    block.layers[0].train(training)
    with passes_of(block) as ran, torch.set_grad_enabled(gradients):
        hidden = hidden_states().requires_grad_(gradients)
        block.layers[0].forward(hidden, attention_mask=None)
    assert [grad for _, grad in ran] == [gradients and not training]
