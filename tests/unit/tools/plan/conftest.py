"""One parser for all plans; it is slow to make."""

from __future__ import annotations

import shlex
from collections.abc import Callable

import pytest

from megatron_cg.tools.launch_line import read_line
from megatron_cg.tools.plan.edit import Edited, edit
from megatron_cg.tools.plan.report import as_json, text_of
from megatron_cg.tools.plan.settings import Reader

Plan = Callable[..., Edited]


@pytest.fixture(scope="session")
def reader() -> Reader:
    return Reader()


@pytest.fixture(scope="session")
def plan(reader: Reader) -> Plan:
    """Plans a line as typed in a shell, for a GPU of so many GiB."""

    def made(line: str, memory: float = 79, gpus: int | None = None) -> Edited:
        return edit(read_line(shlex.split(line)), reader, int(memory * 2**30), gpus)

    return made


def said(plan: Edited) -> str:
    """What the command prints, without its line breaks."""
    return " ".join(text_of(as_json(plan)).split())
