"""The checks of a model say what is missing and whom it was missing for."""

import pytest
import torch
from torch import nn

from polyshard.exceptions import ModelError
from polyshard.mesh.devices import mesh_device
from polyshard.transforms.checks import require_dimensions, require_materialized, require_parameters


@pytest.mark.parametrize(
    ("model", "trainable"),
    [(nn.ReLU(), False), (nn.ReLU(), True), (nn.Linear(2, 2).requires_grad_(False), True)],
)
def test_a_model_with_nothing_to_distribute_is_refused(model: nn.Module, trainable: bool) -> None:
    kind = "a trainable parameter" if trainable else "a parameter"
    with pytest.raises(ModelError, match=f"strategy 'acme': expected a model with {kind}, found"):
        require_parameters(model, "acme", trainable=trainable)


def test_frozen_parameters_are_parameters() -> None:
    require_parameters(nn.Linear(2, 2).requires_grad_(False), "acme", trainable=False)


def test_a_scalar_is_refused_by_name() -> None:
    model = nn.Linear(2, 2)
    require_dimensions(model, "acme")
    model.scale = nn.Parameter(torch.tensor(1.0))
    with pytest.raises(ModelError, match=r"strategy 'acme': .* found the scalar 'scale'"):
        require_dimensions(model, "acme")


def test_a_model_without_values_is_refused_by_name() -> None:
    model = nn.BatchNorm1d(2)
    require_materialized(model, "acme")
    model.register_buffer("running_mean", torch.empty(2, device="meta"))
    with pytest.raises(ModelError, match=r"found 1 on the meta device \(running_mean"):
        require_materialized(model, "acme")


def test_without_a_mesh_the_device_is_the_cpu() -> None:
    assert mesh_device(None) == torch.device("cpu")
