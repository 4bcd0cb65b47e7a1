"""``--cg-precompile-dir``: layers compiled without a run, captured by ranks that train."""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Callable, Iterator
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
from megatron_cg.errors import ArtifactRefusedError
from megatron_cg.precompile.load import Precompiled
from megatron_cg.precompile.save import save
from megatron_cg.tools.cpu.launch import run_processes
from megatron_cg.tools.cpu.training_plan import CpuModelConfig, TrainingPlan

WORLD, LAYERS, STEPS, WARMUP, MICROBATCHES = 2, 2, 5, 2, 2
SHAPE = CpuModelConfig(
    layers=LAYERS,
    hidden_size=16,
    ffn_hidden_size=32,
    graph_modules=(),
    options={"normalization": "LayerNorm", "use_cpu_initialization": True},
)
SHAPES = {"data-parallel": SHAPE, "tensor-parallel": replace(SHAPE, tensor_parallel=2)}
ARGS = SimpleNamespace(
    seq_length=SHAPE.sequence_length,
    micro_batch_size=1,
    create_attention_mask_in_dataloader=True,
    cuda_graph_warmup_steps=WARMUP,
)


def offline(shape: CpuModelConfig) -> Any:
    """The layer of a rank that does not exist."""
    from megatron_cg.integrations.megatron.layer_code import LayerCall, taken_by
    from megatron_cg.tools.cpu.cpu_model import gpt_model, make_groups

    make_groups(shape, create_gloo_process_groups=False)
    with torch.device("meta"):
        return taken_by(gpt_model(shape).train(), LayerCall.of(ARGS))


def trained(
    shape: CpuModelConfig, folder: Path | None, on_failure: str = "error"
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
        patch.setattr(Precompiled, "__call__", lambda *a, **k: calls.append(1) or run(*a, **k))
        if folder is not None:
            flags = GraphArguments(
                cg_backend="native", cg_precompile_dir=str(folder), cg_on_failure=on_failure
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
            trainer.model.eval()
            megatron_cg.disable()
            found["left"] = sum("_te_cuda_graph_capture" in vars(m) for m in trainer.model.modules())
    parallel_state.destroy_model_parallel()
    calculator.destroy_num_microbatches_calculator()
    return found


def on_a_rank(folder: Path, out: Path) -> None:
    logging.disable()
    found: dict[str, Any] = {}
    for name, shape in SHAPES.items():
        found[name] = {
            "eager": trained(shape, None),
            "compiled": trained(shape, folder / name),
        }
    (out / f"{dist.get_rank()}.json").write_text(json.dumps(found))


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[dict[str, Any]]]:
    """Compile the layers in this process; train on two ranks."""
    folder, out = (tmp_path_factory.mktemp(name) for name in ("artifacts", "results"))
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)  # As on the ranks.
    try:
        for name, shape in SHAPES.items():
            save(
                partial(offline, shape),
                folder / name,
                name="layer",
                world_size=WORLD,
                capability=None,
            )
    finally:
        torch.use_deterministic_algorithms(before)
    run_processes(partial(on_a_rank, folder, out), WORLD)
    yield [json.loads((out / f"{rank}.json").read_text()) for rank in range(WORLD)]


@pytest.mark.parametrize("name", SHAPES)
def test_graphs_of_compiled_layers_train_the_eager_numbers(
    name: str, results: list[dict[str, Any]]
) -> None:
    for eager, compiled in ((one[name]["eager"], one[name]["compiled"]) for one in results):
        assert compiled["numbers"] == eager["numbers"]
        assert compiled["shards"] == eager["shards"]
        print(compiled["counters"], compiled["before capture"], compiled["in the capture"], compiled["record"])
