"""Batches of text are the same however many ranks share them."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest
import torch
from attrs import evolve

from polyshard.config.structuring import KeyPathError
from polyshard.training.config import DataConfig, TrainingConfig
from polyshard.training.data import Batches, read_text

CONFIG = TrainingConfig(distributed=None, data=DataConfig(sequence_length=3), batch_size=4)
TEXT = bytes(range(42))  # ten windows of four bytes, and a rest


def test_the_shares_of_the_ranks_make_up_the_batch() -> None:
    batches = Batches(TEXT, CONFIG)
    whole = batches.share(5, 0, 1)
    assert whole.shape == (4, 4)
    parts = [batches.share(5, rank, 2) for rank in range(2)]
    assert torch.equal(torch.cat(parts), whole)


def test_a_sequence_is_a_piece_of_the_text() -> None:
    for row in Batches(TEXT, CONFIG).share(0, 0, 1).tolist():
        assert bytes(row) in TEXT


def test_an_epoch_goes_through_every_window_once_and_the_next_in_another_order() -> None:
    batches = Batches(TEXT, CONFIG)
    windows = [window for step in range(5) for window in batches.windows(step)]
    first, second = windows[:10], windows[10:]
    assert sorted(first) == sorted(second) == list(range(10))
    assert first != second


def test_the_seed_alone_decides_the_order() -> None:
    other = Batches(TEXT, evolve(CONFIG, seed=1))
    assert Batches(TEXT, CONFIG).windows(7) == Batches(TEXT, CONFIG).windows(7)
    assert Batches(TEXT, CONFIG).windows(7) != other.windows(7)


def test_a_text_of_exactly_one_batch_is_enough() -> None:
    assert sorted(Batches(TEXT[:16], CONFIG).windows(3)) == [0, 1, 2, 3]


def test_a_text_too_short_for_a_batch_is_refused() -> None:
    with pytest.raises(KeyPathError, match=r"expected at least 16 bytes, .* found 15 in") as e:
        Batches(TEXT[:15], CONFIG)
    assert e.value.path == ("data", "path")


def test_the_built_in_text_is_the_same_everywhere() -> None:
    # Whoever changes it changes every loss that somebody has noted.
    digest = "9faa1502789cb0c5f17f530ec32740b48cdb3d67007e9a0d52105b5dbb891655"
    assert hashlib.sha256(read_text(None)).hexdigest() == digest


def test_a_file_is_read_as_it_is(tmp_path: Path) -> None:
    path = tmp_path / "text.txt"
    path.write_bytes(b"\xff\x00\r\n")
    assert read_text(str(path)) == b"\xff\x00\r\n"


def test_a_file_that_cannot_be_read_is_refused(tmp_path: Path) -> None:
    with pytest.raises(KeyPathError, match=r"gone\.txt, which cannot be read: No such file"):
        read_text(str(tmp_path / "gone.txt"))
    with pytest.raises(KeyPathError, match="cannot be read: Is a directory"):
        read_text(str(tmp_path))
