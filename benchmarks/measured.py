"""The example script with its guards and votes measured; run by the launcher in its place."""

from __future__ import annotations

import runpy

from benchmarks.probe import probing
from megatron_cg.tools.align.run import example_script


def main() -> None:
    """Run the example, whatever its arguments."""
    with probing():
        runpy.run_path(str(example_script()), run_name="__main__")


if __name__ == "__main__":
    main()
