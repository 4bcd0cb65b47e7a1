"""Batches of the CPU's training: shifted by one, in turn, and endless."""

from pathlib import Path

import pytest
import torch

from megatron_cg.tools.align.run import END_OF_DOCUMENT, from_text

TEXT = b"abcdefgh"


@pytest.mark.parametrize("sequence", [2, 7, 8, 9, 20])
def test_a_text_shorter_than_a_sequence_begins_again(
    one_rank: None, tmp_path: Path, sequence: int
) -> None:
    from megatron_cg.tape.train import Batches

    file = tmp_path / "text"
    file.write_bytes(TEXT)
    batches = Batches(from_text([file], tmp_path), 2, sequence, 257)
    endless = torch.tensor([*TEXT, END_OF_DOCUMENT] * 10)
    for _ in range(3):
        tokens, labels = next(batches)
        assert tokens.shape == labels.shape == (2, sequence)
        for row, following in zip(tokens, labels, strict=True):
            assert torch.equal(row[1:], following[:-1])
            start = int((endless == row[0]).nonzero()[0])
            assert torch.equal(row, endless[start : start + sequence])
