"""Artifacts of one offline process, loaded on four ranks: their bits, and what is refused."""

import json
import logging
import pickle
import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megatron_cg.compiled.load import Precompiled, first_difference, load
from megatron_cg.compiled.region import Region
from megatron_cg.compiled.save import save
from megatron_cg.consensus.decision import ranks_text
from megatron_cg.consensus.exchange import Agreement
from megatron_cg.errors import ArtifactRefusedError, NotRestoredError
from megatron_cg.replay.verify import bytes_of
from tests.unit.compiled.regions import REGIONS, REPLAYS, WORLD, captured
from tests.unit.ranks import on_ranks


class Poison:
    """A file that is made when this is decoded."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> Any:
        return Path.touch, (self.marker,)


def step(region: Region, seed: int) -> dict[str, torch.Tensor]:
    """Loss, input gradient and parameter gradients of one training step on new tokens."""
    torch.manual_seed(seed)
    (old,) = region.args
    given = torch.randn_like(old).requires_grad_()
    for parameter in region.module.parameters():
        parameter.grad = None
    made = region.module(given, **region.kwargs)
    outs = [out for out in (made if isinstance(made, tuple) else (made,)) if out is not None]
    loss = sum((out * torch.linspace(-1, 1, out.numel()).view(out.shape)).sum() for out in outs)
    assert isinstance(loss, torch.Tensor)
    loss.backward()
    assert given.grad is not None
    found = {"loss": loss.detach(), "input": given.grad}
    for name, parameter in region.module.named_parameters():
        assert parameter.grad is not None, name
        found[name] = parameter.grad
    return found


def counted(compiled: Precompiled) -> list[int]:
    """An entry for each call of the compiled code."""
    calls: list[int] = []
    run = compiled._function

    def call(*args: Any, **kwargs: Any) -> Any:
        calls.append(1)
        return run(*args, **kwargs)

    compiled._function = call
    return calls


def bits(folder: Path, votes: Agreement, name: str) -> dict[str, Any]:
    """Which values of a step are equal, bit for bit, in eager and in loaded code."""
    rank = dist.get_rank()
    region = REGIONS[name](device="cpu", seed=5)
    compiled = load(folder, name, region, votes)
    # Ranks of a tensor-parallel group share their tokens.
    seed = 20 + rank // 2
    eager = step(region, seed)
    calls = counted(compiled)
    undo = compiled.attach([region.module])
    loaded = step(region, seed)
    undo()
    step(region, seed)  # Its own forward again.
    return {
        "calls": len(calls),
        "nonzero": [key for key, value in eager.items() if bool(value.any())],
        "equal": [key for key in eager if torch.equal(bytes_of(eager[key]), bytes_of(loaded[key]))],
        "all": [*eager],
    }


def broken_decoder(file: Any) -> None:
    raise EOFError("half of it")


def scaled(forward: Callable[..., Any]) -> Callable[..., Any]:
    def call(given: torch.Tensor) -> tuple[torch.Tensor, None]:
        return forward(given)[0] * 1.0000002, None

    return call


def not_restored(region: Region, compiled: Any) -> None:
    first_difference(region, compiled)
    raise NotRestoredError(["buffer count"])


def refusals(folder: Path, own: Path, votes: Agreement) -> dict[str, Any]:
    """What ranks come to where one of them has a bad artifact. ``own`` is this rank's folder."""
    rank = dist.get_rank()
    region = REGIONS["mlp"](device="cpu", seed=5)
    shutil.copytree(folder, own)
    own.chmod(0o700)
    artifact = own / "mlp.artifact"
    found: dict[str, Any] = {}

    def all_load() -> str:
        try:
            load(own, "mlp", region, votes)
            return "loaded"
        except (ArtifactRefusedError, NotRestoredError) as error:
            return str(error)

    if rank == 2:
        head = artifact.read_bytes().partition(b"\n")[0]
        artifact.write_bytes(head + b"\n" + pickle.dumps(Poison(own / "decoded")))
    found["damaged"] = all_load()
    found["decoded"] = (own / "decoded").exists()
    shutil.copy(folder / "mlp.artifact", artifact)
    if rank == 3:
        stale = replace(region.config, ffn_hidden_size=128)
        region = replace(region, config=stale)
    found["stale"] = all_load()
    region = REGIONS["mlp"](device="cpu", seed=5)
    if rank == 0:  # A pickle ends before what follows it.
        head, _, code = artifact.read_bytes().partition(b"\n")
        manifest = json.loads(head) | {"code_sha256": sha256(code + b" ").hexdigest()}
        artifact.write_bytes(json.dumps(manifest).encode() + b"\n" + code + b" ")
    found["different"] = all_load()
    shutil.copy(folder / "mlp.artifact", artifact)
    with pytest.MonkeyPatch.context() as patch:
        if rank == 1:
            patch.setattr(torch.compiler, "load_compiled_function", broken_decoder)
        found["not decoded"] = all_load()
    with pytest.MonkeyPatch.context() as patch:
        if rank == 0:
            patch.setattr(region.module, "forward", scaled(region.module.forward))
        found["other numbers"] = all_load()
    with pytest.MonkeyPatch.context() as patch:
        if rank == 3:
            patch.setattr("megatron_cg.compiled.load.first_difference", not_restored)
        found["not restored"] = all_load()
    found["good again"] = all_load()
    return found


def on_a_rank(folder: Path, out: Path) -> dict[str, Any]:
    logging.disable()
    votes, rank = Agreement(), dist.get_rank()
    found: dict[str, Any] = {name: bits(folder, votes, name) for name in REGIONS}
    found["refusals"] = refusals(folder, out / f"own{rank}", votes)
    found["captured"] = captured(folder, "layer", REGIONS["layer"], votes)
    return found


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """Save all regions in this process, without a GPU; load them on four ranks."""
    folder, out = (tmp_path_factory.mktemp(name) for name in ("artifacts", "results"))
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)  # As on the ranks.
    try:
        for name, build in REGIONS.items():
            save(build, folder, name=name, world_size=WORLD, capability=None)
    finally:
        torch.use_deterministic_algorithms(before)
    assert not dist.is_initialized()
    return on_ranks(partial(on_a_rank, folder, out), WORLD)


@pytest.mark.parametrize("name", REGIONS)
def test_a_step_of_loaded_code_has_the_bits_of_eager(
    name: str, results: list[dict[str, Any]]
) -> None:
    for found in (result[name] for result in results):
        assert found["equal"] == found["all"]
        assert found["nonzero"] == found["all"]
        assert found["calls"] == 1


def test_loaded_code_is_captured_and_replayed_with_the_bits_of_eager(
    results: list[dict[str, Any]],
) -> None:
    expected = {"compiled": [True, 0], "graphs": [True, REPLAYS]}
    assert [result["captured"] for result in results] == [expected] * WORLD


REFUSALS: dict[str, tuple[list[int], str]] = {
    "damaged": ([2], "mlp.artifact is damaged"),
    "stale": ([3], "config.ffn_hidden_size was 64 and is 128"),
    "not decoded": ([1], "the artifact could not be decoded: EOFError: half of it"),
    # Its neighbour gets another gradient.
    "other numbers": ([0, 1], "does not compute what eager computes: "),
    "not restored": ([3], "not restored after a capture, .*: buffer count"),
}
"""By what is wrong: the ranks that find it, and what they say."""


@pytest.mark.parametrize("name", REFUSALS)
def test_what_a_rank_finds_is_a_refusal_of_all(name: str, results: list[dict[str, Any]]) -> None:
    ranks, text = REFUSALS[name]
    for rank, found in enumerate(result["refusals"] for result in results):
        ends = f"state of {ranks_text(ranks)}, whose own log names it"
        refused = ends if name == "not restored" else f"{ranks_text(ranks)} refused the artifact"
        assert re.search(text if rank in ranks else refused, found[name])
        assert found["decoded"] is False and found["good again"] == "loaded"
        different = "rank 0 and the other ranks read different artifacts"
        assert different in found["different"]
