"""The sizes that the strategy supports are those that it declares."""

import pytest

from polyshard import DistributedSetup
from polyshard.exceptions import MeshError


@pytest.mark.parametrize("size", ["pp_size", "ep_size"])
def test_other_sizes_are_refused_with_the_distribution(size: str) -> None:
    supported = "dp_size, dp_replicate_size, tp_size, cp_size"
    message = rf"'megatron_fsdp' \(polyshard-megatron-fsdp .* but {supported}, found {size}=2"
    with pytest.raises(MeshError, match=message):
        DistributedSetup.build("megatron_fsdp", {size: 2})
