"""Print the fingerprints of upstream functions that this package replaces, as installed.

``python -m tools.fingerprints`` prints a line for each: whether it is known, its fingerprint, the
package with its version, and the symbol. Before you add the fingerprint of a new release to a
``Symbol``, compare its function with our replacement. Exit code 1 if one is unknown.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator

from megatron_cg.errors import UpstreamChangedError
from megatron_cg.tools.doctor.relied_on import modules_that_rely
from megatron_cg.upstream.fingerprints import of_function
from megatron_cg.upstream.symbols import Symbol, installed_version


def replaced() -> Iterator[tuple[str, Symbol]]:
    """Our module and the symbol, of all functions that we replace."""
    for name in modules_that_rely():
        try:
            symbols: tuple[Symbol, ...] = importlib.import_module(name).RELIES_ON
        except (ImportError, UpstreamChangedError) as error:
            print(f"{name} cannot be imported: {error}", file=sys.stderr)
            continue
        yield from ((name, symbol) for symbol in symbols if symbol.fingerprints)


def main() -> int:
    """Print the lines; returns the exit code."""
    unknown = 0
    for name, symbol in replaced():
        version = installed_version(symbol.distribution)
        try:
            found = of_function(symbol.find())
        except UpstreamChangedError:
            found = None
        if version is None:
            word = "absent"
        else:
            word = "known" if found in symbol.fingerprints else "UNKNOWN"
        unknown += word == "UNKNOWN"
        print(f"{word:8}{found or '-':18}{symbol.distribution} {version}  {symbol.path}  {name}")
    return int(unknown > 0)


if __name__ == "__main__":
    sys.exit(main())
