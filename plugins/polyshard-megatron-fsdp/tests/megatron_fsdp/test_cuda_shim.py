"""What stands in for CUDA serves one type of device, and leaves torch alone."""

from __future__ import annotations

import pytest
import torch

from polyshard import parallelize
from polyshard.conformance.models import build_model
from polyshard.exceptions import UnsupportedError
from polyshard_megatron_fsdp import MegatronFSDPConfig
from polyshard_megatron_fsdp.megatron_fsdp.patches.cuda_shim import prepare


def mixed_devices() -> str:
    prepare(torch.device("cpu"))
    try:
        prepare(torch.device("cuda"))
    except UnsupportedError as error:
        return str(error)
    raise AssertionError("expected a second type of device to be refused")


@pytest.mark.world_size(2)
def test_one_process_serves_one_type_of_device(ranks):
    assert all("found 'cuda' after 'cpu'" in message for message in ranks.run(mixed_devices))


def torch_is_left_alone() -> bool:
    """Whether what megatron-fsdp's modules see is a stand-in, and torch itself is as it was."""
    import megatron_fsdp.megatron_fsdp as upstream

    parallelize(build_model("plain"), MegatronFSDPConfig())
    return upstream.torch is not torch and torch.cuda.Stream.__module__.startswith("torch.")


@pytest.mark.world_size(2)
def test_nothing_in_torch_is_patched(ranks):
    assert all(ranks.run(torch_is_left_alone))
