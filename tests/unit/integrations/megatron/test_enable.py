"""What ``enable()`` changes in Megatron, that ``disable()`` undoes it, and a user's training loop.

Whole trainings of the latter kind are in ``tests/unit/tape/test_own_loop.py``.
"""

import argparse
import gc
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from megatron.core import parallel_state
from megatron.core.transformer import cuda_graphs
from megatron.core.transformer.cuda_graphs import TECudaGraphHelper
from megatron.core.transformer.experimental_attention_variant.dsa import DSAIndexerLossAutoScaler
from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler
from megatron.training import arguments, training

import megatron_cg
from megatron_cg.__main__ import main
from megatron_cg.arguments.schema import GraphArguments
from megatron_cg.capture.session import open_sessions
from megatron_cg.consensus.decision import AgreementError, Kind
from megatron_cg.consensus.exchange import Agreement
from megatron_cg.errors import ConfigurationError
from megatron_cg.experts.install import DeviceDispatcher
from megatron_cg.integrations.megatron import patches
from megatron_cg.integrations.megatron.helper import FsdpHelper
from megatron_cg.tape.training_plan import CpuModelConfig
from megatron_cg.upstream.patch import applied
from tests.unit.counted import expect
from tests.unit.interpreted import ROOT, run
from tests.unit.one_mask import OneMask
from tests.unit.recompute.test_full_recompute import config
from tests.unit.trainers import microbatch_of, new_trainer

LENGTH, LAYERS = 16, 2


@pytest.fixture
def trainer(one_rank: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.setattr("megatron_cg.integrations.call_arguments.backend_of", lambda _: OneMask())
    model = CpuModelConfig(layers=LAYERS, graph_modules=("attn", "mlp"))
    megatron_cg.enable(backend="tape")
    with microbatch_of(2):
        yield new_trainer(model)
        megatron_cg.disable()


def helper_for(trainer: Any, **options: Any) -> Any:
    given = {"seq_length": LENGTH, "micro_batch_size": 2, "optimizers": [trainer._optimizer]}
    config = trainer.model.config
    return TECudaGraphHelper(model=[trainer.model], config=config, **given | options)


def enabled() -> Any:
    return patches._enabled


def ours() -> FsdpHelper:
    """The helper whose methods the last one of Megatron's has."""
    made: FsdpHelper = enabled().helpers[-1]
    return made


def test_steps_are_followed_by_the_optimizer(trainer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    helper = helper_for(trainer)
    trainer.step()
    helper.create_cudagraphs()
    helper.cuda_graph_set_manual_hooks()
    session: Any = ours().session
    for _ in range(3):
        trainer.step()
    expect(session.counters, captured=LAYERS, replayed=3 * LAYERS, eager=0, mismatched=0)
    voted: list[Any] = []
    monkeypatch.setattr(Agreement, "agree", lambda _self, kind, _vote: voted.append(kind))
    helper.delete_cuda_graphs()
    assert voted == [Kind.DELETION]  # All ranks delete their graphs, or none does.
    trainer.step()
    expect(session.counters, replayed=3 * LAYERS)


def test_a_broken_rule_ends_the_run_before_anything_is_made(trainer: Any) -> None:
    trainer.model.config.gradient_accumulation_fusion = True
    step = trainer._optimizer.step
    with pytest.raises(ConfigurationError, match=r"set \w+Config.gradient_accumulation_fusion=F"):
        helper_for(trainer)
    with pytest.raises(ConfigurationError, match=r"TECudaGraphHelper\(..., optimizers="):
        helper_for(trainer, optimizers=[])
    assert trainer._optimizer.step == step
    enabled().checked.append(trainer.model.config)  # as when Megatron-Bridge's run was checked
    helper_for(trainer)
    assert ours().helper.config is trainer.model.config


def test_ranks_meet_before_anything_is_made(trainer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def differs(_agreement: Agreement, settings: Any) -> None:
        raise AgreementError(f"{settings['call']} {settings['verify_interval']}")

    monkeypatch.setattr(Agreement, "require_same", differs)
    megatron_cg.enable(verify_interval=3)
    before = enabled().helpers[:], trainer._optimizer.step, applied()
    with pytest.raises(AgreementError, match=r"megatron_cg\.enable 3"):
        helper_for(trainer)
    assert (enabled().helpers, trainer._optimizer.step, applied()) == before


def test_settings_of_enable_hold_for_helpers_that_come_after(trainer: Any, tmp_path: Path) -> None:
    helper_for(trainer)
    first = ours().given
    megatron_cg.enable(verify_interval=2, layers="attn:0")
    megatron_cg.enable(on_failure="eager")
    helper_for(trainer)
    expected = GraphArguments(
        cg_verify_interval=2, cg_layers=("attn:0",), cg_on_failure="eager", cg_backend="tape"
    )
    assert (first, ours().given) == (GraphArguments(cg_backend="tape"), expected)
    megatron_cg.enable(moe_rows=1.25)
    with pytest.raises(
        ConfigurationError, match=r"\(moe_rows=1.25\) in a run whose graphs hold no"
    ):
        helper_for(trainer)
    megatron_cg.enable(record=tmp_path)
    with pytest.raises(ConfigurationError, match="record in a loop of your own"):
        helper_for(trainer)
    megatron_cg.disable()
    assert patches._enabled is None


def test_a_helper_that_nobody_holds_replays_until_the_end(trainer: Any) -> None:
    helper_for(trainer)
    trainer.step()
    ours().capture()
    gc.collect()
    session: Any = ours().session
    trainer.step()
    expect(session.counters, replayed=LAYERS)
    megatron_cg.disable()
    trainer.step()
    expect(session.counters, replayed=LAYERS)


def test_a_second_helper_of_a_model_replaces_the_first(trainer: Any) -> None:
    step = trainer._optimizer.step
    helper_for(trainer).create_cudagraphs()
    first = ours()
    helper_for(trainer)
    second: Any = ours()
    assert first.session is None and open_sessions() == 0
    trainer.step()
    second.capture()
    trainer.step()
    expect(second.session.counters, captured=LAYERS, replayed=LAYERS, eager=0)
    second.close()
    second.close()
    assert open_sessions() == 0 and trainer._optimizer.step == step


def test_the_loss_scale_can_be_set_after_a_capture_before_the_first_step(
    trainer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    parallel_state.destroy_model_parallel()
    scalers: list[Any] = [MoEAuxLossAutoScaler, DSAIndexerLossAutoScaler]
    for scaler in scalers:
        monkeypatch.setattr(scaler, "main_loss_backward_scale", None)
    scopes = ("attn", "moe_router")
    trainer = new_trainer(CpuModelConfig(layers=LAYERS, experts=4, graph_modules=scopes))
    helper_for(trainer).create_cudagraphs()
    for scaler in scalers:
        made = scaler.main_loss_backward_scale
        scaler.set_loss_scale(torch.ones(1) / 2)
        assert made is scaler.main_loss_backward_scale and float(made) == 0.5
    trainer.step()
    expect(ours().controller.counters, captured=LAYERS, replayed=LAYERS, mismatched=0)


def test_without_fsdp_a_helper_is_megatrons(trainer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_graphs, "HAVE_TE_GRAPHS", True)
    monkeypatch.setattr(TECudaGraphHelper, "_discover_layers", lambda self: None)
    plain = trainer.model.module.module
    helper = TECudaGraphHelper([plain], trainer.model.config, LENGTH, 2)
    assert helper.model == [plain] and not enabled().helpers
    monkeypatch.setattr(trainer.model.config, "recompute_granularity", "full")
    with pytest.raises(ConfigurationError, match=r"full, and graphs .* not under Megatron-FSDP"):
        TECudaGraphHelper([plain], trainer.model.config, LENGTH, 2)
    monkeypatch.undo()
    plain.token_dispatcher = DeviceDispatcher.__new__(DeviceDispatcher)
    with pytest.raises(ConfigurationError, match=r"dropless experts .* not under Megatron-FSDP"):
        TECudaGraphHelper([plain], trainer.model.config, LENGTH, 2)


@pytest.fixture(autouse=True)
def undone() -> Iterator[None]:
    yield
    megatron_cg.disable()


def parse(*words: str) -> argparse.Namespace:
    parser = arguments.add_megatron_arguments(argparse.ArgumentParser(allow_abbrev=False))
    namespace: argparse.Namespace = parser.parse_args(words)
    return namespace


def test_enable_adds_our_group_and_disable_takes_it_off() -> None:
    with pytest.raises(SystemExit):
        parse("--cg-layers", "attn:0-")
    megatron_cg.enable()
    megatron_cg.enable()
    assert parse("--cg-layers", "attn:0-").cg_layers == ["attn:0-"]
    megatron_cg.disable()
    megatron_cg.disable()
    with pytest.raises(SystemExit):
        parse("--cg-layers", "attn:0-")


def test_a_run_without_graphs_keeps_megatrons_helper(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arguments, "validate_args", lambda args, defaults=None: args)
    megatron_cg.enable()
    args = parse("--use-megatron-fsdp")
    assert arguments.validate_args(args, {}) is args
    assert training.TECudaGraphHelper is TECudaGraphHelper


def test_experts_stay_as_they_are_by_default(monkeypatch: pytest.MonkeyPatch) -> None:
    used: list[Any] = []

    def use(*_: Any, gemm: str, **_named: Any) -> Any:
        used.append(gemm)
        return lambda: None

    monkeypatch.setattr("megatron_cg.experts.install.use_device_counts", use)
    for gemm in ("te", "cublas", "torch"):
        given = GraphArguments(cg_grouped_gemm=gemm)
        patches._build_models_for(given, full_recompute=False)()
    assert used == ["cublas", "torch"]


GRAPHS = (
    "--use-megatron-fsdp --fsdp-double-buffer --fsdp-db-use-persist-buf-on-alloc-fail --bf16 "
    "--num-layers 4 --no-gradient-accumulation-fusion --cuda-graph-impl transformer_engine "
    "--attention-dropout 0 --hidden-dropout 0 --cuda-graph-modules attn"
).split()


@pytest.fixture
def our_rules_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Megatron accepts all flags, and Transformer Engine seems to be installed."""
    monkeypatch.delenv("CUDA_DEVICE_MAX_CONNECTIONS", raising=False)
    monkeypatch.setattr(arguments, "validate_args", lambda args, defaults=None: args)
    monkeypatch.setattr("megatron_cg.arguments.schema.installed_version", lambda _name: "2.20.2")


def test_settings_of_enable_are_the_defaults_of_flags(our_rules_alone: None) -> None:
    megatron_cg.enable(verify_interval=5, layers=["attn:1"], fast_path=False)
    arguments.validate_args(parse("--use-megatron-fsdp"), {})  # a run without graphs
    arguments.validate_args(parse(*GRAPHS, "--cg-layers", "attn:2"), {})
    assert patches._enabled is not None
    assert patches._enabled.settings == GraphArguments(
        cg_verify_interval=5, cg_layers=("attn:2",), cg_no_fsdp_fast_path=True
    )
    with pytest.raises(ConfigurationError, match="no effect"):
        arguments.validate_args(parse("--use-megatron-fsdp", "--cg-on-failure", "eager"), {})


@pytest.mark.parametrize("granularity", ["full", "selective"])
def test_a_run_that_recomputes_may_build_its_model(our_rules_alone: None, granularity: str) -> None:
    megatron_cg.enable()
    words = [*GRAPHS, "mlp", "--recompute-granularity", granularity]
    arguments.validate_args(parse(*words), {})
    if granularity == "full":
        assert config().recompute_granularity == "full"
        megatron_cg.disable()
    with pytest.raises(AssertionError, match="only supported with full iteration"):
        config()


def test_a_bad_run_ends_before_megatron_validates(monkeypatch: pytest.MonkeyPatch) -> None:
    reached: list[Any] = []
    monkeypatch.setattr(
        arguments, "validate_args", lambda args, defaults=None: reached.append(args)
    )
    megatron_cg.enable()
    words = [word for word in GRAPHS if word != "--fsdp-double-buffer"]
    words.append("--optimizer-cuda-graph")
    with pytest.raises(ConfigurationError) as error:
        arguments.validate_args(parse(*words), {})
    assert "--fsdp-double-buffer" in str(error.value) and "--optimizer-cuda" in str(error.value)
    assert reached == []


@pytest.mark.parametrize("options", [[], ["-P"]])
def test_the_launcher_gives_a_script_the_path_of_python(options: list[str], tmp_path: Path) -> None:
    (tmp_path / "scripts").mkdir()
    (tmp_path / "scripts" / "train.py").write_text("import sys; print(sys.path[:5])")
    (tmp_path / "link.py").symlink_to("scripts/train.py")
    # A third of the time that Megatron's import takes is that of torch's compiler.
    environment = {"PYTHONPATH": str(ROOT), "TORCHDYNAMO_DISABLE": "1"}
    plain, ours = (
        run(*options, *words, "link.py", folder=tmp_path, **environment).stdout
        for words in ((), ("-m", "megatron_cg"))
    )
    assert plain == ours and (f"{tmp_path}/scripts'" in plain) is not bool(options)


def test_the_launcher_runs_a_script_as_python_would(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "beside.py").write_text("word = 'found'\n")
    script = tmp_path / "script.py"
    script.write_text(
        "import sys, beside\n"
        "from megatron_cg.integrations.megatron import patches\n"
        "print(__name__, sys.argv[1:], beside.word, patches._enabled is not None)\n"
    )
    monkeypatch.setattr(sys, "argv", ["megatron_cg", str(script), "--lr", "1"])
    monkeypatch.setattr(sys, "path", list(sys.path))
    cache = "CUBLASLT_HEURISTICS_CACHE_CAPACITY"
    monkeypatch.setenv(cache, "5")
    main()
    assert capsys.readouterr().out == "__main__ ['--lr', '1'] found True\n"
    assert patches._enabled is None and os.environ[cache] == "5"
    monkeypatch.delenv(cache)
    monkeypatch.setattr(sys, "argv", ["megatron_cg", str(script)])
    main()
    assert os.environ[cache] == "262144"
