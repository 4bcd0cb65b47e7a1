"""A capture that fails, or is refused, leaves nothing behind, and says why."""

import inspect
from collections.abc import Callable

import pytest

from megatron_cg.tools.record.compare import Outcome
from tests.functional.cases import DROPOUT, LIFE, Case, batch
from tests.functional.outcomes import assert_trained_alike
from tests.functional.tampering import captures

pytestmark = pytest.mark.fault
Align = Callable[..., Outcome]


def case(name: str, *graph_flags: str) -> Case:
    flags = (*batch(8), *DROPOUT)
    return Case(name, "llama-tiny", ("attn", "mlp"), flags, graph_flags=graph_flags)


@pytest.mark.kills
def test_what_a_rule_refuses_ends_before_a_model_is_built(
    align: Align, log: Callable[..., str]
) -> None:
    assert align(LIFE["unused"]).comparison.status == "failed"
    assert "CUDA graphs cannot be used as configured, 1 reason" in log(LIFE["unused"])
    assert "[no-exchange] --cg-moe-exchange peer" in log(LIFE["unused"])
    assert "number of parameters on (tensor" not in log(LIFE["unused"])


@pytest.mark.kills
def test_the_host_read_that_ended_a_capture_is_logged_where_training_goes_on(
    align: Align, log: Callable[..., str]
) -> None:
    going_on = case("read", "--cg-on-failure", "eager")
    assert_trained_alike(align(going_on, mutation="fail@invalid"), steps=12)
    place = "in the callable itself (TransformerLayer), "
    assert f"CUDA cannot capture the forward pass of layer 0, {place}" in log(going_on)
    statement = inspect.getsource(captures.COPIES["invalid"]).strip()
    assert f"in <lambda>: `{statement}`" in log(going_on)
