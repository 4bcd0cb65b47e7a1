"""Layouts of Megatron-FSDP v2's buffers: always what v2 would make now."""

import logging
from typing import Any

import pytest

from megatron_cg.fastpath import install_parts, install_under_v2
from megatron_cg.fastpath.install_parts import keep_layouts
from megatron_cg.replay.plain import _Identity as Same
from megatron_cg.upstream.symbols import Symbol
from tests.unit.units.sharded import Network, under_v2


@pytest.fixture
def groups(one_rank: None) -> Any:
    network: Any = under_v2(mesh=(1,))(Network((16, 24)))
    found = [group for each in (*network.layers, network) for group in each._parameter_groups]
    return found


class Group:
    """One that can go: the released v2's own never does, as autograd's hooks hold it."""

    def __init__(self, like: Any) -> None:
        self._unsharded_model_weight = like._unsharded_model_weight


def test_a_model_that_is_dropped_leaves_nothing_on_the_class_of_layouts(groups: Any) -> None:
    kind = type(groups[0].main_grad.layout)
    before, group = Same(vars(kind)["build"]), Group(groups[0])
    keep_layouts(group)
    assert Same(vars(kind)["build"]) != before
    del group
    assert Same(vars(kind)["build"]) == before


def test_an_unknown_function_turns_its_part_off(
    groups: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    install_parts._warn_once.cache_clear()
    monkeypatch.setattr(Symbol, "unknown_body", lambda _symbol: "another body")
    path = install_under_v2(groups)
    path.close()
    assert not path.parts and path.left_out == {"layouts": "another body; another body"}
    (warning,) = (r.getMessage() for r in caplog.records if r.levelno == logging.WARNING)
    assert "another body" in warning
