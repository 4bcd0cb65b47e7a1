"""A call of loaded code for a parameter that was frozen when the code was made."""

from __future__ import annotations

import pytest
import torch

from megatron_cg.errors import ReplayMismatchError
from megatron_cg.precompile.load import Precompiled
from megatron_cg.precompile.region import Region
from megatron_cg.precompile.store import Manifest

MANIFEST = Manifest("layer", "", 0, {}, (), (0,), 1, "", (), 0.0)


class FrozenBias(torch.nn.Linear):
    def __init__(self) -> None:
        super().__init__(4, 4)
        self.bias.requires_grad_(False)


def test_a_parameter_that_was_frozen_must_stay_so() -> None:
    torch._dynamo.reset()
    module, given = FrozenBias(), torch.ones(2, 4)
    without_guards = torch.compiler.skip_all_guards_unsafe
    code = torch.compile(
        FrozenBias.forward, backend="aot_eager", options={"guard_filter_fn": without_guards}
    )
    compiled = Precompiled(code, Region(module, (given,)), MANIFEST)
    compiled(module, given).sum().backward()
    assert module.weight.grad is not None
    module.bias.requires_grad_()
    code(module, given).sum().backward()
    assert module.bias.grad is None  # Without guards nobody sees it.
    with pytest.raises(ReplayMismatchError, match=r"bias needed no gradient when layer was comp"):
        compiled(module, given)
