"""Megatron's own capture helper, made to work under Megatron-FSDP, with the tape as the backend."""

from collections.abc import Iterator
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from megatron.core.models.bert.bert_layer_specs import bert_layer_local_spec
from megatron.core.models.bert.bert_model import BertModel
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from megatron.core.transformer import cuda_graphs, transformer_layer
from megatron.core.transformer.cuda_graphs import TECudaGraphHelper
from packaging.version import Version
from torch.distributed import distributed_c10d

import megatron_cg
from megatron_cg.capture.session import close_all_sessions, open_sessions
from megatron_cg.errors import (
    CaptureError,
    ConfigurationError,
    EarlierWorkError,
    PhaseError,
    UpstreamChangedError,
)
from megatron_cg.experts.install import DeviceDispatcher
from megatron_cg.experts.slots import PeerMemory
from megatron_cg.fsdp.sharding import of_megatron
from megatron_cg.fully_shard.megatron_fsdp_v2 import MegatronFsdpV2
from megatron_cg.integrations.megatron import helper as module
from megatron_cg.tape import train
from megatron_cg.tape.training_plan import CpuModelConfig
from megatron_cg.upstream.patch import applied, undone_after
from tests.unit.backends.cuda_double import cuda_double
from tests.unit.counted import expect
from tests.unit.one_mask import OneMask, OneMaskOnCuda
from tests.unit.trainers import helper_of, layers_of, microbatch_of, new_trainer


@pytest.fixture
def trainer(one_rank: None) -> Iterator[Any]:
    with microbatch_of(2):
        made = new_trainer(CpuModelConfig(layers=3, graph_modules=("attn", "mlp")))
        made.step()
        yield made
        close_all_sessions()


def helper_for(trainer: Any, *layers: str, on_failure: str = "error") -> Any:
    return helper_of(trainer, OneMask(), *layers, on_failure=on_failure)


def test_capture_replay_and_deletion(trainer: Any) -> None:
    helper = helper_for(trainer)
    for _ in range(2):
        helper.capture()
        assert helper.helper.capture_finished() and helper.helper.graphs_created()
        session: Any = helper.session
        with pytest.raises(PhaseError, match=r"delete_cuda_graphs\(\)"):
            helper.capture()
        assert helper.session is session and open_sessions() == 1
        trainer.step()
        expect(session.counters, captured=3, replayed=3, eager=0)
        helper.controller.delete()
        assert not helper.helper.graphs_created()
        assert all(layer.cuda_graphs == [] for layer in layers_of(trainer))
        assert all("forward" not in vars(layer) for layer in layers_of(trainer))
    trainer.step()
    expect(session.counters, replayed=3)


class Noting(OneMask):
    def capture(self, request: Any) -> Any:
        self.tables = [named["rotary_pos_emb"] for named in request.kwargs]
        return super().capture(request)


def test_replays_copy_into_one_table_that_is_not_the_models(trainer: Any) -> None:
    """Megatron makes its samples with a table that the model caches."""
    embedding = next(m for m in trainer.model.modules() if isinstance(m, RotaryEmbedding))
    cached, backend = embedding(trainer.plan.model.sequence_length), Noting()
    helper_of(trainer, backend).capture()
    assert len(set(map(id, backend.tables))) == 1 and torch.equal(backend.tables[0], cached)
    assert backend.tables[0].data_ptr() != cached.data_ptr()


def test_layers_with_tables_of_their_own_do_not_share_a_sample(trainer: Any) -> None:
    """The next layer's replay would write into what the backward pass of this one reads."""
    backend = Noting()
    helper = helper_of(trainer, backend)
    second = layers_of(trainer)[1]

    def another(_layer: Any, args: Any, named: Any) -> Any:
        return args, {**named, "rotary_pos_emb": named["rotary_pos_emb"].clone()}

    handle = second.register_forward_pre_hook(another, with_kwargs=True)
    with undone_after(helper._inputs.observe_step()):
        trainer.step()
    handle.remove()
    helper.capture()
    assert len(set(map(id, backend.tables))) == len(backend.tables) > 1


def test_layers_gathered_as_one_are_refused(trainer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    v2 = MegatronFsdpV2.__new__(MegatronFsdpV2)
    own: Any = of_megatron(trainer.model)
    sharding = SimpleNamespace(wrapped=own.wrapped, megatron_fsdp=None, refusals=v2.refusals)
    monkeypatch.setattr(module, "of_megatron", lambda _model: sharding)
    with pytest.raises(ConfigurationError, match="layer 0 is a TransformerLayer without fully_s"):
        helper_for(trainer)


def test_a_missing_decoder_is_refused(one_rank: None, monkeypatch: pytest.MonkeyPatch) -> None:
    def bert(model: CpuModelConfig) -> Any:
        spec, config = bert_layer_local_spec, train.transformer_config(model)
        return BertModel(config, 0, spec, model.vocabulary, model.sequence_length)

    monkeypatch.setattr(train, "gpt_model", bert)
    with microbatch_of(2):
        trainer = new_trainer()
        with pytest.raises(ConfigurationError, match=r"a model without a decoder.* type --cuda-gr"):
            helper_for(trainer)
        megatron_cg.enable(backend="tape")
        with pytest.raises(ConfigurationError, match=r"a model without .*cuda_graph_impl='none'"):
            TECudaGraphHelper([trainer.model], trainer.model.config, 8, 2, [trainer._optimizer])
        megatron_cg.disable()


@pytest.fixture
def peers(trainer: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Peer memory of the model, as the dispatchers of its experts have it; not mapped."""
    group: Any = torch.distributed.group.WORLD
    memory = PeerMemory(group)
    with monkeypatch.context() as patch:
        patch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
        patch.setattr(memory, "_made", lambda *_: SimpleNamespace(rows=torch.zeros(4)))
        memory._of(4, 4)
    dispatcher = DeviceDispatcher.__new__(DeviceDispatcher)
    dispatcher.transport = memory
    layers_of(trainer)[0].mlp.token_dispatcher = dispatcher
    return memory


def test_peer_memory_is_held_as_long_as_the_graphs(trainer: Any, peers: Any) -> None:
    helper = helper_for(trainer)
    helper.capture()
    trainer.step()
    assert peers._held == [{(4, 4)}]
    helper.controller.delete()
    assert peers._held == []


@pytest.mark.parametrize("te", [None, "2.20.2"])
def test_native_needs_no_te(trainer: Any, te: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    # As megatron-core 0.19.2 reports a TE that is not there.
    monkeypatch.setattr("megatron.core.utils._te_version", Version(te or "0.0.0"))
    monkeypatch.setattr(cuda_graphs, "HAVE_TE_GRAPHS", te is not None)
    asked = [one.is_te_min_version for one in (cuda_graphs, transformer_layer)]
    with cuda_double(fakes=False) as cuda:
        helper = helper_of(trainer, OneMaskOnCuda())
        helper.capture()
        trainer.step()
        expect(helper.session.counters, captured=3, replayed=3, backwards=3, eager=0)
        # One graph keeps the pool; each layer has two.
        assert cuda.users == {(0, 1): 1 + 2 * 3}
        helper.controller.delete()
        assert cuda.users == {(0, 1): 0}
        helper.close()
    assert cuda_graphs.HAVE_TE_GRAPHS is (te is not None)
    assert asked == [one.is_te_min_version for one in (cuda_graphs, transformer_layer)]


@pytest.mark.parametrize(("residual", "dtype"), [(False, torch.bfloat16), (True, torch.float32)])
def test_samples_have_the_type_of_inputs(trainer: Any, residual: bool, dtype: torch.dtype) -> None:
    trainer.model.config.fp32_residual_connection = residual
    args, _ = helper_for(trainer).helper._get_cuda_graph_input_data()
    assert len({id(tensor) for (tensor,) in args}) == 3
    for (hidden,) in args:
        assert hidden.dtype is dtype and hidden.requires_grad and hidden.is_leaf


def test_another_way_to_capture_is_an_error(trainer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def elsewhere(self: Any) -> None:
        for layer in self.flattened_callables:
            layer.cuda_graphs = [lambda *args, **kwargs: None]

    monkeypatch.setattr(cuda_graphs.TECudaGraphHelper, "create_cudagraphs", elsewhere)
    with pytest.raises(UpstreamChangedError, match=r"TECudaGraphHelper\.create_cudagraphs"):
        helper_for(trainer).capture()
    assert all("forward" not in vars(layer) for layer in layers_of(trainer))


def test_a_model_without_a_layer_to_capture_trains_eagerly(trainer: Any) -> None:
    helper = helper_for(trainer, "attn:9", "mlp:9")
    helper.capture()
    assert helper.helper.capture_finished() and not helper.helper.graphs_created()
    trainer.step()


def test_layers_are_captured_as_selected(trainer: Any) -> None:
    """The layer without its attention gets no rotary table."""
    config = trainer.model.config
    helper = helper_for(trainer, "attn:0", "mlp:0-1")
    helper.capture()
    scopes = [[m.name for m in layer.config.cuda_graph_modules] for layer in layers_of(trainer)]
    assert scopes[:2] == [["attn", "mlp"], ["mlp"]]
    assert [len(layer.cuda_graphs) for layer in layers_of(trainer)] == [1, 1, 0]
    trainer.step()
    expect(helper.session.counters, captured=2, replayed=2)
    helper.controller.delete()
    assert all(layer.config is config for layer in layers_of(trainer))
    assert all(layer.mlp.config is config for layer in layers_of(trainer))


def broken(_self: Any, *_args: Any, **_kwargs: Any) -> Any:
    raise torch.OutOfMemoryError("forced")


@pytest.mark.parametrize("on_failure", ["error", "eager"])
def test_after_a_failed_capture_training_goes_on_eagerly_where_asked_for(
    trainer: Any,
    peers: Any,
    on_failure: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(OneMask, "capture", broken)
    helper = helper_for(trainer, "attn:0-1", on_failure=on_failure)
    raised = pytest.raises(CaptureError, match=r"OutOfMemoryError: forced.*--cg-on-failure eager")
    with raised if on_failure == "error" else nullcontext():
        helper.capture()
    assert not cuda_graphs.is_graph_capturing()
    assert all(layer.config is trainer.model.config for layer in layers_of(trainer))
    if on_failure == "error":
        return
    assert not peers._slots
    message = caplog.messages[-1]
    assert "OutOfMemoryError: forced" in message
    assert message.count("--cg-on-failure eager") == 1
    assert helper.helper.capture_finished() and not helper.helper.graphs_created()
    trainer.step()


def test_no_graph_replays_if_what_follows_the_capture_fails(
    trainer: Any, peers: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(type(peers), "hold", broken)
    helper = helper_for(trainer, on_failure="eager")
    helper.capture()
    assert helper.controller.gave_up and open_sessions() == 0
    assert all("forward" not in vars(layer) for layer in layers_of(trainer))
    trainer.step()


def test_a_failed_helper_changes_nothing(trainer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_graphs, "HAVE_TE_GRAPHS", False)
    monkeypatch.setattr(module, "let_gradients_go", broken)
    groups = dict(distributed_c10d._world.pg_map)
    before, asked = applied(), transformer_layer.is_te_min_version
    with pytest.raises(torch.OutOfMemoryError):
        helper_for(trainer)
    assert not cuda_graphs.HAVE_TE_GRAPHS and transformer_layer.is_te_min_version is asked
    assert applied() == before and distributed_c10d._world.pg_map == groups


def test_a_gpu_that_failed_earlier_ends_all(trainer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(OneMask, "synchronize", broken)
    helper = helper_for(trainer, on_failure="eager")
    with pytest.raises(EarlierWorkError, match="work queued before capture failed"):
        helper.capture()
