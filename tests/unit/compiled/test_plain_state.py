"""What the code has as constants is compared when it is loaded, attached and called."""

import enum
import os
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from megatron_cg.compiled.load import load
from megatron_cg.compiled.region import Region
from megatron_cg.compiled.save import save
from megatron_cg.consensus.exchange import Agreement
from megatron_cg.errors import ArtifactRefusedError, ReplayMismatchError

SCALE, TABLE, SPACE = 2.0, {"a": 3.0}, SimpleNamespace(gain=1.5)


class Mode(enum.Enum):
    ONE = 1
    TWO = 2


class Shared:
    tokens = 4.0
    unread = 0


def with_default(x: torch.Tensor, shift: float = 0.5, *, by: float = 1.0) -> torch.Tensor:
    return x * by + shift


def scaled_by(number: float) -> Callable[[Any], Any]:
    return lambda x: x * number


twice = scaled_by(2.0)
halved = partial(with_default, by=0.5)


class Layer(nn.Module):
    factor = 2.5

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.act, self.coefficient = nn.Linear(4, 4), nn.LeakyReLU(0.2), 4.0
        self.numbers, self.named, self.mode = [1.0, 2.0], {"x": 1.0}, Mode.ONE

    def forward(self, x: torch.Tensor, offset: float = 0.25) -> torch.Tensor:
        x = self.act(self.linear(x)) * self.coefficient * self.factor / Shared.tokens + offset
        x = halved(twice(with_default(x))) * SCALE * TABLE["a"] * SPACE.gain
        for number in self.numbers:
            x = x + number
        for name in self.named:
            x = x * self.named[name]
        if self.mode is Mode.ONE and os.environ.get("SCALE_OF_TEST") is None:
            x = x + 1
        return x + 1 if hasattr(self, "extra") or not self.linear.bias.requires_grad else x


def build(device: str = "meta") -> Region:
    with torch.device(device):
        return Region(Layer(), (torch.randn(2, 4, requires_grad=True),))


HERE = f"modules['{__name__}']"
CHANGES = {
    "it.coefficient = 4": "self.coefficient was 4.0 and is 4",
    "it.act.negative_slope = 0.9": "self._modules['act'].negative_slope was 0.2 and is 0.9",
    "it.numbers = [1.0, 5.0]": "self.numbers[1] was 2.0 and is 5.0",
    "it.numbers = [1.0]": "len(self.numbers) was 2 and is 1",
    "it.named['y'] = 2.0": "(*self.named,) == ('x',) was True and is False",
    "it.mode = Mode.TWO": "self.mode was <Mode.ONE: 1> and is <Mode.TWO: 2>",
    "it.linear.bias.requires_grad = False": "self.parameters()) was True and is False",
    "it.extra = 1": "hasattr(self, 'extra') was False and is True",
    "it.__dict__['factor'] = 9.0": "'factor' in self.__dict__ was False and is True",
    "Layer.factor = -0.0": "type(self).factor was 2.5 and is -0.0",
    "Shared.tokens = 9.0": f"{HERE}.Shared.tokens was 4.0 and is 9.0",
    "SCALE = 3.0": f"{HERE}.SCALE was 2.0 and is 3.0",
    "TABLE['a'] = 1.0": f"{HERE}.TABLE['a'] was 3.0 and is 1.0",
    "SPACE.gain = 9.0": f"{HERE}.SPACE.gain was 1.5 and is 9.0",
    "with_default.__defaults__ = (0.75,)": "with_default.__defaults__ was (0.5) and is (0.75)",
    "Layer.forward.__defaults__ = (1,)": "type(self).forward.__defaults__ was (0.25) and is (1)",
    "halved.keywords['by'] = 2.0": "halved.keywords['by'] was 0.5 and is 2.0",
    "twice.__closure__[0].cell_contents = 8.0": "cell_contents was 2.0 and is 8.0",
    "twice = scaled_by": f"{HERE}.twice was {__name__}.scaled_by.<locals>.<lambda> with code",
    "os.environ['SCALE_OF_TEST'] = '1'": "get(b'SCALE_OF_TEST') was None and is b'1'",
}


def test_a_changed_value_is_named_where_the_code_is_called_attached_and_loaded(
    tmp_path: Path, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "artifact"
    save(build, folder, name="it", world_size=2, capability=None)
    request.getfixturevalue("one_rank")
    region, names = build("cpu"), globals()
    module, (given,) = region.module, region.args
    names["it"] = module
    load(folder, "it", region, Agreement()).attach([module])
    for change, told in CHANGES.items():
        module(given)
        place = change.partition(" = ")[0]
        try:
            names["before"], undo = eval(place, names), f"{place} = before"
        except (AttributeError, KeyError):
            undo = f"del {place}"
        exec(change, names)
        with pytest.raises(ReplayMismatchError, match=re.escape(told)):
            module(given)
        with pytest.raises(ArtifactRefusedError, match=re.escape(told)):
            load(folder, "it", region, Agreement())
        exec(undo, names)
    Shared.unread += 1
    module(given)
    monkeypatch.setattr(Layer, "__module__", "__main__")
    with pytest.raises(ArtifactRefusedError, match="Move Layer from the script that runs"):
        load(folder, "it", region, Agreement())


class Ranked(Layer):
    def __init__(self) -> None:
        super().__init__()
        self.rank = torch.distributed.get_rank()

    def forward(self, x: torch.Tensor, offset: float = 0.25) -> torch.Tensor:
        return self.linear(x) if self.rank >= 0 else x


def test_a_value_that_differs_between_ranks_of_the_same_code_is_not_compared(
    tmp_path: Path,
) -> None:
    def ranked() -> Region:
        with torch.device("meta"):
            return Region(Ranked(), (torch.randn(2, 4, requires_grad=True),))

    manifest = save(ranked, tmp_path, name="it", world_size=2, capability=None)
    assert "self.rank" not in manifest.state and "type(self).forward" in manifest.state
