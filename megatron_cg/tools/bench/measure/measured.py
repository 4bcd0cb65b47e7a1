"""The example script with measured steps; the benchmark makes the launcher run it.

Relied on: megatron-core 0.19.2, ``megatron.training.training``: ``train``, a global that
``pretrain`` calls, and ``train_step``, one that ``train`` calls with the model's chunks as the
third argument and the optimizer as the fourth.
"""

from __future__ import annotations

import runpy
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import wraps
from pathlib import Path
from typing import Any

from megatron_cg.tools.align.run import example_script
from megatron_cg.tools.bench.measure.eager_fast_path import EagerFastPath, is_given
from megatron_cg.tools.bench.measure.measurement import Measurement
from megatron_cg.tools.bench.measure.windows import Windows, given
from megatron_cg.upstream.patch import put_over, undone_after
from megatron_cg.upstream.symbols import lookup

_MODULE = "megatron.training.training"


@contextmanager
def measuring(windows: Windows, directory: Path, installs: bool = False) -> Iterator[None]:
    """Measure every ``train`` in the block. Raises UpstreamChangedError if it is missing.

    Args:
        windows: which steps are measured, and how.
        directory: where the metrics go.
        installs: whether an eager run installs the fast path.
    """
    module = lookup("megatron-core", _MODULE, "Megatron's training loop")
    train = lookup("megatron-core", f"{_MODULE}:train", "Megatron's training loop")

    @wraps(train)
    def measured_train(*args: Any, **kwargs: Any) -> Any:
        measurement = Measurement(windows, directory)
        fast_path = EagerFastPath(installs, windows.warmup)
        # Patched last, so that our step encloses all other patches of Megatron's.
        with ExitStack() as undo:
            undo.callback(put_over(module, "train_step", _step(module, measurement, fast_path)))
            undo.callback(fast_path.close)
            undo.enter_context(measurement.meter.installed())
            try:
                result = train(*args, **kwargs)
            except BaseException as error:
                measurement.abandon(error)
                raise
            measurement.close()
            measurement.meter.release()
            return result

    with undone_after(put_over(module, "train", measured_train)):
        yield


def _step(module: Any, measurement: Measurement, fast_path: EagerFastPath) -> Callable[..., Any]:
    old = module.train_step

    @wraps(old)
    def train_step(*args: Any, **kwargs: Any) -> Any:
        # The third and fourth arguments are the model's chunks and the optimizer.
        fast_path.before_step(lambda: (args[2][0], [args[3]]))
        measurement.before_step()
        result = old(*args, **kwargs)
        measurement.after_step(result[0].get("lm loss"))
        return result

    return train_step


def main() -> None:
    """Run the example script with any arguments."""
    # The launcher adds this file's folder to the front of the path; our modules have short names
    # there.
    with suppress(ValueError):
        sys.path.remove(str(Path(__file__).resolve().parent))
    windows, directory = given()
    with measuring(windows, Path(directory), is_given()):
        runpy.run_path(str(example_script()), run_name="__main__")


if __name__ == "__main__":
    main()
