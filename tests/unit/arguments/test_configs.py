"""What the rules read from a model that was built in Python: every field, from real configs."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.models.hybrid.hybrid_model import HybridModel
from megatron.core.optimizer import OptimizerConfig
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron_cg.arguments.configs import DISTRIBUTED, ELSEWHERE, OPTIMIZER, TRANSFORMER, run_of
from megatron_cg.arguments.schema import RunArguments
from megatron_cg.errors import UpstreamChangedError

FIELDS = [field.name for field in dataclasses.fields(RunArguments)]


def names(kind: Any) -> set[str]:
    return {field.name for field in dataclasses.fields(kind)}


@pytest.mark.parametrize("field", FIELDS)
def test_a_field_is_of_a_config_or_the_reason_is_known(field: str) -> None:
    assert (field in TRANSFORMER or field in DISTRIBUTED) != bool(ELSEWHERE.get(field))
    assert field not in TRANSFORMER or TRANSFORMER[field] in names(TransformerConfig)
    assert field not in DISTRIBUTED or DISTRIBUTED[field] in names(DistributedDataParallelConfig)


def test_no_name_is_mapped_that_is_not_a_field() -> None:
    assert {*TRANSFORMER, *DISTRIBUTED, *ELSEWHERE} == set(FIELDS)


def test_what_is_elsewhere_is_in_neither_config() -> None:
    both = names(TransformerConfig) | names(DistributedDataParallelConfig)
    assert both.isdisjoint(set(ELSEWHERE) - {"use_megatron_fsdp"})
    assert set(OPTIMIZER) <= names(OptimizerConfig)
    assert "hybrid_layer_pattern" in HybridModel.__init__.__annotations__


def config(**changes: Any) -> TransformerConfig:
    return TransformerConfig(num_layers=2, hidden_size=8, num_attention_heads=2, **changes)


def layer(*, moe: bool = False, attention: Any = None) -> Any:
    part = SimpleNamespace()
    return SimpleNamespace(is_moe_layer=moe, self_attention=attention or part, mlp=part)


def model(*layers: Any, **members: Any) -> Any:
    return SimpleNamespace(decoder=SimpleNamespace(layers=list(layers)), **members)


def test_values_come_from_all_three_configs() -> None:
    optimizer = OptimizerConfig()
    optimizer.optimizer_cuda_graph = True
    settings: dict[str, Any] = {"add_bias_linear": False, "num_moe_experts": 4, "fp16": True}
    run = run_of(
        model(layer(), layer(moe=True)),
        config(**settings, hidden_dropout=0.25),
        DistributedDataParallelConfig(fsdp_double_buffer=True, delay_wgrad_compute=True),
        optimizer,
    )
    assert (run.use_megatron_fsdp, run.fsdp_double_buffer, run.fp16) == (True, True, True)
    assert (run.num_experts, run.hidden_dropout, run.optimizer_cuda_graph) == (4, 0.25, True)
    assert run.delay_wgrad_compute
    # The layers that were built count, whatever moe_layer_freq says.
    assert (run.num_layers, run.moe_layer_freq, run.custom_layers) == (2, (0, 1), False)


@pytest.mark.parametrize(
    ("dtype", "name"), [(None, "auto"), (torch.float32, "fp32"), (torch.bfloat16, "bf16")]
)
def test_dtypes_of_gradients_are_named_as_by_flags(dtype: Any, name: str) -> None:
    distributed = DistributedDataParallelConfig(
        megatron_fsdp_main_grads_dtype=dtype, megatron_fsdp_grad_comm_dtype=dtype
    )
    run = run_of(model(layer()), config(), distributed)
    assert run.megatron_fsdp_main_grads_dtype == run.megatron_fsdp_grad_comm_dtype == name


def test_a_hybrid_models_layers_are_those_of_its_pattern() -> None:
    run = run_of(model(hybrid_layer_pattern="MM*-/MM"), config(), DistributedDataParallelConfig())
    assert (run.hybrid_layer_pattern, run.num_layers) == ("MM*-/MM", 4)


@pytest.mark.parametrize(
    "built", [model(), model(layer(), layer(attention=IdentityOp())), SimpleNamespace()]
)
def test_layers_of_another_kind_are_not_guessed(built: Any) -> None:
    assert run_of(built, config(), DistributedDataParallelConfig()).custom_layers


def test_a_config_without_a_field_is_named() -> None:
    with pytest.raises(UpstreamChangedError, match=r"TransformerConfig\.num_moe_experts"):
        wrong = SimpleNamespace(**{n: None for n in TRANSFORMER.values() if "experts" not in n})
        run_of(model(), wrong, DistributedDataParallelConfig())
