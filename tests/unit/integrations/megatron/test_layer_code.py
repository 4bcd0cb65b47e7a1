"""``--cg-precompile-dir``: layers compiled without a run, captured by ranks that train."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megatron_cg.arguments.schema import GraphArguments
from megatron_cg.backends.tape.tape_backend import TapeBackend
from megatron_cg.errors import ArtifactRefusedError, PrecompileError, ReplayMismatchError
from megatron_cg.integrations.call_arguments import OnFailure
from megatron_cg.precompile.load import Precompiled
from megatron_cg.precompile.save import save
from megatron_cg.tools.cpu.training_plan import CpuModelConfig, TrainingPlan
from tests.functional.loops import RECOMPUTE
from tests.unit.ranks import on_ranks

WORLD, LAYERS, STEPS, WARMUP, MICROBATCHES = 2, 2, 5, 2, 2
SHAPE = CpuModelConfig(
    layers=LAYERS,
    hidden_size=16,
    ffn_hidden_size=32,
    graph_modules=(),
    options={"normalization": "LayerNorm", "use_cpu_initialization": True},
)
RECOMPUTED = replace(SHAPE, options={**SHAPE.options, **RECOMPUTE})
SHAPES = {
    "data-parallel": SHAPE,
    "tensor-parallel": replace(SHAPE, tensor_parallel=2),
    "recomputed": RECOMPUTED,
}
PARTS = replace(SHAPE, graph_modules=("attn",))
"""What the rules refuse; nothing here asks them."""
ARGS = SimpleNamespace(
    seq_length=SHAPE.sequence_length,
    micro_batch_size=1,
    create_attention_mask_in_dataloader=True,
    cuda_graph_warmup_steps=WARMUP,
)


def offline(shape: CpuModelConfig) -> Any:
    """The layer of a rank that does not exist."""
    from megatron_cg.integrations.megatron.full_recompute import allow_full_recompute
    from megatron_cg.integrations.megatron.layer_code import LayerCall, layer_regions
    from megatron_cg.tools.cpu.cpu_model import gpt_model, make_groups

    make_groups(shape, create_gloo_process_groups=False)
    undo = allow_full_recompute()
    try:
        with torch.device("meta"):
            return layer_regions(gpt_model(shape).train(), LayerCall.of(ARGS))[0]
    finally:
        undo()


def counted(run: Callable[..., Any], calls: list[int]) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        calls.append(1)
        return run(*args, **kwargs)

    return call


def trained(
    shape: CpuModelConfig, folder: Path | None, on_failure: OnFailure = "error"
) -> dict[str, Any]:
    """Five steps, eagerly or, with a folder, in graphs from the third on, as flags turn them on."""
    import megatron.training.training as loop
    from megatron.core import num_microbatches_calculator as calculator
    from megatron.core import parallel_state

    import megatron_cg
    from megatron_cg.integrations.megatron import helper as helper_of_megatron
    from megatron_cg.integrations.megatron.patches import start
    from megatron_cg.telemetry.record import Recorder, recording
    from megatron_cg.telemetry.record_shards import parameter_digests
    from megatron_cg.tools.cpu.train import Trainer

    calls: list[int] = []
    run = Precompiled.__call__
    recorder = Recorder(Path("nowhere"))
    calculator.init_num_microbatches_calculator(0, None, MICROBATCHES, 1, 1)
    with pytest.MonkeyPatch.context() as patch, recording(recorder):
        patch.setattr(helper_of_megatron, "NativeBackend", TapeBackend)
        patch.setattr(Precompiled, "__call__", counted(run, calls))
        if folder is not None:
            flags = GraphArguments(
                cg_backend="native",
                cg_precompile_dir=str(folder),
                cg_on_failure=on_failure,
                cg_on_mismatch="error",
                cg_verify_interval=2,
            )
            megatron_cg.enable()
            start(flags, ARGS, wants_graphs=True)
        trainer = Trainer(TrainingPlan(shape, microbatches=MICROBATCHES, micro_batch_size=1))
        found: dict[str, Any] = {"before capture": len(calls)}
        numbers = [trainer.step() for _ in range(WARMUP)]
        if folder is not None:
            helper = loop.TECudaGraphHelper(
                [trainer.model], trainer.model.config, ARGS.seq_length, 1, [trainer._optimizer]
            )
            helper.create_cudagraphs()
            found["in the capture"] = len(calls)
        numbers += [trainer.step() for _ in range(STEPS - WARMUP)]
        found |= {"numbers": numbers, "shards": parameter_digests(trainer.model)}
        found |= {"calls": len(calls), "record": recorder.data.get("precompiled")}
        if folder is not None:
            found["counters"] = helper.session.counters.as_dict()
            megatron_cg.disable()
            found["left"] = sum(
                "_te_cuda_graph_capture" in vars(m) for m in trainer.model.modules()
            )
    parallel_state.destroy_model_parallel()
    calculator.destroy_num_microbatches_calculator()
    return found


def refusals(folder: Path, own: Path) -> dict[str, Any]:
    """What ranks come to where an artifact cannot be used. ``own`` is this rank's folder."""
    from megatron.core import parallel_state

    from megatron_cg.integrations.megatron.layer_code import LayerCall, LayerCode
    from megatron_cg.tools.cpu.cpu_model import gpt_model, make_groups

    rank = dist.get_rank()
    make_groups(SHAPE)
    model = gpt_model(SHAPE)
    other = gpt_model(replace(SHAPE, ffn_hidden_size=48))
    last = model.get_submodule("module.decoder.layers.1.mlp")
    shutil.copytree(folder, own)
    own.chmod(0o700)
    artifact = own / "layer.artifact"
    data = artifact.read_bytes()

    def load(place: Path = own, model: Any = model, **answer: Any) -> str:
        code = LayerCode(place, LayerCall.of(ARGS), answer.get("on_refusal", "error"))
        try:
            code.load(model)
        except ArtifactRefusedError as error:
            return str(error)
        return f"{len(code._code)} layers"

    found = {"good": load()}
    for answer in ("error", "eager"):
        run = partial(load, on_refusal=answer)
        found[f"nowhere, {answer}"] = run(own / "nowhere")
        found[f"stale, {answer}"] = run(model=other)
        if rank == 1:
            artifact.unlink()
        found[f"missing, {answer}"] = run()
        if rank == 1:
            artifact.write_bytes(data[:-1])
        found[f"damaged, {answer}"] = run()
        artifact.write_bytes(data)
        with pytest.MonkeyPatch.context() as patch:
            if rank == 0:
                patch.setattr(last, "forward", scaled(last.forward))
            found[f"another layer, {answer}"] = run()
    found["without values"] = load(model=gpt_model(SHAPE).to("meta"))
    found["good again"] = load()
    parallel_state.destroy_model_parallel()
    return found


def scaled(forward: Callable[..., Any]) -> Callable[..., Any]:
    def run(*args: Any, **kwargs: Any) -> Any:
        made, bias = forward(*args, **kwargs)
        return made * 1.5, bias

    return run


def parts(folder: Path) -> str:
    """How a run ends whose graphs hold attention alone, with the code of whole layers."""
    from megatron.core import num_microbatches_calculator, parallel_state

    import megatron_cg

    try:
        trained(PARTS, folder)
    except ReplayMismatchError as error:
        return str(error)
    finally:
        megatron_cg.disable()
        num_microbatches_calculator.destroy_num_microbatches_calculator()
        parallel_state.destroy_model_parallel()
    return "it trains"


def on_a_rank(folder: Path, out: Path) -> dict[str, Any]:
    from megatron_cg.integrations.megatron.full_recompute import allow_full_recompute

    logging.disable()
    rank = dist.get_rank()
    found: dict[str, Any] = {"parts": parts(folder / "parts")}
    undo = allow_full_recompute()
    for name, shape in SHAPES.items():
        found[name] = {
            "eager": trained(shape, None),
            "compiled": trained(shape, folder / name),
        }
    undo()
    found["refusals"] = refusals(folder / "data-parallel", out / f"own{rank}")
    one_misses_it = folder / "data-parallel" if rank == 0 else out
    found["goes on"] = trained(SHAPE, one_misses_it, "eager")
    return found


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """Compile the layers in this process; train on two ranks."""
    folder, out = (tmp_path_factory.mktemp(name) for name in ("artifacts", "results"))
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)  # As on the ranks.
    try:
        for name, shape in (SHAPES | {"parts": PARTS}).items():
            save(
                partial(offline, shape),
                folder / name,
                name="layer",
                world_size=WORLD,
                capability=None,
            )
    finally:
        torch.use_deterministic_algorithms(before)
    return on_ranks(partial(on_a_rank, folder, out), WORLD)


@pytest.mark.parametrize("name", SHAPES)
def test_graphs_of_compiled_layers_train_the_eager_numbers(
    name: str, results: list[dict[str, Any]]
) -> None:
    for eager, compiled in ((one[name]["eager"], one[name]["compiled"]) for one in results):
        assert compiled["numbers"] == eager["numbers"]
        assert compiled["shards"] == eager["shards"]
        assert compiled["counters"]["captured"] == LAYERS
        replays = (STEPS - WARMUP) * LAYERS * MICROBATCHES
        assert compiled["counters"]["replayed"] == replays


@pytest.mark.parametrize("name", SHAPES)
def test_captures_run_the_loaded_code_and_all_else_the_layers_own(
    name: str, results: list[dict[str, Any]]
) -> None:
    """Steps before capture, and the eager side of each verified replay, are Megatron's."""
    for compiled in (one[name]["compiled"] for one in results):
        assert compiled["before capture"] == 0
        assert compiled["in the capture"] >= LAYERS
        assert compiled["counters"]["verified"] > 0
        assert compiled["counters"]["mismatched"] == 0
        assert compiled["calls"] == compiled["in the capture"]
        assert compiled["left"] == 0


def test_the_record_has_what_compiling_and_loading_took(results: list[dict[str, Any]]) -> None:
    for record in (one["data-parallel"]["compiled"]["record"] for one in results):
        assert (record["artifact"], record["layers"]) == ("layer", LAYERS)
        assert record["load_seconds"] > 0 and record["compile_seconds"] > 0
    assert all(one["data-parallel"]["eager"]["record"] is None for one in results)


@pytest.mark.parametrize(
    ("name", "ranks", "text"),
    [
        ("nowhere", [0, 1], "nowhere: type megatron-cg precompile to make it"),
        ("stale", [0, 1], "config.ffn_hidden_size was 32 and is 48"),
        ("missing", [1], "layer.artifact cannot be read (No such file or directory)"),
        ("damaged", [1], "layer.artifact is damaged"),
        ("another layer", [0], "what eager computes (module 1 of 2): output 0 is"),
    ],
)
def test_all_ranks_refuse_what_one_refuses(
    name: str, ranks: list[int], text: str, results: list[dict[str, Any]]
) -> None:
    for rank, found in enumerate(one["refusals"] for one in results):
        others = f"rank {ranks[0]} refused the artifact"
        assert (text if rank in ranks else others) in found[f"{name}, error"]
        assert found[f"{name}, eager"] == "0 layers"
        assert found["good"] == found["good again"] == f"{LAYERS} layers"


def test_weights_without_values_cannot_be_compared(results: list[dict[str, Any]]) -> None:
    for found in (one["refusals"] for one in results):
        assert "has its tensors on cpu, meta" in found["without values"]


def test_code_of_whole_layers_is_wrong_in_graphs_of_parts(results: list[dict[str, Any]]) -> None:
    for one in results:
        assert "layer 0: output 0, replayed beside an eager pass" in one["parts"]


@pytest.mark.parametrize("name", ["forward", "_te_cuda_graph_capture"])
def test_layers_of_another_release_run_their_own_code(
    name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from megatron.core.transformer.transformer_layer import TransformerLayer

    from megatron_cg.integrations.megatron.layer_code import LayerCall, LayerCode

    monkeypatch.setattr(TransformerLayer, name, lambda layer, *args: args)
    model = torch.nn.Module()  # Not looked at.
    with pytest.raises(ArtifactRefusedError, match=f"TransformerLayer.{name} of megatron-core"):
        LayerCode(tmp_path, LayerCall.of(ARGS), "error").load(model)
    code = LayerCode(tmp_path, LayerCall.of(ARGS), "eager")
    code.load(model)
    assert code.loaded is None


def test_a_model_without_layers_is_refused_by_name() -> None:
    from megatron_cg.integrations.megatron.layer_code import LayerCall, layer_regions

    with pytest.raises(PrecompileError, match="Linear has no decoder with layers"):
        layer_regions(torch.nn.Linear(1, 1), LayerCall.of(ARGS))


def test_with_cg_on_failure_eager_all_ranks_capture_the_layers_own_code(
    results: list[dict[str, Any]],
) -> None:
    for one in results:
        assert one["goes on"]["numbers"] == one["data-parallel"]["eager"]["numbers"]
        assert one["goes on"]["shards"] == one["data-parallel"]["eager"]["shards"]
        assert one["goes on"]["calls"] == 0 and one["goes on"]["record"] is None
        assert one["goes on"]["counters"]["captured"] == LAYERS
