"""torch's own way to send a full state dict from one rank, which assumes even shards."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict

from polyshard import parallelize
from polyshard.conformance import RankPool, RanksFailed
from polyshard.conformance.models import build_model
from polyshard.exceptions import RebuildError
from polyshard_megatron_fsdp import MegatronFSDPConfig

pytestmark = pytest.mark.strategy("megatron_fsdp")

each_stage = pytest.mark.parametrize("stage", [1, 2, 3])


def broadcast_from_rank_0(model: nn.Module, stage: int) -> str:
    values = {name: torch.ones_like(value) for name, value in model.state_dict().items()}
    parallelize(model, MegatronFSDPConfig(zero_dp_strategy=stage))
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    try:
        set_model_state_dict(model, values if dist.get_rank() == 0 else {}, options=options)
    except RebuildError as error:
        return str(error)
    return "loaded"


def broadcast_alike(stage: int) -> str:
    """Load two layers, of which each rank holds one and torch takes it to hold a row of both."""
    layers = [nn.Linear(4, 2, bias=False) for _ in range(2)]
    return broadcast_from_rank_0(nn.Sequential(*layers), stage)


@each_stage
@pytest.mark.world_size(2)
def test_what_torch_copies_to_the_wrong_place_is_refused(ranks: RankPool, stage: int) -> None:
    """It repeats a row, and nothing fails."""
    for message in ranks.run(broadcast_alike, stage):
        assert "expected '0.weight' laid out as Megatron-FSDP has it" in message
        assert "polyshard.load_full_state_dict" in message


def broadcast_unlike(stage: int) -> str:
    return broadcast_from_rank_0(build_model("plain"), stage)


@each_stage
def test_elsewhere_torch_fails(stage: int) -> None:
    with RankPool(2) as ranks, pytest.raises(RanksFailed, match="RuntimeError: The size"):
        ranks.run(broadcast_unlike, stage)
