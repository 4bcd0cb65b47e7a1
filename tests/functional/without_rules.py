"""The example without some of this package's rules, to see what they keep out.

Run by the launcher instead of ``examples/pretrain_gpt.py``. MEGATRON_CG_MUTATE names the rules,
with commas between them; ``no-early-gather`` also lets the optimizer's step begin no all-gather.
"""

from __future__ import annotations

import os
import runpy
from pathlib import Path
from typing import Any

SCRIPT = Path(__file__).parents[2] / "examples" / "pretrain_gpt.py"
NO_EARLY_GATHER = "no-early-gather"


def leave_out(names: set[str]) -> None:
    """Check no rule of these names. Raises ValueError for a name that no rule has."""
    from megatron_cg.arguments import validation

    known = {getattr(rule, "rule", "") for rule in validation.RULES}
    if names - known:
        raise ValueError(f"no rule is named {', '.join(sorted(names - known))}")
    validation.RULES = tuple(
        rule for rule in validation.RULES if getattr(rule, "rule", None) not in names
    )


def gather_nothing_early() -> None:
    """As Megatron sets it for graphs of a whole iteration; see ``get_model`` of its training."""
    from megatron.core.distributed.fsdp.src.megatron_fsdp.megatron_fsdp import MegatronFSDP

    own = MegatronFSDP.start_param_sync

    def start_param_sync(self: Any, *args: Any, **named: Any) -> None:
        self.ddp_config.fsdp_all_gather_in_start_param_sync = False
        own(self, *args, **named)

    MegatronFSDP.start_param_sync = start_param_sync


def main() -> None:
    """Leave rules out, then run the example."""
    names = set(filter(None, os.environ.get("MEGATRON_CG_MUTATE", "").split(",")))
    if NO_EARLY_GATHER in names:
        gather_nothing_early()
    leave_out(names - {NO_EARLY_GATHER})
    runpy.run_path(str(SCRIPT), run_name="__main__")


if __name__ == "__main__":
    main()
