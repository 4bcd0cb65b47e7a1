"""Routings that a router seldom makes: experts and ranks without tokens, or with all of them."""

from collections.abc import Callable
from typing import Any

import torch

from tests.functional.tampering.places import rank, wrap

_FAR = 16.0
"""Added to the logits of the chosen experts: the others stay below, and BF16 tells most apart."""


def route(name: str) -> None:
    """Send every token to the experts of that name, in every layer and step of both runs.

    ``one``: one expert gets all tokens, and the router chooses the other experts of each.
    ``first``: the first half of the experts gets all, so with EP 2 the second rank gets none.
    ``crosswise``: each rank's tokens go to the experts of the other.
    ``turning``: the tokens of a microbatch tell which half of the experts gets all, in each layer.
    """
    from megatron.core.transformer.moe.router import TopKRouter

    def make(old: Callable[..., Any]) -> Callable[..., Any]:
        def gating(self: Any, tokens: torch.Tensor) -> torch.Tensor:
            logits: torch.Tensor = old(self, tokens)
            pull = _pull(name, self, logits)
            if name == "turning":
                pull = torch.where(tokens.float().sum() > 0, pull, pull.flip(0))
            return logits + pull

        return gating

    wrap(TopKRouter, "gating", make)


def _pull(name: str, router: Any, logits: torch.Tensor) -> torch.Tensor:
    """One value an expert. Kept on the router, since a capture uploads nothing."""
    if not hasattr(router, "pull"):
        experts, half = logits.shape[-1], logits.shape[-1] // 2
        pull = torch.zeros(experts)
        if name == "one":
            pull[0] = _FAR
        elif name in ("first", "turning"):
            pull[:half] = _FAR
        else:
            pull[half if rank() == 0 else 0 :][:half] = _FAR
        router.pull = pull.to(logits)
    found: torch.Tensor = router.pull
    return found
