"""The transformer that the command trains."""

from __future__ import annotations

import math

import torch

from polyshard.training.config import DataConfig, ModelConfig, TrainingConfig
from polyshard.training.model import build_model, next_byte_loss

CONFIG = TrainingConfig(
    distributed=None,
    model=ModelConfig(layers=2, width=16, heads=2),
    data=DataConfig(sequence_length=8),
)


def test_the_head_shares_the_embedding() -> None:
    model = build_model(CONFIG)
    assert model.head.weight is model.embedding.weight


def test_no_byte_is_predicted_from_those_after_it() -> None:
    model = build_model(CONFIG)
    tokens = torch.randint(256, (2, 8))
    changed = tokens.clone()
    changed[:, 5:] = 0
    before, after = model(tokens), model(changed)
    assert before.shape == (2, 8, 256)
    assert torch.equal(before[:, :5], after[:, :5])
    assert not torch.equal(before[:, 5:], after[:, 5:])


def test_the_seed_decides_the_initial_weights() -> None:
    one, same = build_model(CONFIG), build_model(CONFIG)
    for mine, theirs in zip(one.parameters(), same.parameters(), strict=True):
        assert torch.equal(mine, theirs)


def test_an_untrained_model_is_as_good_as_a_guess() -> None:
    inputs, targets = torch.randint(256, (2, 4, 8))
    loss = next_byte_loss(build_model(CONFIG), inputs, targets)
    assert abs(loss.item() - math.log(256)) < 0.2
