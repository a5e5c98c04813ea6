"""The full state dict has the user's own names, those of a ``module`` of the user's included."""

import pytest
import torch
from torch import nn

from polyshard import DDPConfig, full_state_dict, parallelize
from polyshard.conformance import RankPool

pytestmark = pytest.mark.strategy("ddp")


class Holder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.module = nn.Linear(2, 2)
        self.weight = nn.Parameter(torch.zeros(1))


def test_names_are_the_users(ranks: RankPool) -> None:
    for names in ranks.run(names_after_wrap):
        assert names == {"module.weight", "module.bias", "weight"}


def names_after_wrap() -> set[str]:
    config = DDPConfig(find_unused_parameters=True)
    model, _ = parallelize(Holder(), config)
    return set(full_state_dict(model, rank0_only=False))
