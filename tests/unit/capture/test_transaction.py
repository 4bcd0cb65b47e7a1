"""Eager passes of a capture keep the code that was compiled before."""

import pytest
import torch
from torch._dynamo.testing import CompileCounter

from megatron_cg.capture.guarded_capture import compiled_kept


@pytest.mark.parametrize(("before", "compiled"), [((8,), 1), ((8, 9), 0)])
def test_eager_passes_keep_their_compiled_code(before: tuple[int, ...], compiled: int) -> None:
    torch._dynamo.reset()
    counter = CompileCounter()
    twice = torch.compile(lambda x: x * 2, backend=counter)
    for size in before:
        twice(torch.ones(size))
    with compiled_kept():
        twice(torch.ones(20))
    assert counter.frame_count == len(before) + compiled
    # Code that was compiled last is tried first: for any size it would take this one too.
    shapes = [torch.ones(size) for size in before]
    with torch.compiler.set_stance("fail_on_recompile"):
        for given in shapes:
            twice(given)
    twice(torch.ones(33))
    assert counter.frame_count == len(before) + 2 * compiled
