"""One process group for all tests of a module: groups and the end of models cost most here."""

from collections.abc import Iterator

import pytest
import torch

from tests.unit.conftest import let_models_go


@pytest.fixture(scope="module")
def one_rank(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A gloo group of this process alone, under the CPU fakes."""
    from megatron_cg.tape.fakes import cpu_fakes

    store = tmp_path_factory.mktemp("group") / "store"
    with cpu_fakes():
        torch.distributed.init_process_group(
            "gloo", init_method=f"file://{store}", rank=0, world_size=1
        )
        try:
            yield
        finally:
            torch.distributed.destroy_process_group()
            let_models_go()
