"""What a trace counts, on models whose memory can be told by hand."""

from __future__ import annotations

import torch

from megatron_cg.tools.plan.fakes.attention import DotProductAttention
from megatron_cg.tools.plan.fakes.linear import Linear
from megatron_cg.tools.plan.pool import Pool
from megatron_cg.tools.plan.trace import Trace, compiled, launched, scratch, tracing

KIB = 1024


def meta(*shape: int, grad: bool = False) -> torch.Tensor:
    return torch.empty(shape, device="meta", dtype=torch.float32, requires_grad=grad)


def test_memory_lives_as_long_as_what_holds_it() -> None:
    trace, x = Trace(Pool()), meta(16, 16)
    pool = trace.pool
    trace.known(x)
    with tracing(trace):
        y = x + 1
        view = y[0]
        del y
        assert pool.allocated == KIB
        del view
    assert (pool.allocated, pool.peak) == (0, KIB)


def test_autograd_keeps_what_backward_needs_and_lets_it_go() -> None:
    trace, x, weight = Trace(Pool()), meta(16, 16, grad=True), meta(16, 16, grad=True)
    pool = trace.pool
    trace.known(x, weight)
    with tracing(trace):
        out = (x @ weight).exp().sum()  # exp keeps its result
        assert pool.allocated == KIB + 512
        out.backward()
        assert x.grad is not None and weight.grad is not None
        assert pool.allocated == 2 * KIB + 512
    assert trace.torch_gemms == 3


def test_views_and_empty_tensors_launch_nothing() -> None:
    trace = Trace(Pool())
    with tracing(trace):
        x = torch.empty(4, 4, device="meta")
        _ = x.view(16).detach()
        assert trace.launches == 0
        _ = x.t().contiguous()
        assert trace.launches == 1


def test_a_compiled_function_is_one_kernel_without_temporaries() -> None:
    trace, x = Trace(Pool()), meta(16, 16)
    pool = trace.pool
    trace.known(x)
    function = compiled(lambda t: (t + 1) * 2 - 3)
    with tracing(trace):
        y = function(x)
    assert (trace.launches, pool.allocated, pool.peak) == (1, KIB, KIB)
    del y
    assert pool.allocated == 0


def test_fakes_speak_for_their_kernels() -> None:
    trace = Trace(Pool())
    pool = trace.pool
    launched(5)
    scratch(KIB)
    with tracing(trace):
        launched(5)
        scratch(KIB, KIB)
    assert (trace.launches, pool.allocated, pool.peak) == (5, 0, 2 * KIB)


def test_counts_copied_to_the_host_are_zeros() -> None:
    with tracing(Trace(Pool())):
        assert meta(3).to("cpu").tolist() == [0.0, 0.0, 0.0]


def test_a_linear_keeps_its_input_and_no_copy() -> None:
    layer = Linear(16, 32, bias=False, params_dtype=torch.float32)
    trace, x = Trace(Pool()), meta(16, 1, 16, grad=True)
    pool = trace.pool
    trace.known(x, *layer.parameters())
    with tracing(trace):
        out = layer(x)
        assert pool.allocated == out.untyped_storage().nbytes() == 2 * KIB
        out.backward(torch.empty_like(out))
    weight = layer.weight.grad
    assert weight is not None and weight.shape == (32, 16)
    assert x.grad is not None and x.grad.shape == x.shape


def test_attention_keeps_what_cudnn_needs() -> None:
    q, k, v = meta(8, 2, 4, 16, grad=True), meta(8, 2, 2, 16), meta(8, 2, 2, 16)
    trace = Trace(Pool())
    pool = trace.pool
    trace.known(q, k, v)
    with tracing(trace):
        out = DotProductAttention(4, 16)(q, k, v)
    statistics, random_state = 2 * 4 * 8 * 4, 512
    assert pool.allocated == out.untyped_storage().nbytes() + max(512, statistics) + random_state
