"""Checkpointed units compute the same and keep less; that none was wrapped is an error."""

import copy
import logging
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from polyshard.exceptions import UnitError
from polyshard.parameters.names import canonical_parameters
from polyshard.transforms.activation_checkpointing import (
    CheckpointMode,
    checkpoint_mode,
    checkpoint_units,
)
from polyshard.transforms.units import find_units


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(8, 32)
        self.dropout = nn.Dropout(0.5)
        self.down = nn.Linear(32, 8)
        self.calls = 0

    def forward(self, hidden: Tensor) -> Tensor:
        self.calls += 1
        update: Tensor = self.down(self.dropout(torch.tanh(self.up(hidden))))
        return hidden + update


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 8), nn.ModuleList([Block(), Block()]))


def run(model: nn.Sequential) -> tuple[Tensor, dict[str, Tensor | None], int]:
    """Return the output, the gradients, and how many numbers the forward kept for backward."""
    kept = 0

    def count(tensor: Tensor) -> Tensor:
        nonlocal kept
        kept += tensor.numel()
        return tensor

    torch.manual_seed(1)
    with torch.autograd.graph.saved_tensors_hooks(count, lambda tensor: tensor):
        hidden = model[0](torch.ones(4, 8))
        for block in model[1]:
            hidden = block(hidden)
    hidden.square().sum().backward()
    return hidden, {n: p.grad for n, p in canonical_parameters(model).items()}, kept


@pytest.mark.parametrize(
    ("value", "mode"),
    [(False, None), (True, "full"), ("full", "full"), ("selective", "selective")],
)
def test_what_a_config_says_is_a_mode(value: bool | str, mode: CheckpointMode | None) -> None:
    assert checkpoint_mode(value) == mode


@pytest.mark.parametrize("mode", ["full", "selective"])
def test_output_and_gradients_are_the_same(mode: CheckpointMode) -> None:
    plain = network()
    model = copy.deepcopy(plain)
    assert checkpoint_units(model, find_units(model), mode) == 2
    output, gradients, kept = run(model)
    expected, expected_gradients, expected_kept = run(plain)
    assert torch.equal(output, expected)
    assert gradients.keys() == expected_gradients.keys()
    for name, gradient in gradients.items():
        assert gradient is not None
        assert torch.equal(gradient, expected_gradients[name]), name  # type: ignore[arg-type]
    assert kept < expected_kept


@pytest.mark.parametrize(("mode", "repeated"), [("full", True), ("selective", False)])
def test_selective_does_no_matrix_product_again(mode: CheckpointMode, repeated: bool) -> None:
    model = network()
    checkpoint_units(model, find_units(model), mode)
    with CountedProducts() as counted:
        hidden = model[0](torch.ones(4, 8))
        for block in model[1]:
            hidden = block(hidden)
        in_forward = counted.products
        hidden.square().sum().backward()
    # The backward of a layer takes other products than its forward.
    assert in_forward == 1 + 2 * 2
    assert (counted.products > in_forward) == repeated


class CountedProducts(TorchDispatchMode):
    """Counts the forwards of linear layers."""

    def __init__(self) -> None:
        super().__init__()
        self.products = 0

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        self.products += function is torch.ops.aten.addmm.default
        return function(*args, **(kwargs or {}))


def test_the_parameters_stay_the_same_objects() -> None:
    model = network()
    before = canonical_parameters(model)
    checkpoint_units(model, find_units(model), "full")
    after = canonical_parameters(model)
    assert before.keys() == after.keys() == model.state_dict().keys()
    assert all(after[name] is parameter for name, parameter in before.items())


def test_a_wrapper_is_in_the_mode_of_what_it_wraps() -> None:
    model = network().eval()
    checkpoint_units(model, find_units(model), "full")
    assert not any(module.training for module in model.modules())


def test_a_block_that_is_used_twice_is_wrapped_once_in_both_places() -> None:
    block = Block()
    model = nn.Sequential(block, block, Block())
    assert checkpoint_units(model, find_units(model), "full") == 2
    assert model[0] is model[1]
    assert model[0] is not block


def test_that_nothing_was_wrapped_is_an_error() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    with pytest.raises(UnitError, match="expected repeated blocks in Sequential, found none"):
        checkpoint_units(model, find_units(model), "full")


def test_what_is_wrapped_is_told(caplog: pytest.LogCaptureFixture) -> None:
    model = network()
    with caplog.at_level(logging.INFO, "polyshard"):
        checkpoint_units(model, find_units(model), "selective")
    assert f"activation checkpointing (selective): 2 x {__name__}.Block" in caplog.text
