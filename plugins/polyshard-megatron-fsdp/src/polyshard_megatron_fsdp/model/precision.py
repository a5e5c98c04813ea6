"""megatron-fsdp's mixed-precision policy for a config."""

from __future__ import annotations

from inspect import signature
from typing import Any

import torch

from polyshard.exceptions import UnsupportedError
from polyshard_megatron_fsdp.config import MegatronFSDPConfig
from polyshard_megatron_fsdp.megatron_fsdp.upstream import MixedPrecisionPolicy
from polyshard_megatron_fsdp.megatron_fsdp.version import require_version

__all__ = ["policy_for"]


def policy_for(config: MegatronFSDPConfig) -> Any:
    """Return the policy that the installed ``fully_shard_model`` takes.

    Raises:
        UnsupportedError: The installed policy has no field for what the config asks for.
    """
    wanted = {"main_params_dtype": torch.float32 if config.preserve_fp32_weights else None}
    if config.grad_reduce_in_fp32:
        # Gradients are kept in the dtype of the weights that the optimizer steps, or it would
        # refuse them; without float32 weights they are cast for the reduction alone.
        kept = config.preserve_fp32_weights
        wanted["main_grads_dtype" if kept else "grad_comm_dtype"] = torch.float32
    unknown = wanted.keys() - signature(MixedPrecisionPolicy).parameters.keys()
    if unknown:
        raise UnsupportedError(
            f"megatron-fsdp {require_version()}: expected MixedPrecisionPolicy to accept "
            f"{', '.join(sorted(unknown))}, which preserve_fp32_weights and grad_reduce_in_fp32 "
            "mean, found no such field; install a version that has it, such as 0.6.1"
        )
    return MixedPrecisionPolicy(**wanted)
