"""A forward past the wrapper is warned of, and one whose gradients are not averaged refused."""

import copy
import warnings

import pytest
import torch

from polyshard import DDPConfig, parallelize
from polyshard.conformance import RankPool
from polyshard.conformance.models import build_model, global_batch, loss_of
from polyshard.exceptions import RebuildError

pytestmark = pytest.mark.strategy("ddp")


def test_training_the_module_inside_warns_once(ranks: RankPool) -> None:
    for messages in ranks.run(call_inside):
        (message,) = messages
        assert "TinyModel was called without the DistributedDataParallel around it" in message
        assert "call the model that parallelize returned" in message


def call_inside() -> list[str]:
    module = build_model("plain")
    model, _ = parallelize(module, DDPConfig())
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        loss_of(model, global_batch(0))
        module.eval()
        loss_of(module, global_batch(0))
        module.train()
        with torch.no_grad():
            loss_of(module, global_batch(0))
        assert not caught, "evaluation past the wrapper is right"
        for _ in range(2):
            loss_of(module, global_batch(0))
    return [str(warning.message) for warning in caught]


def test_a_forward_that_raises_does_not_hide_the_next_mistake(ranks: RankPool) -> None:
    assert all(ranks.run(call_inside_after_error))


def call_inside_after_error() -> bool:
    module = build_model("plain")
    model, _ = parallelize(module, DDPConfig())
    with pytest.raises(IndexError):
        model(torch.tensor([[99]]))
    with pytest.warns(UserWarning, match="without the DistributedDataParallel"):
        loss_of(module, global_batch(0))
    return True


@pytest.mark.parametrize("back", [True, False])
def test_a_cast_outside_rebuild_is_refused(ranks: RankPool, back: bool) -> None:
    """Also one that was taken back: torch's hooks on the gradients are gone all the same."""
    for message in ranks.run(cast, back):
        assert "at parallelize, found" in message
        assert "polyshard.rebuild(model)" in message


def cast(back: bool) -> str:
    model, _ = parallelize(build_model("plain"), DDPConfig())
    loss_of(model, global_batch(0)).backward()
    model.double()
    if back:
        model.float()
    try:
        loss_of(model, global_batch(1))
    except RebuildError as error:
        return str(error)
    return "no error"


def test_a_forward_in_inference_mode_is_fine(ranks: RankPool) -> None:
    assert all(ranks.run(forward_in_inference_mode))


def forward_in_inference_mode() -> bool:
    model, _ = parallelize(build_model("plain"), DDPConfig())
    with torch.inference_mode():
        return loss_of(model, global_batch(0)).isfinite().item()


def test_a_model_may_be_copied_as_averages_of_weights_are(ranks: RankPool) -> None:
    for kept, copied in ranks.run(train_beside_a_copy):
        assert copied == kept


def train_beside_a_copy() -> tuple[float, float]:
    """Return the loss before a step, and that of a copy made before it, found after it."""
    model, _ = parallelize(build_model("plain"), DDPConfig())
    copied, inside = copy.deepcopy(model), copy.deepcopy(model.module)
    before = loss_of(model, global_batch(0))
    before.backward()
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    with torch.no_grad():
        assert loss_of(model, global_batch(0)) != before
        assert loss_of(inside, global_batch(0)) == before
        return before.item(), loss_of(copied, global_batch(0)).item()
