"""The forward runs under autocast, and nothing else does."""

import copy

import pytest
import torch
from torch import Tensor, nn

from polyshard.transforms.autocast import autocast_forward


class Failing(nn.Module):
    def forward(self, _: Tensor) -> Tensor:
        raise RuntimeError("on purpose")


def test_the_forward_alone_computes_in_the_lower_dtype() -> None:
    model = nn.Linear(2, 2)
    autocast_forward(model, torch.bfloat16, "cpu")
    output = model(torch.ones(1, 2))
    assert output.dtype == torch.bfloat16
    assert not torch.is_autocast_enabled("cpu")
    output.float().sum().backward()
    assert model.weight.grad is not None
    assert model.weight.grad.dtype == torch.float32


def test_a_forward_that_raises_leaves_autocast() -> None:
    model = Failing()
    autocast_forward(model, torch.bfloat16, "cpu")
    with pytest.raises(RuntimeError, match="on purpose"):
        model(torch.ones(1))
    assert not torch.is_autocast_enabled("cpu")


def test_a_copy_of_the_model_is_independent() -> None:
    model = nn.Sequential(nn.Linear(2, 2))
    autocast_forward(model, torch.bfloat16, "cpu")
    twin = copy.deepcopy(model)
    with torch.no_grad():
        twin[0].weight.zero_()
        twin[0].bias.zero_()
    assert twin(torch.ones(1, 2)).abs().sum() == 0
    assert model(torch.ones(1, 2)).abs().sum() > 0
    assert twin(torch.ones(1, 2)).dtype == torch.bfloat16
