"""Results as runs on GPUs would leave them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.unit.tools.bench.made_up import made_result, several_rounds


@pytest.fixture
def result() -> Callable[..., dict[str, Any]]:
    """Makes one run's result."""
    return made_result


@pytest.fixture
def drifting() -> list[dict[str, Any]]:
    """See :func:`several_rounds`."""
    return several_rounds()
