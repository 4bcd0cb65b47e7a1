"""Changes of a launch line: what is mended, what is refused, and what fits."""

import json
import shlex
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from megatron_cg.arguments import schema
from megatron_cg.tools.align.presets import load_preset, preset_names
from megatron_cg.tools.launch_line import LaunchLineError
from megatron_cg.tools.plan.report import changes
from tests.unit.tools.conftest import Cli
from tests.unit.tools.plan.conftest import Plan, said

TRAINED = "--bf16 --lr 1e-4 --train-iters 9 --mock-data --tokenizer-type NullTokenizer"


def preset(name: str, more: str = "", launcher: str = "torchrun --nproc-per-node 2") -> str:
    return f"{launcher} train.py {shlex.join(load_preset(name).arguments())} {TRAINED} {more}"


@pytest.mark.parametrize("name", preset_names())
def test_every_preset_can_be_made_to_run(name: str, plan: Plan) -> None:
    found = plan(preset(name))
    assert found.accepted, said(found)
    assert any(layer.captured for layer in found.best.layers)
    assert changes(plan(str(found.best.line))) == []


SELECTIVE = "--recompute-granularity selective --recompute-modules"
FP8 = "--fp8-format hybrid --fp8-recipe tensorwise"
BOUNDS = [("", 27, "stash 1.5"), ("--cg-moe-stash 4", 23, "rows 1.5"), (FP8, 27, "rows 2")]
GROUPED = "--moe-grouped-gemm"
FULL = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
MENDED = [
    ("--optimizer-cuda-graph", "", "--optimizer-cuda-graph"),
    ("--cuda-graph-impl local --use-megatron-fsdp", "--cuda-graph-impl transformer_engine", ""),
    ("--external-cuda-graph --cuda-graph-scope attn", "--cuda-graph-modules attn", "--external"),
    ("--my-flag 1", "--my-flag 1", ""),
    ("--sft", "--no-create-attention-mask-in-dataloader", ""),  # its dataset asserts it
    ("--sft --reset-attention-mask", "--no-create-attention-mask-in-dataloader", "--reset-att"),
    ("--sft --reset-position-ids", "--sft", "--reset-position-ids"),
    ("--cuda-graph-modules [attn,mlp]", "--cuda-graph-modules attn mlp", "[attn"),
    ("--cuda-graph-scope=attn,", "--cuda-graph-modules attn", "scope"),
    ("--load $A --my-flag", '--load "$A"', "'$A"),
    ("--num-experts 8 --moe-layer-recompute", "attn moe_router", "--moe-layer-recompute"),
    (f"{FULL} --hidden-dropout 0.1", "--recompute-granularity selective", "--recompute-method"),
    (f"{FULL} --hidden-dropout 0.0", FULL.partition(" --recompute-m")[0], "selective"),
]
"""Flags, what the edited line has, and what it has not."""


@pytest.mark.parametrize(("given", "has", "has_not"), MENDED)
def test_what_graphs_cannot_have_is_changed_with_the_reason(
    given: str, has: str, has_not: str, plan: Plan
) -> None:
    found = plan(preset("llama", given))
    assert found.accepted, said(found)
    line = str(found.best.line).replace("\\\n    ", "")
    assert has in line and (not has_not or has_not not in line)
    assert all(change.reason for change in changes(found))
    assert changes(plan(str(found.best.line))) == []


@pytest.mark.parametrize(
    ("flags", "scopes"),
    [
        ("--transformer-impl local", "attn moe_router moe_preprocess"),
        ("--fp8-format hybrid", "attn moe_router"),
        ("--expert-model-parallel-size 2", "attn moe"),
        ("--moe-token-dispatcher-type flex", "attn moe_router"),
        ("--moe-router-load-balancing-type sinkhorn --moe-aux-loss-coeff 0", "attn"),
        ("--cuda-graph-modules attn moe_router moe_preprocess", "attn moe_router moe_preprocess"),
        ("--cuda-graph-modules moe", "moe"),
        ("--cuda-graph-modules moe --cg-grouped-gemm torch --cg-moe-exchange peer", "attn moe"),
        ("--moe-expert-capacity-factor 1.0 --moe-pad-expert-input-to-capacity", "attn moe"),
        ("--moe-expert-capacity-factor 1.0", "attn moe_router"),
        ("--sft", "attn moe"),
        ("--sft --attention-dropout 0.1", "moe"),
        ("--sft --no-rope-fusion", "moe"),
        ("--sft --context-parallel-size 2", "moe"),
        ("--log-max-attention-logit", "moe"),
        # Megatron's rules see the scopes as they are.
        (f"{SELECTIVE} core_attn --attention-dropout 0.1 --cuda-graph-modules moe", "moe"),
        (f"{SELECTIVE} moe --hidden-dropout 0.1", "attn moe_router moe_preprocess"),
        # One tensor-parallel rank has no sequence parallelism, whatever the line says.
        (f"{SELECTIVE} core_attn --hidden-dropout 0.1 --sequence-parallel", "attn moe"),
        (f"{SELECTIVE} core_attn --attention-dropout 0.1 --fp8-format hybrid", "moe_router"),
    ],
)
def test_scopes_are_chosen_unless_the_line_has_some_that_work(
    flags: str, scopes: str, plan: Plan
) -> None:
    found = plan(preset("qwen3-moe", flags))
    assert found.accepted, said(found)
    assert found.best.settings.run.cuda_graph_modules == tuple(scopes.split())
    by_torch = "moe" in scopes.split() and "capacity" not in flags
    assert (found.best.settings.graph.cg_grouped_gemm == "torch") is by_torch
    peer = by_torch and "--expert-model-parallel-size 2" in flags
    assert (found.best.settings.graph.cg_moe_exchange == "peer") is peer


def test_quantized_experts_are_in_graphs_by_cublas(
    plan: Plan, monkeypatch: pytest.MonkeyPatch
) -> None:
    line = preset("qwen3-moe", FP8)
    for stated in ("", " --cuda-graph-modules attn moe"):
        best = plan(line + stated).best.settings
        assert best.run.cuda_graph_modules == ("attn", "moe")
        assert best.graph.cg_grouped_gemm == "cublas"
        assert "cublas needs a newer cuBLASLt" in (notes := " ".join(best.notes))
        assert "activations, and FP8 or FP4 weights, are counted as in BF16" in notes
    monkeypatch.setattr(schema, "lacks_device_counts", lambda: "")
    assert "cuBLASLt" not in " ".join(plan(line).best.settings.notes)


@pytest.mark.parametrize("name", ["mixtral", "llama"])
def test_the_line_has_what_the_measured_runs_had(name: str, plan: Plan) -> None:
    best = plan(preset(name)).best
    assert best.line.has("--moe-permute-fusion") is (name == "mixtral")
    assert best.line.has("--overlap-grad-reduce") and best.line.has("--overlap-param-gather")
    assert "moe" not in best.settings.run.cuda_graph_modules or name == "mixtral"


STAGES = "--pipeline-model-parallel-size 4 --num-layers-per-virtual-pipeline-stage 1"
ASKED = {
    "--pipeline-model-parallel-size 2": ("2 pipeline stages are dropped", "--pipeline"),
    f"{STAGES} --defer-embedding-wgrad-compute": ("4 pipeline stages are dropped", "--defer"),
    f"{STAGES} --overlap-p2p-communication-warmup-flush": ("4 pipeline stages", "--overlap-p2p"),
    "--use-torch-fsdp2 --ckpt-format torch_dist": ("torch's FSDP2 is replaced", "--use-torch"),
    "--cuda-graph-impl local --use-megatron-fsdp": ("local graphs are replaced", "local"),
    "--optimizer-cpu-offload --use-precision-aware-optimizer --optimizer-offload-fraction 0.5": (
        "The optimizer's state stays on the GPUs, which share it. --optimizer-cpu-offload with",
        "-offload",
    ),
    "": ("DDP is replaced by Megatron-FSDP", "--none"),
}


@pytest.mark.parametrize("flags", ASKED)
def test_what_the_user_may_have_chosen_is_asked_about_first(flags: str, plan: Plan) -> None:
    found = plan(preset("llama", flags))
    text, (words, dropped) = said(found), ASKED[flags]
    assert found.accepted and dropped not in str(found.best.line)
    assert 0 < text.index("Do you want this?") < text.index(words) < text.index("Changes:")
    assert "Do you want this?" not in said(plan(str(found.best.line)))


@pytest.mark.parametrize(
    ("flags", "remedy"),
    [
        ("--sft --attention-dropout 0.1", "type --attention-dropout 0"),
        ("--sft --no-rope-fusion", "drop --no-rope-fusion"),
        ("--sft --attention-backend flash", "type --attention-backend fused"),
        ("--dataloader-inter-document-masking --context-parallel-size 2", "--context-parallel-s"),
        ("--log-max-attention-logit", "drop --qk-clip --log-max-attention-logit"),
        (f"{SELECTIVE} core_attn --attention-dropout 0.1", "activations or --recompute-gran"),
    ],
)
def test_attention_that_stays_eager_is_said_with_its_reason(
    flags: str, remedy: str, plan: Plan
) -> None:
    found = said(plan(preset("llama", flags)))
    asked = found[found.index("Do you want this?") : found.index("Changes:")]
    assert "Attention stays eager, because of " in asked and remedy in asked
    stated = f"{flags} --cuda-graph-impl transformer_engine --cuda-graph-modules mlp"
    assert "stays eager" not in said(plan(preset("llama", stated)))


def test_packs_that_are_too_large_for_deterministic_attention_leave_it_eager(plan: Plan) -> None:
    given = "--sft --deterministic-mode --seq-length {} --max-position-embeddings 65536"
    small, large = (plan(preset("llama", given.format(size))) for size in (4096, 8192))
    assert small.best.settings.run.cuda_graph_modules == ("attn", "mlp")
    assert large.best.settings.run.cuda_graph_modules == ("mlp",)
    assert "--deterministic-mode with packs of 8192 tokens" in said(large)


def test_experts_of_one_rank_are_warned_about(plan: Plan) -> None:
    def warns(flags: str) -> bool:
        return "each expert is on one rank" in said(plan(preset("qwen3-moe", flags)))

    given = "--expert-model-parallel-size 2 --micro-batch-size 1 --global-batch-size 4"
    assert warns(given)
    assert not warns(f"{given} --calculate-per-token-loss") and not warns("--global-batch-size 4")


@pytest.mark.parametrize("given", ["--cuda-graph-impl full_iteration", "--enable-cuda-graph"])
def test_a_graph_of_a_whole_iteration_is_not_replaced(given: str, plan: Plan) -> None:
    found = plan(preset("llama", f"{given} --cuda-graph-scope full_iteration"))
    assert not found.accepted and changes(found) == []
    assert "keep the line as it is" in said(found) and "87.3 ms" in said(found)


OFFLOAD = "--fine-grained-activation-offloading"
REFUSED = {
    "--fp16": ("fp16", "drop --fp16, and type --bf16"),
    f"{OFFLOAD} --offload-modules mlp_norm": ("activation-offloading", f"drop {OFFLOAD}"),
    "--num-attention-heads 7": ("megatron", "requires --hidden-size % --num-attention-heads == 0"),
    "--num-experts 4 --moe-layer-freq [1]*3 --moe-grouped-gemm": ("megatron", "each of 8 layers"),
    "--num-experts 9 --expert-model-parallel-size 3": ("megatron", "2 GPUs are not divisible"),
    "--num-distributed-optimizer-instances 3": ("megatron", "2 GPUs are not divisible"),
    "--micro-batch-size 3 --global-batch-size 8": ("megatron", "give a --global-batch-size"),
    "--fp8-format e4m3 --fp8-recipe mxfp8": ("gpu", "type --fp8-recipe blockwise, or plan a"),
    "--num-experts 4 --hybrid-layer-pattern M*-M*-M-": ("own-layers", "pattern that has no E"),
}


@pytest.mark.parametrize("flags", REFUSED)
def test_what_would_change_the_training_is_refused_with_the_remedy(flags: str, plan: Plan) -> None:
    found = plan(preset("llama", flags))
    assert not found.accepted and found.best.memory is None
    rule, words = REFUSED[flags]
    assert rule in {item.rule for item in found.best.settings.broken}
    text = said(found)
    assert text.index("Changes:") < text.index("Refused, also with these changes:")
    assert words in text


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ("--num-layers many", "many"),
        ("--hidden-size ${HIDDEN}", "as the shell expands it"),
        ("--cuda-graph-modules moe_rooter", "moe_rooter"),
        ("--yaml-cfg run.yaml", "on the command line"),
        (
            "--num-expert 8",
            "would refuse --num-expert: megatron-core 0.19.2 does not know it: did you mean --num",
        ),
        ("--use_megatron_fspd", "did you mean --use-megatron-fsdp?"),
        ("--step-batch-size-schedule 0:16 2B:32", "0:16 2B:32: quote a value that has spaces"),
    ],
)
def test_flags_that_cannot_be_read_are_an_error(flags: str, words: str, plan: Plan) -> None:
    with pytest.raises(LaunchLineError) as caught:
        plan(preset("llama", flags).replace("train.py", "pretrain_gpt.py"))
    assert words in str(caught.value)


def test_a_script_may_add_flags_unless_it_is_megatrons(plan: Plan, tmp_path: Path) -> None:
    line = preset("llama", "--num-expert 1")
    for script in (tmp_path / "train.py", tmp_path / "pretrain_gpt.py"):
        script.write_text("parser.add_argument('--num-expert')")
        assert "script's own: --num-expert 1" in said(plan(line.replace("train.py", str(script))))
    exported = "--export-model-type GPTModel --enable-gpt-oss --finetune-hf-dataset a=b"
    of_modelopt = plan(preset("llama", exported).replace("train.py", "pretrain_gpt.py"))
    assert of_modelopt.accepted and f"ModelOpt's: {exported}" in said(of_modelopt)
    with pytest.raises(LaunchLineError, match="would refuse --my-flag"):
        plan(preset("llama", "--my-flag").replace("train.py", "pretrain_gpt.py"))
    with pytest.raises(LaunchLineError, match=r"no --hidden-size: .* docs/graph_units.md"):
        plan("torchrun --nproc-per-node 8 train.py --use-checkpoint-args")
    assert "[@]}: give the line as the" in said(plan("torchrun --nproc-per-node 8 b.py ${M[@]}"))


@pytest.mark.parametrize(("memory", "captured"), [(20, "attn mlp"), (12.6, "attn"), (9, "")])
def test_less_memory_means_fewer_scopes_until_nothing_fits(
    memory: float, captured: str, plan: Plan
) -> None:
    found = plan(preset("llama", "--no-create-attention-mask-in-dataloader"), memory)
    assert found.accepted == bool(captured)
    if not found.accepted:
        assert "does not fit without graphs either" in said(found)
        return
    assert ("That is close" in said(found)) is (memory == 12.6)
    assert found.best.line.values("--cuda-graph-modules") == tuple(captured.split())
    assert changes(plan(str(found.best.line), memory)) == []


def test_without_graphs_a_line_keeps_its_own_recompute(plan: Plan) -> None:
    lines = [preset("llama", f"{FULL} --hidden-dropout {share}") for share in ("0", "0.1")]
    kept, dropped = (plan(line, 11) for line in lines)
    assert kept.accepted and kept.eager and dropped.eager and not dropped.accepted
    assert dropped.eager.total < 1.01 * kept.eager.total
    assert "Less is recomputed, so activations take more memory." in said(dropped)
    assert "without these changes and without graphs it fits" in said(dropped)
    blockwise = plan(preset("llama", "--fp8-format e4m3 --fp8-recipe blockwise --fp8-param-gather"))
    assert "Weights stay in BF16, and each GPU keeps FP8 copies" in said(blockwise)
    shared = "--tensor-model-parallel-size 2 --sequence-parallel --expert-model-parallel-size 4"
    found = plan(preset("qwen3-moe", shared, "torchrun --nproc-per-node 8"), 16)
    assert found.eager == plan(str(found.best.line), 16).eager


def test_without_graphs_layers_that_are_not_recomputed_keep_their_activations(plan: Plan) -> None:
    def kept(layers: int) -> Any:
        eager: Any = plan(preset("llama", f"{FULL.replace('uniform', 'block')[:-1]}{layers}")).eager
        return eager.terms["forward and backward passes"]["eager activations"]

    assert kept(2) > kept(6) > 0 and kept(2) + kept(6) == 2 * kept(4)


def test_what_keeps_experts_out_of_graphs_is_asked_about(plan: Plan) -> None:
    flex = said(plan(preset("qwen3-moe", "--moe-token-dispatcher-type flex").replace(GROUPED, "")))
    assert f"Add {GROUPED} --moe-token-dispatcher-type alltoall to capture whole" in flex
    assert "pad_expert_input" not in flex  # Megatron says so of our own change


def test_on_blackwell_experts_without_capacity_stay_eager(plan: Plan) -> None:
    found = plan(preset("qwen3-moe", "--moe-token-dispatcher-type flex"), 178)
    assert found.best.settings.run.cuda_graph_modules == ("attn", "moe_router")
    assert "on Hopper GPUs alone" in said(found) and "--cg-grouped-gemm" not in said(found)
    stated = plan(preset("qwen3-moe", "--cg-grouped-gemm torch"), 178)
    assert not stated.accepted and "torch on Blackwell: graphs hold" in said(stated)
    assert "--cg-grouped-gemm torch needs Hopper GPUs" in said(plan(preset("qwen3-moe")))


def test_layers_of_prediction_have_names_of_their_own(plan: Plan) -> None:
    found = plan(preset("llama", "--mtp-num-layers 2"))
    assert [layer.name for layer in found.best.layers][-3:] == ["7", "MTP 0", "MTP 1"]
    assert "0 to 7, MTP 0, MTP 1 (attention + MLP)" in said(found)
    once = plan(preset("llama", "--mtp-num-layers 2 --mtp-use-repeated-layer"))
    hybrid = plan(preset("mamba-hybrid").replace("M-M-MM*-", "M-M-MM*-/*-/*-"))
    for found, names in ((once, ["7", "MTP 0"]), (hybrid, ["MTP 0", "MTP 1"])):
        assert found.accepted and [layer.name for layer in found.best.layers[-2:]] == names
        assert not found.best.layers[-1].captured


def test_the_command_prints_the_plan(cli: Cli) -> None:
    line = shlex.split(preset("llama-tiny", launcher="python"))
    ended = cli("plan --gpu-memory 40 --gpus 4 --", *line)
    assert ended.code == 0 and "python -m megatron_cg train.py" in ended.out
    assert ended.out.startswith("train.py on 4 GPUs")
    ended = cli("plan --gpu-memory 1 --gpus 4 --", *line)
    assert ended.code == 1 and "does not fit" in ended.out
    ended = cli("plan --json --gpus 4 --", *line)
    facts = json.loads(ended.out)
    assert facts["accepted"] and facts["command"][:4] == ["python", "-m", "megatron_cg", "train.py"]
    assert facts["memory"]["total"] < facts["room"] and facts["changes"] and facts["captured"]["0"]
    for words, why in ((["torchrun"], "whole command"), (line, "give --gpus N")):
        ended = cli("plan --", *words)
        assert ended.code == 2 and why in ended.err


def test_a_stated_kernel_and_its_exchange_are_kept_where_they_can_be(plan: Plan) -> None:
    graphs = "--cuda-graph-modules attn moe --expert-model-parallel-size 2"
    stated = f"--cg-moe-exchange peer --cg-grouped-gemm cublas {graphs}"
    kept = plan(preset("qwen3-moe", stated)).best
    assert not {"--cg-grouped-gemm", "--cg-moe-exchange"}.intersection(kept.reasons)
    assert plan(preset("qwen3-moe", "--cg-grouped-gemm cublas")).best.settings.graph == replace(
        plan(preset("qwen3-moe")).best.settings.graph, cg_grouped_gemm="cublas"
    )
    many = plan(preset("qwen3-moe", f"{stated} --num-experts 256"))
    assert "takes 64 at most" in said(many)
    assert many.best.settings.graph.cg_grouped_gemm == "torch"
    apart = plan(preset("qwen3-moe", stated, "torchrun --nnodes 2 --nproc-per-node 1"))
    assert "peer memory is of one" in said(apart)
    assert apart.best.settings.graph.cg_moe_exchange == "nccl"
    layers = plan(preset("qwen3-moe", "--cg-layers attn:0-3 moe:0-3")).best.settings.graph
    assert layers.cg_layers == ("attn:0-3", "moe:0-3")
    rows = "--cg-moe-rows 1.5 --cg-moe-exchange nccl --cg-layers attn:0-3 moe:0-3"
    graph = plan(preset("qwen3-moe", f"{rows} --expert-model-parallel-size 2")).best.settings.graph
    assert (graph.cg_moe_rows, graph.cg_moe_exchange) == (1.5, "nccl")
    assert graph.cg_layers == ("attn:0-3", "moe:0-3")
    te = plan(preset("qwen3-moe", "--cg-grouped-gemm te")).best
    assert te.settings.run.cuda_graph_modules == ("attn", "moe_router", "moe_preprocess")
    assert te.line.has("--cg-grouped-gemm")


@pytest.mark.parametrize(("more", "room", "bound"), BOUNDS)
def test_a_stash_is_tried_before_fewer_rows(more: str, room: int, bound: str, plan: Plan) -> None:
    flags, eight = f"--expert-model-parallel-size 8 {more}", "torchrun --nproc-per-node 8"
    new = said(plan(preset("qwen3-moe", flags, eight), room))
    trained = said(plan(preset("qwen3-moe", f"{flags} --load checkpoints", eight), room))
    assert f"+ --cg-moe-{bound} " in trained and "makes it fit. Steps in which a rank" in trained
    # In FP8 it is refused.
    assert ("With full recompute layers need less" in trained) is (more != FP8)
    assert ("With full recompute layers need less" in new) is (more != FP8)
    assert (f"+ --cg-moe-{bound} " in new) is bound.startswith("stash")


def test_with_a_stash_one_layer_at_a_time_has_room_for_any_routing(plan: Plan) -> None:
    def pool(more: str) -> Any:
        four = "torchrun --nproc-per-node 4"
        best = plan(preset("qwen3-moe", f"--expert-model-parallel-size 4 {more}", four), 149).best
        assert best.memory is not None and best.layers[-1].holds("experts")
        return best.memory.terms["graphs' pool"], len(best.layers)

    (without, layers), (kept, _) = pool(""), pool("--cg-moe-stash 1")
    less = without["saved activations"] - kept["saved activations"]
    once = kept["gradients and workspace"] - without["gradients and workspace"]
    # Any routing has four times the average of rows.
    assert once > 0 and less * 4 == once * 3 * layers
