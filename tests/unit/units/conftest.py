"""One process group for all tests of a module: groups and the end of models cost most here."""

from collections.abc import Iterator

import pytest

from tests.unit.conftest import group_of_one


@pytest.fixture(scope="module")
def one_rank(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with group_of_one(tmp_path_factory.mktemp("group")):
        yield
