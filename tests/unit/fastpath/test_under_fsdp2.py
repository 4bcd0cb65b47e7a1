"""FSDP2's spans are opened for a profiler alone."""

from contextlib import nullcontext
from typing import Any

import pytest
from torch.distributed.fsdp._fully_shard import _fsdp_param_group
from torch.profiler import ProfilerActivity, profile

from megatron_cg.fastpath.part import NotApplicableError
from megatron_cg.fastpath.under_v2 import skip_spans

module: Any = _fsdp_param_group


def test_spans_are_opened_while_a_profiler_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[str] = []

    def span(name: str) -> nullcontext[None]:
        opened.append(name)
        return nullcontext()

    monkeypatch.setattr(module, "record_function", span)
    undo = skip_spans()
    with module.record_function("before"), module.record_function("inside"):
        assert opened == []
    with profile(activities=[ProfilerActivity.CPU]), module.record_function("profiled"):
        assert opened == ["profiled"]
    undo()
    with module.record_function("after"):
        assert module.record_function is span and opened[-1] == "after"


def test_without_spans_the_part_stays_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(module, "record_function")
    with pytest.raises(NotApplicableError, match="record_function"):
        skip_spans()
    assert not hasattr(module, "record_function")
