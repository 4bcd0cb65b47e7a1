"""Plans of lines, and what is printed of them."""

import shlex
from collections.abc import Callable

import pytest

from megatron_cg.tools.launch_line import read_line
from megatron_cg.tools.plan.edit import Edited, edit
from megatron_cg.tools.plan.report import lines_of

Plan = Callable[..., Edited]


@pytest.fixture
def plan() -> Plan:
    """Plans a line as typed in a shell, for a GPU of so many GiB."""

    def made(line: str, memory: float = 79) -> Edited:
        return edit(read_line(shlex.split(line)), int(memory * 2**30))

    return made


def said(plan: Edited) -> str:
    return " ".join(" ".join(lines_of(plan)).split())
