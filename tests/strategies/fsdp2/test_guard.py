"""A forward computes with the present weights, whatever was gathered before."""

from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from polyshard import FSDP2Config, parallelize
from polyshard.conformance import RankPool

pytestmark = [pytest.mark.strategy("fsdp2"), pytest.mark.world_size(2)]


@pytest.mark.parametrize("gather", ["evaluation", "forward without backward", "unshard"])
@pytest.mark.parametrize(
    "options",
    [{}, {"reshard_after_forward": True}, {"reshard_after_forward": False}],
    ids=str,
)
def test_what_was_gathered_before_a_step_is_not_used_after_it(
    ranks: RankPool, gather: str, options: dict[str, Any]
) -> None:
    assert ranks.run(change_what_is_gathered, gather, options) == [5.0, 5.0]


def change_what_is_gathered(gather: str, options: dict[str, Any]) -> float:
    """Return what the model computes after all its weights became 5."""
    config = FSDP2Config(**options).in_full_precision()
    model, _ = parallelize(nn.Linear(1, 2, bias=False), config)
    (weight,) = model.parameters()
    if gather == "unshard":
        assert isinstance(model, FSDPModule)
        model.unshard()
    else:
        with torch.set_grad_enabled(gather != "evaluation"):
            model(torch.ones(1, 1))
    # Optimizers hold the sharded parameter, whatever is registered.
    with torch.no_grad():
        weight.fill_(5.0)
    return model(torch.ones(1, 1)).mean().item()
