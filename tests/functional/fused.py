"""The example script with gradient-accumulation fusion, and without Apex.

Megatron makes its output layer with the fusion only if Apex is there. Under Megatron-FSDP that
layer writes its gradient by Transformer Engine, and nothing of Apex is called (megatron-core
0.19.2, ``tensor_parallel/layers.py``).
"""

from __future__ import annotations

import runpy
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from megatron_cg.telemetry.record import note
from tests.functional.tampering.places import wrap

SCRIPT = Path(__file__).parents[2] / "examples" / "pretrain_gpt.py"
OFF = "--no-gradient-accumulation-fusion"


def main() -> None:
    """Turn the fusion on, note how many layers have it in the first step, and train."""
    from megatron.core.tensor_parallel import layers
    from megatron.training import training

    sys.argv.remove(OFF)
    layers._grad_accum_fusion_available = True
    counted: list[int] = []

    def make(old: Callable[..., Any]) -> Callable[..., Any]:
        def train_step(*args: Any, **kwargs: Any) -> Any:
            if not counted:
                model = kwargs["model"] if "model" in kwargs else args[2]
                on = (getattr(m, "fuse_wgrad_accumulation", False) for m in model[0].modules())
                counted.append(sum(map(bool, on)))
                note("fused", counted[0])
            return old(*args, **kwargs)

        return train_step

    wrap(training, "train_step", make)
    runpy.run_path(str(SCRIPT), run_name="__main__")


if __name__ == "__main__":
    main()
