"""Whether, and which, backward pass of autograd is under way in this thread."""

from megatron_cg.upstream.symbols import Symbol

CURRENT_PASS = Symbol("torch._C:_current_graph_task_id", "which backward pass is under way")
NO_PASS = -1
"""What it returns outside of backward passes."""
RELIES_ON = (CURRENT_PASS,)


def in_backward_pass() -> bool:
    running: int = CURRENT_PASS.cached()
    return running != NO_PASS
