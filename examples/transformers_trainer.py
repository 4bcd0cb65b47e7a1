"""Train a Llama or a Qwen3-MoE by transformers' Trainer, with graphs of its layers.

A script needs only the callback: Trainer(..., callbacks=[GraphLayers()]). The rest of this file
makes a small random model and data. Without a GPU, tapes stand in for CUDA graphs.

    torchrun --nproc-per-node 2 examples/transformers_trainer.py
    torchrun --nproc-per-node 2 examples/transformers_trainer.py --model qwen3_moe --sharding ddp
    torchrun --nproc-per-node 2 examples/transformers_trainer.py --compare  # also trains eagerly
    torchrun --nproc-per-node 1 examples/transformers_trainer.py --time  # a Llama of 1.1B, on a GPU
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import transformers
from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin

from megatron_cg import GraphedUnits, graph_units


class GraphLayers(transformers.TrainerCallback):
    """Replays graphs of a model's layers while a Trainer trains it.

    Takes the arguments of ``graph_units`` after the model. All microbatches of a step are in one
    step of the graphs. Evaluation and checkpoints come between two steps, and run eagerly.
    """

    graphs: GraphedUnits

    def __init__(self, units: str = "model.layers.*", **options: Any) -> None:
        self.units, self.options = units, options

    def on_train_begin(self, *_: Any, model: torch.nn.Module, **__: Any) -> None:
        """The model is sharded by now, and no step has begun."""
        if "graphs" in vars(self):  # A training that raised has not reached its end.
            self.graphs.close()
        self.graphs = graph_units(model, self.units, **self.options)

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        """Before the first microbatch."""
        self.step = self.graphs.step()
        self.step.__enter__()

    def on_step_end(self, *_: Any, **__: Any) -> None:
        """After the optimizer's step, and before logs, evaluation and checkpoints."""
        self.step.__exit__(None, None, None)

    def on_train_end(self, *_: Any, **__: Any) -> None:
        """The layers are as before."""
        self.graphs.close()


class Clock(transformers.TrainerCallback):
    """Prints the median time of the steps behind the first 20, eager and captured ones."""

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        self.times: list[float] = []

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        torch.cuda.synchronize()
        self.times.append(time.perf_counter())

    def on_train_end(self, *_: Any, **__: Any) -> None:
        steps = [after - before for before, after in pairwise(self.times[20:])]
        print(f"{statistics.median(steps) * 1000:.1f} ms a step, of {len(steps)} steps")


ON_GPU = torch.cuda.is_available()
SIZES = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "vocab_size": 256}
SIZES |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
# On Hopper, and with weights in BF16, grouped_mm reads no token counts on the host.
EXPERTS = {"num_experts": 8, "moe_intermediate_size": 48, "experts_implementation": "grouped_mm"}
TIMED = {"hidden_size": 2048, "intermediate_size": 5632, "num_hidden_layers": 22}
TIMED |= {"num_attention_heads": 32, "num_key_value_heads": 4, "vocab_size": 32000}
CONFIGS: dict[str, Any] = {"llama": SIZES, "qwen3_moe": SIZES | EXPERTS}


def samples(first: int, count: int, length: int = 32) -> list[dict[str, torch.Tensor]]:
    """Bytes of Python's own library."""
    text = torch.frombuffer(bytearray(Path(os.__file__).read_bytes()), dtype=torch.uint8).long()
    return [{"input_ids": x, "labels": x} for x in text.split(length)[first : first + count]]


def train(args: argparse.Namespace, *, graphed: bool) -> list[torch.Tensor]:
    """The losses and gradient norms that Trainer logs, then this rank's part of every weight."""
    torch.manual_seed(1)
    sizes = TIMED if args.time else CONFIGS[args.model]
    config = transformers.AutoConfig.for_model(args.model, **sizes)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    callback = GraphLayers(backend="native" if ON_GPU else "tape", warmup_steps=args.warmup)
    with tempfile.TemporaryDirectory() as folder:
        arguments = transformers.TrainingArguments(
            folder,
            fsdp=args.sharding == "fsdp2",  # its version is 2 if fsdp_config says nothing else
            max_steps=args.steps,
            per_device_train_batch_size=2,
            gradient_accumulation_steps=2,
            activation_checkpointing=args.checkpointing,
            use_cpu=not ON_GPU,
            eval_strategy="no" if args.time else "steps",
            save_strategy="no" if args.time else "steps",
            **dict.fromkeys(("eval_steps", "save_steps"), args.warmup + 1),
            logging_steps=10 if args.time else 1,
        )
        length = 512 if args.time else 32
        data = {"train_dataset": samples(0, 64, length), "eval_dataset": samples(64, 8, length)}
        callbacks = [*[callback] * graphed, *[Clock()] * args.time]
        trainer = transformers.Trainer(model, arguments, **data, callbacks=callbacks)
        if arguments.fsdp and not ON_GPU:
            shard_on_cpus(trainer)
        trainer.train()
    if graphed and trainer.is_world_process_zero():
        print(f"{type(trainer.model_wrapped).__name__}: {dict(callback.graphs.counters)}")
    pairs = [pair for entry in trainer.state.log_history for pair in entry.items()]
    logged = [value for name, value in pairs if name.endswith(("loss", "grad_norm"))]
    shards = (getattr(one, "_local_tensor", one).detach() for one in trainer.model.parameters())
    return [torch.tensor(logged, dtype=torch.float64), *shards]


def shard_on_cpus(trainer: transformers.Trainer) -> None:
    """Let accelerate 1.15 shard on CPUs, where it would take DistributedDataParallel."""
    state, arguments = trainer.accelerator.state, trainer.args
    state.fsdp_plugin = FullyShardedDataParallelPlugin(**arguments.fsdp_plugin_args)
    state.distributed_type = arguments.distributed_state.distributed_type = DistributedType.FSDP
    trainer.is_fsdp_enabled = True


def main(arguments: list[str] | None = None) -> None:
    """Train in the processes of torchrun; exit with 1 if --compare finds a difference."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", choices=CONFIGS, default="llama")
    parser.add_argument("--sharding", choices=("fsdp2", "ddp"), default="fsdp2")
    parser.add_argument("--checkpointing", action="store_true", help="of activations")
    parser.add_argument("--compare", action="store_true", help="eagerly and with graphs")
    parser.add_argument("--time", action="store_true", help="time 60 steps, as --compare does")
    for name, default in {"steps": 8, "warmup": 3}.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    args = parser.parse_args(arguments)
    if args.time:
        args.steps = 60
        for with_graphs in (False, True, False, True):
            train(args, graphed=with_graphs)
        return
    torch.use_deterministic_algorithms(True)
    graphed = train(args, graphed=True)
    if args.compare:
        same = all(map(torch.equal, graphed, train(args, graphed=False)))
        print("losses, gradient norms and weights:", "bitwise equal" if same else "they differ")
        assert same


if __name__ == "__main__":
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    main()
    dist.destroy_process_group()
