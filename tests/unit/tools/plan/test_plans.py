"""Whole plans of every preset and of changes to them; one process makes them all."""

from __future__ import annotations

from argparse import Namespace
from itertools import pairwise

import pytest

from megatron_cg.tools.align.presets import load_preset, preset_names
from megatron_cg.tools.cli import plan as command
from megatron_cg.tools.plan.planned_samples import masks_given
from megatron_cg.tools.plan.process import Plan, make_plans
from megatron_cg.tools.plan.request import Request, read_request
from megatron_cg.tools.plan.settings import fewest_gpus
from megatron_cg.tools.plan.worth import measured_rows
from tests.unit.tools.plan.read_plans import on_preset, shown

SELECTED = ("attn:0-1", "moe_router:1-")
HUGGING_FACE = "--tokenizer-type HuggingFaceTokenizer --tokenizer-model somebody/model"
RECOMPUTED = "--recompute-granularity full --recompute-method"
CAPACITY = "--moe-expert-capacity-factor 1.0 --moe-pad-expert-input-to-capacity"
OVERLAP = "--moe-shared-expert-overlap"


def dropless(*flags: str) -> Request:
    """Graphs with whole MoE layers whose experts drop nothing."""
    return read_request("qwen3-moe-tiny", flags, scopes=["attn", "moe"], cg_grouped_gemm="torch")


def with_a_tokenizer(name: str) -> Request:
    """The preset without ``--vocab-size``, which its tokenizer then knows alone."""
    words = list(read_request(name, HUGGING_FACE.split()).words)
    at = words.index("--vocab-size")
    return Request("x", (*words[:at], *words[at + 2 :]), 2)


NOT_FUSED = "--no-gradient-accumulation-fusion"
PACKS = ["--sft", "--micro-batch-size", "1"]
REQUESTS = {
    **{name: read_request(name, []) for name in preset_names()},
    "many ranks": on_preset("--global-batch-size 65536", nproc=32_768),
    "a tokenizer": with_a_tokenizer("llama-tiny"),
    "selected": read_request("qwen3-moe-tiny", [], cg_layers=SELECTED),
    "dropless, one rank": dropless(),
    "dropless, two ranks": dropless("--expert-model-parallel-size", "2"),
    "dropless, average": dropless("--expert-model-parallel-size", "2", "--cg-moe-rows", "1"),
    "dropless, bounded": dropless("--expert-model-parallel-size", "2", "--cg-moe-rows", "1.5"),
    "dropless, peers": dropless("--expert-model-parallel-size", "2", "--cg-moe-exchange", "peer"),
    "whole layers": on_preset("", scopes=[]),
    "recomputed": on_preset(f"{RECOMPUTED} uniform --recompute-num-layers 2", scopes=[]),
    "first recomputed": on_preset(f"{RECOMPUTED} block --recompute-num-layers 1", scopes=[]),
    "twice as long": on_preset("--seq-length 1024 --max-position-embeddings 1024"),
    "more microbatches": on_preset("--global-batch-size 16"),
    "no warmup": on_preset("--cuda-graph-warmup-steps 1"),
    "fp8": on_preset("--fp8-format hybrid"),
    "fp32": Request("x", tuple(w for w in on_preset("").words if w != "--bf16"), 2),
    "context parallel": on_preset("--context-parallel-size 2"),
    "experts": read_request("mixtral-tiny", CAPACITY.split(), scopes=["attn", "moe"]),
    "tensor parallel": on_preset("--tensor-model-parallel-size 2 --sequence-parallel"),
    "overlapped": read_request("deepseek-v3-tiny", [OVERLAP]),
    "overlapped, dropless": read_request(
        "deepseek-v3-tiny", [OVERLAP], scopes=["attn", "moe"], cg_grouped_gemm="torch"
    ),
    "repeated prediction": on_preset("--mtp-num-layers 2 --mtp-use-repeated-layer"),
    "recorded": read_request(
        "qwen3-moe-tiny", ["--moe-enable-routing-replay"], scopes=["moe_router"]
    ),
    "packs": read_request("llama-tiny", PACKS, scopes=["mlp"]),
    "packs in graphs": read_request("llama-tiny", [*PACKS, "--cg-pack-sequences", "8"]),
    "again": read_request("deepseek-v3-tiny", []),
    "fused": Request("x", tuple(w for w in on_preset("").words if w != NOT_FUSED), 2),
}


@pytest.fixture(scope="module")
def plans() -> dict[str, Plan]:
    return dict(zip(REQUESTS, make_plans(list(REQUESTS.values()), timeout=3600.0), strict=True))


@pytest.mark.parametrize("name", preset_names())
def test_every_preset_plans(plans: dict[str, Plan], name: str) -> None:
    plan = plans[name]
    assert command.exit_code(plan) == command.READY, plan
    graphed = [row for row in plan["layers"] if "memory" in row]
    assert len(graphed) == plan["graphs"]["captured"] > 0
    scopes = {scope for row in graphed for scope in row["scopes"]}
    assert scopes == set(load_preset(name).scopes)
    for row in plan["layers"]:
        assert row["captured"] or row["eager"]
        assert all(part["reason"] for part in row["eager"])
    assert plan["kernels"]["saved_per_step"] > 0
    assert "graph_memory" in plan and plan["fsdp"]["totals"]["double_buffers"]


@pytest.mark.parametrize("name", preset_names())
def test_terms_of_the_memory_add_up(plans: dict[str, Plan], name: str) -> None:
    memory = plans[name]["graph_memory"]
    rows = [row["memory"] for row in plans[name]["layers"] if "memory" in row]
    for term in ("static_inputs", "saved_activations", "outputs"):
        assert memory[term] == sum(row[term] for row in rows) > 0
    inside = ("saved_activations", "outputs", "gradients_and_workspace", "torch_gemm_workspace")
    assert memory["pool_peak"] == sum(memory[term] for term in inside)
    assert memory["pool_reserved"] == memory["pool_peak"] + memory["fragmentation"]
    outside = memory["static_inputs"] + memory["output_gradients"] + memory["peer_memory"]
    assert memory["total"] == memory["pool_reserved"] + outside
    assert all(value >= 0 for value in memory.values())


def test_gradient_accumulation_fusion_is_off_while_graphs_live(plans: dict[str, Plan]) -> None:
    """So a plan counts what it counts without the fusion, and needs no Apex."""
    fused, plain = plans["fused"], plans["llama-tiny"]
    assert [row["memory"] for row in fused["layers"]] == [row["memory"] for row in plain["layers"]]
    assert fused["graph_memory"] == plain["graph_memory"]
    assert any("needs Apex" in note for note in fused["notes"])
    assert not any("Apex" in note for note in plain["notes"])


@pytest.mark.parametrize("name", preset_names())
def test_tables_fit_their_width(plans: dict[str, Plan], name: str) -> None:
    text = shown(plans[name])
    assert max(map(len, text.splitlines())) <= command.WIDTH
    for part in ("What is captured", "Static inputs", "Memory of one graph", "Megatron-FSDP's"):
        assert part in text


def test_recomputed_layers_keep_no_activations_and_run_twice(plans: dict[str, Plan]) -> None:
    plain, every, first = (
        plans[name]["layers"] for name in ("whole layers", "recomputed", "first recomputed")
    )
    saved = [row["memory"]["saved_activations"] for row in plain]
    assert len(saved) > 1 and min(saved) > 0
    assert [row["memory"]["saved_activations"] for row in every] == [0] * len(saved)
    kept = [row["memory"]["saved_activations"] for row in first]
    assert kept[0] == 0 and min(kept[1:]) > 0
    for row, alone in zip(every, plain, strict=True):
        kernels, once = row["kernels"], alone["kernels"]
        assert kernels["forward"] == once["forward"]
        assert kernels["backward"] == once["backward"] + once["forward"]
        assert kernels["replay"] == once["replay"]
    peaks = [plans[name]["graph_memory"]["pool_peak"] for name in ("recomputed", "whole layers")]
    assert peaks[0] < peaks[1]


def test_a_plan_says_whether_graphs_are_likely_to_pay(plans: dict[str, Plan]) -> None:
    for row in measured_rows():
        plan = plans[row["shape"]]
        # The rows have what a plan of their shape tells.
        assert plan["model"]["work_per_layer"] == row["work_per_layer"]
        assert plan["model"]["kind"] == row["kind"]
        assert plan["worth"]["verdict"] == "likely"
        assert plan["worth"]["row"]["shape"] == row["shape"]
        assert plan["worth"]["text"] in " ".join(shown(plan).split())
    verdicts = {"llama-tiny", "mixtral-tiny", "mamba-hybrid-tiny", "fp8", "fp32"}
    assert {plans[name]["worth"]["verdict"] for name in verdicts} == {"unknown"}
    assert "No hybrid model" in plans["mamba-hybrid-tiny"]["worth"]["text"]
    assert "in FP8" in plans["fp8"]["worth"]["text"] and "in FP32" in plans["fp32"]["worth"]["text"]


def test_work_of_a_layer_follows_tokens_experts_and_tensor_parallel(
    plans: dict[str, Plan],
) -> None:
    work = {
        name: plan["model"]["work_per_layer"] for name, plan in plans.items() if "model" in plan
    }
    # Tokens: of the sequence, and of the part of it that one GPU has.
    assert work["context parallel"] == work["llama-tiny"] / 2
    assert 0.5 <= work["tensor parallel"] / work["llama-tiny"] < 0.6
    assert work["more microbatches"] == work["many ranks"] == work["llama-tiny"]
    # Of its experts, a token uses the top k alone.
    model = plans["mixtral-tiny"]["model"]
    tokens = model["micro_batch_size"] * model["sequence_length"]
    assert work["mixtral-tiny"] < tokens * model["parameters_on_rank_0"] / model["layers"]


def test_peer_memory_takes_the_place_of_padding_that_is_sent(plans: dict[str, Plan]) -> None:
    collective, peers = (plans[name] for name in ("dropless, two ranks", "dropless, peers"))
    for one, other in zip(peers["layers"], collective["layers"], strict=True):
        assert one["kernels"] == other["kernels"]
    one, other = peers["graph_memory"], collective["graph_memory"]
    assert one["peer_memory"] > 0 == other["peer_memory"]
    assert one["pool_peak"] < other["pool_peak"]


def test_layers_in_one_row_follow_each_other(plans: dict[str, Plan]) -> None:
    text = shown(plans["mamba-hybrid-tiny"])
    titles = ("Static inputs of a graph", "Memory of one graph", "Estimated memory")
    for title, following in pairwise(titles):
        lines = text[text.index(title) : text.index(following)].splitlines()
        numbers = [line.split()[0] for line in lines if line[1:2].isdecimal()]
        assert numbers == ["0-1", "4-5"]


def test_experts_say_what_lets_a_graph_hold_them(plans: dict[str, Plan]) -> None:
    (reason,) = {
        part["reason"]
        for row in plans["qwen3-moe-tiny"]["layers"]
        for part in row["eager"]
        if part["part"] == "experts"
    }
    assert reason == (
        "tokens per expert differ from step to step; moe can capture them with "
        "--cg-grouped-gemm torch, or if each expert drops and pads to a capacity"
    )


def test_a_model_in_fp32_is_planned_in_fp32(plans: dict[str, Plan]) -> None:
    plan, narrow = plans["fp32"], plans["llama-tiny"]
    assert command.exit_code(plan) == command.READY, plan
    (hidden,) = {
        (entry["dtype"], entry["bytes"])
        for row in plan["layers"]
        for entry in row["static_inputs"]
        if entry["name"] == "hidden_states"
    }
    assert hidden == ("float32", 2 * narrow["layers"][0]["static_inputs"][0]["bytes"])
    for term in ("saved_activations", "outputs"):
        assert plan["graph_memory"][term] > narrow["graph_memory"][term]


def test_a_plan_does_not_depend_on_those_before_it(plans: dict[str, Plan]) -> None:
    assert plans["again"] == plans["deepseek-v3-tiny"]


def test_ranks_are_alike_however_many_there_are(plans: dict[str, Plan]) -> None:
    many, few = plans["many ranks"], plans["llama-tiny"]
    assert many["gpus"] == 32_768 and command.exit_code(many) == command.READY
    assert many["graph_memory"] == few["graph_memory"] and many["layers"] == few["layers"]


@pytest.mark.parametrize(
    ("tensor", "context", "expert", "fewest"), [(1, 1, 1, 2), (2, 1, 3, 6), (2, 2, 4, 4)]
)
def test_the_fewest_gpus_are_a_multiple_of_all_sizes(
    tensor: int, context: int, expert: int, fewest: int
) -> None:
    args = Namespace(
        tensor_model_parallel_size=tensor,
        context_parallel_size=context,
        expert_model_parallel_size=expert,
        expert_tensor_parallel_size=None,
        pipeline_model_parallel_size=1,
    )
    assert fewest_gpus(args) == fewest


def test_a_vocabulary_that_only_a_tokenizer_knows_is_counted_as_some(
    plans: dict[str, Plan],
) -> None:
    known, unknown = plans["llama-tiny"], plans["a tokenizer"]
    assert command.exit_code(unknown) == command.READY
    assert unknown["graph_memory"] == known["graph_memory"]
    (note,) = [note for note in unknown["notes"] if "vocabulary" in note]
    assert "131,072" in note and "--vocab-size" in note
    assert not any("vocabulary" in note for note in known["notes"])
    hidden, grown = 512, 131_072 - 512
    more = unknown["model"]["parameters_on_rank_0"] - known["model"]["parameters_on_rank_0"]
    assert more == 2 * grown * hidden


@pytest.mark.parametrize(
    ("in_dataloader", "steps", "given"), [(False, 1, False), (False, 0, True), (True, 3, True)]
)
def test_a_mask_is_captured_unless_steps_before_capture_show_none(
    in_dataloader: bool, steps: int, given: bool
) -> None:
    flags = Namespace(
        create_attention_mask_in_dataloader=in_dataloader, cuda_graph_warmup_steps=steps
    )
    assert masks_given(flags) is given


def test_selected_layers_capture_what_was_selected(plans: dict[str, Plan]) -> None:
    rows = plans["selected"]["layers"]
    assert [row["scopes"] for row in rows] == [["attn"], ["attn", "moe_router"], ["moe_router"]]
    left_out = {part["part"]: part["reason"] for part in rows[2]["eager"]}
    assert "--cg-layers" in left_out["attention"]
    names = [[entry["name"] for entry in row["static_inputs"]] for row in rows]
    assert names[0] == names[1] == ["hidden_states", "rotary_pos_emb"]
    assert "rotary_pos_emb" not in names[2]


def test_whole_layers_capture_everything(plans: dict[str, Plan]) -> None:
    rows = plans["whole layers"]["layers"]
    assert all(row["captured"] == ["attention", "MLP"] and not row["eager"] for row in rows)
    partly = plans["llama-tiny"]["graph_memory"]["saved_activations"]
    assert plans["whole layers"]["graph_memory"]["saved_activations"] > partly


def test_experts_of_fixed_capacity_are_captured(plans: dict[str, Plan]) -> None:
    for row in plans["experts"]["layers"]:
        assert "experts" in row["captured"] and not row["eager"]


def test_an_overlapped_shared_expert_is_captured_with_the_exchange(plans: dict[str, Plan]) -> None:
    for name, inside in (("overlapped", False), ("overlapped, dropless", True)):
        assert not plans[name]["violations"] and plans[name]["megatron"] is None
        rows = [row for row in plans[name]["layers"] if "MoE" in row["kind"]]
        assert rows
        for row in rows:
            reasons = {part["part"]: part["reason"] for part in row["eager"]}
            assert ("shared expert" in row["captured"]) is inside
            assert ("moe can capture both" in reasons.get("shared expert", "")) is not inside


def test_dropless_experts_are_captured_with_room_for_any_routing(plans: dict[str, Plan]) -> None:
    one, two = (plans[f"dropless, {name}"] for name in ("one rank", "two ranks"))
    for plan in (one, two):
        assert not plan["violations"] and plan["megatron"] is None
        for row in plan["layers"]:
            assert {"experts", "token dispatch"} <= set(row["captured"]) and not row["eager"]
        assert plan["kernels"]["saved_per_step"] > 0
    flags = read_request("qwen3-moe-tiny", []).words
    tokens, topk, hidden, width = (
        int(flags[flags.index(flag) + 1])
        for flag in ("--seq-length", "--moe-router-topk", "--hidden-size", "--moe-ffn-hidden-size")
    )
    tokens *= int(flags[flags.index("--micro-batch-size") + 1])
    # Twice the rows: at least the inputs of both GEMMs, in bfloat16, are saved for each more.
    more = tokens * topk * (hidden + width) * 2
    for small, large in zip(one["layers"], two["layers"], strict=True):
        saved = [row["memory"]["saved_activations"] for row in (small, large)]
        assert saved[1] - saved[0] > more


def test_a_bound_of_rows_saves_its_part_of_their_memory(plans: dict[str, Plan]) -> None:
    average, bounded, worst = (
        plans[f"dropless, {name}"] for name in ("average", "bounded", "two ranks")
    )
    assert not average["violations"] and not bounded["violations"]
    for layers in zip(average["layers"], bounded["layers"], worst["layers"], strict=True):
        small, middle, large = (row["memory"]["saved_activations"] for row in layers)
        # 1.5 times the average lies halfway to the worst case, which is twice the average.
        assert abs((middle - small) / (large - small) - 0.5) < 0.01


def test_microbatches_share_their_graphs(plans: dict[str, Plan]) -> None:
    one, four = plans["llama-tiny"], plans["more microbatches"]
    assert one["graph_memory"] == four["graph_memory"]
    assert four["graphs"]["replays_per_step"] == 4 * one["graphs"]["replays_per_step"]
    assert four["kernels"]["saved_per_step"] == 4 * one["kernels"]["saved_per_step"]


def test_a_table_seen_in_fewer_than_two_steps_is_copied(
    plans: dict[str, Plan],
) -> None:
    kept, copied = plans["llama-tiny"], plans["no warmup"]
    assert (copies(kept), copies(copied)) == ([False] * 3, [True] * 3)
    # One table for all layers, so it is counted once.
    size = kept["layers"][0]["static_inputs"][1]["bytes"]
    grown = copied["graph_memory"]["static_inputs"] - kept["graph_memory"]["static_inputs"]
    assert grown == size


def copies(plan: Plan) -> list[bool]:
    return [
        entry["copied"]
        for row in plan["layers"]
        for entry in row["static_inputs"]
        if entry["name"] == "rotary_pos_emb"
    ]


def test_memory_of_attention_is_what_a_pencil_gives(plans: dict[str, Plan]) -> None:
    tokens, hidden, length, batch, heads, groups, width = 1024, 512, 512, 2, 8, 4, 64
    normed, statistics = tokens * hidden * 2, tokens * 4
    q, kv = tokens * heads * width * 2, tokens * groups * width * 2
    attention = tokens * heads * width * 2 + batch * heads * length * 4 + 512
    tables = 4 * length * width * 2  # cosines and sines, in bfloat16, for q and for k
    by_hand = normed + statistics + q + 2 * kv + attention + tables
    for row in plans["llama-tiny"]["layers"]:
        memory = row["memory"]
        assert memory["saved_activations"] == by_hand
        assert memory["outputs"] == memory["input_gradient"] == tokens * hidden * 2
        qkv, projection = (heads + 2 * groups) * width * hidden, heads * width * hidden
        assert memory["weight_gradients"] == (qkv + projection + hidden) * 2
        assert memory["static_inputs"] == tokens * hidden * 2


def test_memory_grows_with_the_sequence(plans: dict[str, Plan]) -> None:
    one, two = plans["llama-tiny"]["layers"][0], plans["twice as long"]["layers"][0]
    saved = [row["memory"]["saved_activations"] for row in (one, two)]
    assert saved[1] == 2 * saved[0] - 512  # the state of random numbers does not grow


def test_tensor_parallel_ranks_hold_a_part(plans: dict[str, Plan]) -> None:
    whole, half = (plans[n]["layers"][0]["memory"] for n in ("llama-tiny", "tensor parallel"))
    assert half["outputs"] * 2 == whole["outputs"]
    assert whole["saved_activations"] / 2 <= half["saved_activations"] < whole["saved_activations"]
    assert plans["tensor parallel"]["model"]["data_parallel"] == 1


def test_what_cannot_be_counted_is_said(plans: dict[str, Plan]) -> None:
    assert any("bfloat16" in note for note in plans["fp8"]["notes"])
    plan = plans["context parallel"]
    assert any("context parallel" in note for note in plan["notes"])
    assert "graph_memory" not in plan and plan["layers"] and plan["fsdp"]
    assert "What is captured" in shown(plan)


def test_fsdps_buffers_are_those_of_its_units(plans: dict[str, Plan]) -> None:
    plan = plans["llama-tiny"]
    units = plan["fsdp"]["units"]
    assert [unit["name"] for unit in units if unit["unit"] is not None] == [
        f"layer {index}" for index in range(plan["model"]["layers"])
    ]
    assert sum(unit["elements"] for unit in units) == plan["model"]["parameters_on_rank_0"]
    whole = {
        unit["name"]: sum(bucket["weights"]["unsharded"] for bucket in unit["buckets"])
        for unit in units
    }
    totals = plan["fsdp"]["totals"]
    assert totals["double_buffers"]["weights bfloat16"] == 2 * whole["layer 0"]
    assert totals["persistent_buffers"]["weights bfloat16"] == whole["outside of all units"]
    shards = sum(bucket["weights"]["shard"] for unit in units for bucket in unit["buckets"])
    assert totals["shards"]["weights bfloat16"] == shards == sum(whole.values()) / plan["gpus"]


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("repeated prediction", ("runs 2 times before its first backward pass",)),
        ("recorded", ("routers record or repeat",)),
        ("packs", ("packed sequences: attention",)),
        ("packs in graphs", ("estimated as that of whole sequences",)),
    ],
)
def test_what_stays_eager_in_every_layer_is_noted(
    name: str, words: tuple[str, ...], plans: dict[str, Plan]
) -> None:
    plan = plans[name]
    assert command.exit_code(plan) == command.READY, plan
    assert plan["graphs"]["captured"] == plan["model"]["layers"]
    assert not [row for row in plan["layers"] if row["kind"] == "prediction"]
    for said in words:
        assert any(said in note for note in plan["notes"]), plan["notes"]
