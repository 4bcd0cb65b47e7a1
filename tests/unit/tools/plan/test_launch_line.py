"""What may be typed after ``megatron-cg plan --`` and ``bench --``."""

import shlex
from pathlib import Path

import pytest

from megatron_cg.tools.launch_line import Flag, LaunchLine, LaunchLineError, gpus_of, read_line
from tests.unit.interpreted import python

SPEC = "([0]*1+[1]*2)"
FLAGS = f"--lr 1 --moe-layer-freq '{SPEC}' --bf16"


def read(line: str) -> LaunchLine:
    return read_line(shlex.split(line))


@pytest.mark.parametrize(
    ("line", "edited"),
    [
        ("torchrun a/b.py", "torchrun -m megatron_cg a/b.py"),
        ("A=1 python -u b.py", "A=1 python -u -m megatron_cg b.py"),
        ("./b.py", "python -m megatron_cg ./b.py"),
        ("B='1 2' srun -N 2 python b.py", "B='1 2' srun -N 2 python -m megatron_cg b.py"),
        ("ft_launcher --nnodes=1 b.py", "ft_launcher --nnodes=1 -m megatron_cg b.py"),
        ("deepspeed b.py", "deepspeed --no_local_rank --module megatron_cg b.py"),
        ("accelerate launch --multi_gpu b.py", "accelerate launch --multi_gpu -m megatron_cg b.py"),
        ("python -m torch.distributed.launch b.py",
         "python -m torch.distributed.launch --use-env -m megatron_cg b.py"),
        (
            "python -m torch.distributed.run --nproc-per-node 2 b.py",
            "python -m torch.distributed.run --nproc-per-node 2 -m megatron_cg b.py",
        ),
    ],
)  # fmt: skip
def test_the_launcher_goes_before_the_script(line: str, edited: str) -> None:
    found = read(f"{line} {FLAGS}")
    assert not found.starts_graphs
    assert found.flags == (Flag("--lr", ("1",)), Flag("--moe-layer-freq", (SPEC,)), Flag("--bf16"))
    changed = found.with_launcher().with_flag("--new", "x").without("--lr")
    written = " ".join(str(changed).replace("\\\n", " ").split())
    assert written == f"{edited} --moe-layer-freq '{SPEC}' --bf16 --new x"
    again = read(written)
    assert again.starts_graphs and again.flags == changed.flags


def test_a_variable_of_the_shell_stays_one() -> None:
    assert 'k="$N" "${A[@]}" b.py \\\n    --x "$Y"' in str(read("k='$N' '${A[@]}' b.py --x '$Y'"))


def test_mpirun_hands_a_variable_on() -> None:
    line = read("A=1 mpirun -np 2 python b.py").with_variable("B", "3").with_variable("A", "2")
    assert str(line) == "A=2 mpirun -x B=3 -np 2 python b.py"


@pytest.mark.parametrize("shell", ["bash -c", "srun -N 2 bash -x -c", "sh -c"])
def test_a_line_in_a_word_of_another_is_changed_there(shell: str) -> None:
    inner = f"export A=1; cd /x && python pretrain_gpt.py {FLAGS} 2>&1 | tee log"
    found = read(f"{shell} {shlex.quote(inner)}")
    assert read_line([f"{shell} {shlex.quote(inner)}"]) == found
    assert found.variables == {"A": "1"} and found.flags[-1] == Flag("--bf16")
    changed = found.with_launcher().with_flag("--lr", "2").with_variable("B", "3")
    words = shlex.split(str(changed))
    assert words[:-1] == shell.split()
    assert words[-1] == (
        "export A=1; cd /x && B=3 python -m megatron_cg pretrain_gpt.py --lr 2 "
        f"--moe-layer-freq '{SPEC}' --bf16 2>&1 | tee log"
    )


def test_a_text_with_continued_lines_is_one_line() -> None:
    text = f"export A=1\ntorchrun --nproc-per-node 4 \\\n  b.py \\\n {FLAGS} \\\n  --x y\n"
    found = read_line([text])
    assert [flag.name for flag in found.flags] == ["--lr", "--moe-layer-freq", "--bf16", "--x"]
    assert gpus_of(found).count == 4 and found.variables == {"A": "1"}
    assert read_line(["torchrun", "\\\n", "b.py", "\n", "--x"]).flags == (Flag("--x"),)


def test_a_flag_given_twice_has_its_last_value_and_is_changed_once() -> None:
    found = read("torchrun b.py --lr 1 --lr=2 --x")
    assert found.values("--lr") == ("2",) and found.values("--y") is None
    assert found.with_flag("--lr", "3").words == ["--lr", "3", "--x"]


@pytest.mark.parametrize(
    ("launcher", "count"),
    [
        ("torchrun --nproc-per-node 8", 8),
        ("torchrun --nproc_per_node=4 --nnodes=2", 8),
        ("torchrun --nnodes 1:4 --nproc-per-node 8", 0),
        ("torchrun --nnodes 2", 0),
        ("srun -N 2 torchrun --nnodes 2 --nproc-per-node 8 -m megatron_cg", 16),
        ("srun -N4 --ntasks-per-node=8 python", 32),
        ("srun -N4 --ntasks-per-node=1 torchrun --nproc-per-node 8", 32),
        ("srun -N4 --ntasks-per-node=1 torchrun --nproc-per-node $N", 0),
        ("srun --nodes 4 --gpus-per-node 4 python", 16),
        ("mpiexec -n 16 python", 16),
        ("env WORLD_SIZE=64 RANK=0 python", 64),
        ("python", 0),
        ("deepspeed --num_gpus 8 --num_nodes=2", 16),
        ("deepspeed --include=a:0,1@b:0,1 --num_gpus 2", 0),
        ("accelerate launch --num_machines 2 --num_processes 16", 16),
    ],
)
def test_the_launcher_says_how_many_gpus_there_are(launcher: str, count: int) -> None:
    line = read(f"{launcher} b.py --x")
    assert gpus_of(line, 3).count == 3
    if count:
        assert gpus_of(line).count == count
    else:
        with pytest.raises(LaunchLineError, match="give --gpus N") as error:
            gpus_of(line)
        assert ("as the shell expands it" in str(error.value)) is ("$" in launcher)


@pytest.mark.parametrize("line", ["", "llama", "--bf16", "torchrun -m mine --lr 1", "'no script'"])
def test_what_has_no_script_is_refused_with_what_to_give(line: str) -> None:
    with pytest.raises(LaunchLineError, match="whole command that starts the run"):
        read(line)


@pytest.mark.parametrize(
    "line",
    [
        "torchrun -m torchtitan.train --module llama3 --config llama3_debugmodel",
        "accelerate launch run_clm.py --model_name_or_path gpt2",
        "python -m verl.trainer.main_ppo trainer.nnodes=1",
        "megatron sft --model Qwen/Qwen3-30B-A3B",
        "ray job submit -- python3 train.py --rollout-batch-size 8",
        "deepspeed pretrain_gpt.py --deepspeed --deepspeed_config ds.json",
    ],
)
def test_what_trains_no_gpt_is_told_which_pages_serve_it(line: str) -> None:
    with pytest.raises(LaunchLineError, match=r"docs/graph_units.md and docs/clients.md$"):
        read(line)


def test_a_script_is_known_by_its_imports_and_none_by_a_path(tmp_path: Path) -> None:
    (script := tmp_path / "mine.py").write_text("from megatron.bridge.training import pretrain\n")
    with pytest.raises(LaunchLineError, match=r"megatron\.bridge: only lines"):
        read(f"torchrun {script}")
    assert read("torchrun /verl/pretrain_gpt.py --load /slime/torchtitan --fp8-recipe x").flags


COMMAND = """
import sys
from megatron_cg.tools.cli.main import main
code = main(sys.argv[1:])
sys.exit("torch was imported" if "torch" in sys.modules else code)
"""


NONE = ("plan -- python -m verl.trainer.main_ppo a=1", "plan -- torchrun b.py", "align --preset x")


@pytest.mark.parametrize("line", NONE)
def test_what_cannot_be_done_is_told_without_torch(line: str) -> None:
    done = python(COMMAND, *line.split())
    assert done.returncode == 2 and done.stderr.startswith("megatron-cg "), done.stderr
