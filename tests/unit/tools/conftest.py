"""One call of a command, in this process."""

import shlex
from collections.abc import Callable
from typing import NamedTuple

import pytest

from megatron_cg.tools.cli.main import main


class Ended(NamedTuple):
    code: object
    out: str
    err: str


Cli = Callable[..., Ended]


@pytest.fixture
def cli(capfd: pytest.CaptureFixture[str]) -> Cli:
    """Calls ``megatron-cg`` with a line as typed in a shell, and further words."""

    def call(line: str, *more: object) -> Ended:
        capfd.readouterr()
        try:
            code: object = main([*shlex.split(line), *map(str, more)])
        except SystemExit as error:
            code = error.code
        return Ended(code, *capfd.readouterr())

    return call
