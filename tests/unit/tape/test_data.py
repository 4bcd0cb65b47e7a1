"""Batches of the CPU's training: shifted by one, in turn, and endless."""

import torch

from megatron_cg.tape.training_plan import CpuModelConfig, TrainingPlan


def test_labels_are_the_next_tokens_and_the_text_begins_again(one_rank: None) -> None:
    from megatron.core import parallel_state

    from megatron_cg.tape.train import batches

    parallel_state.initialize_model_parallel()
    model = CpuModelConfig(sequence_length=10_000)
    endless = batches(TrainingPlan(model, micro_batch_size=2))
    taken = [next(endless) for _ in range(4)]
    tokens = torch.cat([tokens.flatten() for tokens, _ in taken])
    labels = torch.cat([labels.flatten() for _, labels in taken])
    begin = next(
        n for n in range(10_000, 80_000, 10_000) if torch.equal(tokens[:50], tokens[n:][:50])
    )
    assert torch.equal(tokens[1:begin], labels[: begin - 1])
    assert torch.equal(tokens[: 80_000 - begin], tokens[begin:])
