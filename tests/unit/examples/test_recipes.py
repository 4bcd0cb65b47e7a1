"""The recipes, for every preset: good shell, and accepted by Megatron's rules and ours.

The flags are those that the scripts really give: they are run, with a program in Python's place
that writes its arguments down.
"""

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from megatron_cg.experts.install import use_device_counts
from megatron_cg.tools.align.presets import load_preset, preset_names
from tests.unit.grouped_linear import in_place_of_te

ROOT = Path(__file__).resolve().parents[3]
RUN, SUBMIT = (ROOT / "examples" / "recipes" / name for name in ("run.sh", "submit.sbatch"))
PEER = "--cg-moe-exchange"
TINY = [name for name in preset_names() if name.endswith("-tiny")]
RECORDER = f"""#!/bin/sh
[ "$1" = -c ] && exit 1
[ "$2" = megatron_cg.tools.align.presets ] && PYTHONPATH={ROOT} exec {sys.executable} "$@"
for word; do printf '%s\\n' "$word"; done > "$RECORD"
env > "$RECORD.env"
"""


@pytest.fixture
def shell(tmp_path: Path) -> Any:
    """Runs a script of a preset with the given variables; its exit status, error and folder."""
    program = tmp_path / "python"
    program.write_text(RECORDER)
    program.chmod(0o755)

    def run(path: Path, *words: str, **variables: str) -> subprocess.CompletedProcess[str]:
        environment = {"PATH": os.environ["PATH"], "PYTHON": str(program), **variables}
        environment |= {"RECORD": str(tmp_path / "record"), "GPUS_PER_NODE": "2"}
        return subprocess.run(
            ["bash", str(path), *words],
            env=environment,
            capture_output=True,
            text=True,
            check=False,
        )

    return run


def recorded(tmp_path: Path) -> tuple[list[str], dict[str, str]]:
    words = (tmp_path / "record").read_text().splitlines()
    lines = (tmp_path / "record.env").read_text().splitlines()
    return words, dict(line.split("=", 1) for line in lines if "=" in line)


def test_the_scripts_are_good_shell() -> None:
    scripts = [str(RUN), str(SUBMIT)]
    for script in scripts:
        assert os.access(script, os.X_OK)
        subprocess.run(["bash", "-n", script], check=True)
    if shutil.which("shellcheck"):
        subprocess.run(["shellcheck", *scripts], check=True)


@pytest.mark.parametrize(
    ("words", "variables", "message"),
    [
        (["--seed", "7"], {}, "name a preset first"),
        (["lama"], {"MOCK_DATA": "1"}, "there is no preset 'lama'"),
        (TINY[:1], {}, "set DATA_PATH to the prefix of a dataset"),
        (TINY[:1], {"DATA_PATH": "/nowhere/text"}, "there is no /nowhere/text.bin"),
        (TINY[:1], {"MOCK_DATA": "1", "NODES": "2"}, "for 2 nodes set RENDEZVOUS"),
        (TINY[:1], {"GRAPHS": "yes"}, "GRAPHS=yes is neither 0 nor 1"),
        (TINY[:1], {"GLOBAL_BATCH_SIZE": "08"}, "=08 is no whole number of 1 or more"),
        (
            ["llama-tiny"],
            {"MOCK_DATA": "1", "EXPERTS_IN_GRAPHS": "1"},
            "needs a MoE model, and llama-tiny is none",
        ),
    ],
)
def test_what_is_missing_is_asked_for(
    shell: Any, tmp_path: Path, words: list[str], variables: dict[str, str], message: str
) -> None:
    ended = shell(RUN, *words, **variables)
    assert ended.returncode == 2 and message in ended.stderr
    assert not (tmp_path / "record").exists()


def test_real_data_and_environment(shell: Any, tmp_path: Path) -> None:
    for suffix in ("bin", "idx"):
        (tmp_path / f"my text.{suffix}").touch()
    variables = {"DATA_PATH": f"{tmp_path}/my text", "OUTPUT": f"{tmp_path}/out"}
    variables |= {"TOKENIZER_MODEL": "some/model", "CUDA_DEVICE_MAX_CONNECTIONS": "1"}
    found = shell(RUN, TINY[0], "--seed", "7", EXPANDABLE_SEGMENTS="1", **variables)
    assert found.returncode == 0, found.stderr
    words, environment = recorded(tmp_path)
    assert words[words.index("--data-path") + 1] == f"{tmp_path}/my text"
    assert words[-2:] == ["--seed", "7"] and "--standalone" in words
    assert environment["PYTORCH_CUDA_ALLOC_CONF"] == "expandable_segments:True"
    assert environment["NCCL_GRAPH_REGISTER"] == "0"
    assert environment["CUBLASLT_HEURISTICS_CACHE_CAPACITY"] == "262144"
    assert "CUDA_DEVICE_MAX_CONNECTIONS" not in environment and "CUDNN_HOME" not in environment


SLURM = {
    "scontrol": "#!/bin/sh\nprintf 'node-a\\nnode-b\\n'\n",
    "srun": '#!/bin/sh\n[ "$1" = --kill-on-bad-exit=1 ] || exit 9\nshift\nexec "$@"\n',
}


def test_a_job_runs_the_same_script_on_its_nodes(shell: Any, tmp_path: Path) -> None:
    for name, text in SLURM.items():
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    job = {
        "PATH": f"{tmp_path}:{os.environ['PATH']}",
        "SLURM_JOB_ID": "7",
        "SLURM_NNODES": "2",
        "SLURM_JOB_NODELIST": "node-[a-b]",
        "SLURM_SUBMIT_DIR": str(ROOT),
    }
    assert "set DATA_PATH" in shell(SUBMIT, TINY[0], **job).stderr
    assert "this is a job: sbatch" in shell(SUBMIT, TINY[0], MOCK_DATA="1").stderr
    found = shell(SUBMIT, TINY[0], "--seed", "7", MOCK_DATA="1", **job)
    assert found.returncode == 0, found.stderr
    words, _ = recorded(tmp_path)
    start = words.index("--nnodes")
    assert words[start : start + 8] == [
        *("--nnodes", "2", "--rdzv-backend", "c10d"),
        *("--rdzv-endpoint", "node-a:29500", "--rdzv-id", "7"),
    ]
    assert words[-2:] == ["--seed", "7"] and words[words.index("--global-batch-size") + 1] == "16"


MOE = [name for name in preset_names() if "num-experts" in load_preset(name).flags]


@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize(
    ("name", "whole"), [*((name, "0") for name in preset_names()), *((name, "1") for name in MOE)]
)
def test_megatron_and_our_rules_accept_it(
    shell: Any, tmp_path: Path, accepted: Callable[..., Any], name: str, whole: str
) -> None:
    found = shell(RUN, name, MOCK_DATA="1", TENSOR_PARALLEL="2", EXPERTS_IN_GRAPHS=whole)
    assert found.returncode == 0, found.stderr
    words, _ = recorded(tmp_path)
    at = words.index("megatron_cg")
    assert words[:2] == ["-m", "torch.distributed.run"] and Path(words[at + 1]).is_file()
    assert "\n".join(load_preset(name).arguments()) in "\n".join(words)
    assert ("--moe-permute-fusion" in words) is (name in MOE)
    # Megatron refuses fused kernels without TE, which these tests do not have.
    unfused = [word for word in words if word != "--moe-permute-fusion"] + ["--no-rope-fusion"]
    with ExitStack() as undo:
        if whole == "1":
            undo.enter_context(in_place_of_te())
            undo.callback(use_device_counts())
        _, config = accepted(unfused[at + 2 :])
    captured = tuple(module.name for module in config.cuda_graph_modules)
    own = load_preset(name).scopes
    without_router = tuple(scope for scope in own if not scope.startswith("moe_"))
    assert captured == ((*without_router, "moe") if whole == "1" else own)


@pytest.mark.parametrize(
    ("preset", "capability", "words", "settings", "added"),
    [
        ("qwen3-moe-tiny", "9.0", (), {}, ["--cg-grouped-gemm"]),
        ("deepseek-v3", "9.0", (), {"EXPERT_PARALLEL": "2"}, ["--cg-grouped-gemm", PEER]),
        ("deepseek-v3", "9.0", (), {"EXPERT_PARALLEL": "4"}, []),
        ("qwen3-moe-tiny", "10.0", (), {}, []),
        ("qwen3-moe-tiny", "", (), {}, []),
        ("qwen3-moe-tiny", "9.0", ("--fp8-format", "hybrid"), {}, []),
        ("qwen3-moe-tiny", "9.0", (), {"EXPERTS_IN_GRAPHS": "0", "EXPERT_PARALLEL": "2"}, []),
        ("qwen3-moe-tiny", "10.0", (), {"EXPERTS_IN_GRAPHS": "1"}, ["--cg-grouped-gemm"]),
        ("mixtral-tiny", "9.0", (), {}, []),
        (
            "qwen3-moe-tiny",
            "9.0",
            (),
            {"EXPERT_PARALLEL": "2", "PEER_EXCHANGE": "0"},
            ["--cg-grouped-gemm"],
        ),
    ],
)
def test_whole_moe_layers_are_captured_by_default_where_that_was_measured_to_pay(
    shell: Any,
    tmp_path: Path,
    preset: str,
    capability: str,
    words: tuple[str, ...],
    settings: dict[str, str],
    added: list[str],
) -> None:
    """Groups of one node, which has two GPUs, then exchange tokens by peer memory."""
    driver = tmp_path / "nvidia-smi"
    answer = f"printf '{capability}\\n{capability}\\n'" if capability else "exit 9"
    driver.write_text(f"#!/bin/sh\n{answer}\n")
    driver.chmod(0o755)
    path = f"{tmp_path}:{os.environ['PATH']}"
    ended = shell(RUN, preset, *words, MOCK_DATA="1", PATH=path, **settings)
    assert ended.returncode == 0, ended.stderr
    given, _ = recorded(tmp_path)
    assert [word for word in given if word in ("--cg-grouped-gemm", PEER)] == added
    assert ("moe" in given) is bool(added)


def test_the_same_run_without_graphs(shell: Any, tmp_path: Path) -> None:
    runs = []
    for graphs in ("1", "0"):
        shell(RUN, TINY[0], MOCK_DATA="1", GRAPHS=graphs)
        runs.append(recorded(tmp_path)[0])
    start = runs[0].index("--cuda-graph-impl")
    end = runs[0].index("--mock-data")
    assert runs[1] == [*runs[0][:start], "--cuda-graph-impl", "none", *runs[0][end:]]
