"""megatron-fsdp's arguments for a config, and the options that do not work where they are asked."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import torch.distributed as dist

from polyshard.exceptions import UnsupportedError
from polyshard_megatron_fsdp.config import MegatronFSDPConfig
from polyshard_megatron_fsdp.megatron_fsdp.version import WHO, require_version, warn_once
from polyshard_megatron_fsdp.model.precision import policy_for
from polyshard_megatron_fsdp.model.topology import Topology

__all__ = ["check_options", "wrap_arguments"]


def check_options(config: MegatronFSDPConfig, topology: Topology) -> None:
    """Refuse what cannot work here, and say once what has no effect.

    Raises:
        UnsupportedError: The message names the option and what it needs.
    """
    if topology.mesh.device_type != "cuda":
        _refuse(config, "nccl_ub", "CUDA and NCCL")
        _refuse(config, "fsdp_double_buffer", "CUDA")
    if not any(map(_is_installed, ("megatron.core.nccl_allocator", "apex.contrib.nccl_allocator"))):
        _refuse(config, "nccl_ub", "the NCCL allocator of Megatron Core or of Apex")
    if not _is_installed("transformer_engine"):
        _refuse(config, "keep_fp8_transpose_cache", "Transformer Engine")
    if config.outer_dp_sharding_strategy and topology.outer is None:
        raise UnsupportedError(
            f"{_who()}: outer_dp_sharding_strategy=1 needs a mesh with the dimension "
            "'dp_replicate' beside 'dp_shard', found "
            f"{topology.mesh.mesh_dim_names}; make the mesh with dp_replicate_size"
        )
    ranks = topology.data.mesh.flatten().tolist()
    if config.outer_dp_sharding_strategy and ranks != sorted(ranks):
        # megatron-fsdp takes a rank's place in the process group, where ranks ascend, for its
        # place in the mesh: some ranks would train another's shard.
        raise UnsupportedError(
            f"{_who()}: outer_dp_sharding_strategy=1 needs {topology.outer!r} before "
            f"{topology.shard!r} in the mesh, found the ranks in the order {ranks}; make the mesh "
            "with the replicas outermost"
        )
    if dist.get_rank() == 0:
        _say_what_has_no_effect(config)


def wrap_arguments(config: MegatronFSDPConfig, topology: Topology) -> dict[str, Any]:
    """Return the keyword arguments of ``fully_shard_model`` but for the units."""
    return {
        "device_mesh": topology.mesh,
        "dp_shard_dim": topology.shard,
        "tp_dim": topology.tensor,
        "zero_dp_strategy": config.zero_dp_strategy,
        "init_model_with_meta_device": config.init_fsdp_with_meta_device,
        "mixed_precision_policy": policy_for(config),
        # Synchronising each microbatch is turned on after the wrap: the argument logs a warning
        # about what accumulate() prevents.
        "sync_model_each_microbatch": False,
        "disable_bucketing": config.disable_bucketing,
        "calculate_per_token_loss": config.calculate_per_token_loss,
        "keep_fp8_transpose_cache": config.keep_fp8_transpose_cache,
        "nccl_ub": config.nccl_ub,
        "fsdp_double_buffer": config.fsdp_double_buffer,
        # gloo cannot average in the reduction, and divides before it.
        "average_in_collective": config.average_in_collective
        and topology.mesh.device_type == "cuda",
        # Experts are spread as all else: megatron-fsdp takes every parameter for one of an expert
        # that has ".experts." in its name, and asks for their group whether there are any or not.
        "expt_device_mesh": topology.mesh,
        **_outer_arguments(config, topology),
    }


def _outer_arguments(config: MegatronFSDPConfig, topology: Topology) -> dict[str, Any]:
    """Return what a second data-parallel dimension needs."""
    if topology.outer is None:
        return {}
    group = topology.data.get_group()
    return {
        "dp_outer_dim": topology.outer,
        "hybrid_fsdp_group": group,
        "hybrid_fsdp_expt_group": group,
        "outer_dp_sharding_strategy": config.outer_dp_sharding_strategy,
    }


def _refuse(config: MegatronFSDPConfig, option: str, needed: str) -> None:
    if getattr(config, option):
        raise UnsupportedError(
            f"{_who()}: {option}=True needs {needed}, which is not here; leave it out"
        )


def _say_what_has_no_effect(config: MegatronFSDPConfig) -> None:
    upstream = f"megatron-fsdp {require_version()}"
    if config.check_for_nan_in_grad:
        warn_once(
            f"check_for_nan_in_grad=True has no effect with {upstream}; to check gradients, set "
            "report_nan_in_param_grad=True, and to be rid of this message check_for_nan_in_grad="
            "False"
        )
    for option, moment in (("overlap_grad_reduce", "reduces"), ("overlap_param_gather", "gathers")):
        if not getattr(config, option):
            warn_once(f"{option}=False has no effect: {upstream} {moment} ahead in every stage")


def _is_installed(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:
        return False


def _who() -> str:
    return f"MegatronFSDPConfig ({WHO})"
