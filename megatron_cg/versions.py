"""Installed versions, and the one place where a symbol of another package is looked up."""

from __future__ import annotations

import importlib
import importlib.metadata
from typing import Any

from megatron_cg.errors import UpstreamChangedError


def installed_version(distribution: str) -> str | None:
    """The version of an installed distribution, or None."""
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def changed(distribution: str, symbol: str, expected: str) -> UpstreamChangedError:
    """The error for a symbol that is not what we rely on, with the version that is installed."""
    version = installed_version(distribution) or "not installed"
    return UpstreamChangedError(distribution, version, symbol, expected)


def lookup(distribution: str, path: str, expected: str) -> Any:
    """The object at ``module:attribute.path`` that we rely on in ``distribution``.

    Raises UpstreamChangedError, with package, version and symbol, when it is not there.
    """
    module_name, _, attributes = path.partition(":")
    try:
        found: Any = importlib.import_module(module_name)
        for name in filter(None, attributes.split(".")):
            found = getattr(found, name)
    except (ImportError, AttributeError) as error:
        raise changed(distribution, path, expected) from error
    return found
