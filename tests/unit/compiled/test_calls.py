"""A call of loaded code for a parameter that was frozen when the code was made."""

from __future__ import annotations

import pytest
import torch

from megatron_cg.compiled.load import Precompiled
from megatron_cg.compiled.region import Region
from megatron_cg.errors import ReplayMismatchError


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
    compiled = Precompiled(code, Region(module, (given,)), "layer")
    compiled(module, given).sum().backward()
    assert module.weight.grad is not None
    module.bias.requires_grad_()
    code(module, given).sum().backward()
    assert module.bias.grad is None  # Without guards nobody sees it.
    with pytest.raises(ReplayMismatchError, match=r"bias needed no gradient when layer was comp"):
        compiled(module, given)


def attached() -> torch.nn.Sequential:
    module, given = torch.nn.Sequential(torch.nn.Linear(4, 4)), torch.ones(2, 4)
    compiled = Precompiled(torch.nn.Sequential.forward, Region(module, (given,)), "layer")
    compiled.attach([module])
    return module


def test_a_hook_that_comes_after_attach_is_not_lost() -> None:
    module, given = attached(), torch.ones(2, 4)
    module(given)
    ran: list[int] = []
    for register in ("forward_pre", "forward", "full_backward_pre", "full_backward"):
        handle = getattr(module[0], f"register_{register}_hook")(lambda *_: ran.append(1))
        with pytest.raises(ReplayMismatchError, match=r"Linear inside has the hook .* fsdp_unit"):
            module(given)
        handle.remove()
    module.register_forward_hook(lambda *_: ran.append(2))
    module(given)
    assert ran == [2]


def test_a_module_that_was_replaced_after_attach_is_not_passed_over() -> None:
    module, given = attached(), torch.ones(2, 4)
    module[0] = torch.nn.Linear(4, 4)
    with pytest.raises(ReplayMismatchError, match="inside this Sequential was replaced after att"):
        module(given)
