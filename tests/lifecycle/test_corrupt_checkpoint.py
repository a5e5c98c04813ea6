"""A checkpoint that cannot be read on one rank fails on all, with the cause and its rank."""

from pathlib import Path

import pytest
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

from polyshard import FSDP2Config, parallelize, rebuild
from polyshard.conformance import RankPool
from polyshard.conformance.models import build_model

pytestmark = pytest.mark.strategy("fsdp2")


@pytest.mark.world_size(2)
def test_every_rank_tells_of_the_file_that_cannot_be_read(ranks: RankPool, tmp_path: Path) -> None:
    for message in ranks.run(load_corrupted, tmp_path):
        assert "(RANK 1)" in message
        assert "UnpicklingError" in message


def load_corrupted(folder: Path) -> str:
    """Return the error of loading a checkpoint of which the file of rank 1 is spoilt."""
    config = FSDP2Config().in_full_precision()
    model, _ = parallelize(build_model("plain"), config)
    dcp.save({"model": model.state_dict()}, checkpoint_id=folder)
    if dist.get_rank() == 1:
        (spoilt,) = folder.glob("__1_*")
        spoilt.write_bytes(b"x" * spoilt.stat().st_size)
    dist.barrier()
    # An exception that is no Exception, on purpose.
    with pytest.raises(CheckpointException) as caught, rebuild(model):
        dcp.load({"model": model.state_dict()}, checkpoint_id=folder)
    return str(caught.value)
