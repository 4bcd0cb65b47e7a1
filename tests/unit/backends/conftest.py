from collections.abc import Iterator

import pytest

from tests.unit.backends.cuda_double import CudaDouble, cuda_double


@pytest.fixture
def cuda() -> Iterator[CudaDouble]:
    with cuda_double() as double:
        yield double
