"""Polyshard: a registry of distributed-training strategies for PyTorch.

Public names are resolved at first access, so that importing the package loads neither
torch nor any strategy.
"""

from typing import TYPE_CHECKING

from polyshard._lazy import lazy_names

if TYPE_CHECKING:
    from polyshard.config.base import DistributedConfig as DistributedConfig
    from polyshard.config.parallelism import MeshAxisName as MeshAxisName
    from polyshard.config.parallelism import ParallelismSizes as ParallelismSizes
    from polyshard.config.precision import MixedPrecision as MixedPrecision
    from polyshard.exceptions import PolyshardError as PolyshardError
    from polyshard.lifecycle.distributed_setup import DistributedSetup as DistributedSetup
    from polyshard.lifecycle.gradients import accumulate as accumulate
    from polyshard.lifecycle.gradients import clip_grad_norm as clip_grad_norm
    from polyshard.lifecycle.parallelize import maybe_shard_optimizer as maybe_shard_optimizer
    from polyshard.lifecycle.parallelize import parallelize as parallelize
    from polyshard.lifecycle.rebuild import post_rebuild as post_rebuild
    from polyshard.lifecycle.rebuild import pre_rebuild as pre_rebuild
    from polyshard.lifecycle.rebuild import rebuild as rebuild
    from polyshard.lifecycle.state_dict import full_state_dict as full_state_dict
    from polyshard.lifecycle.state_dict import load_full_state_dict as load_full_state_dict
    from polyshard.mesh.context import MeshContext as MeshContext
    from polyshard.registry.discovery import StrategyInfo as StrategyInfo
    from polyshard.registry.hookspecs import hookimpl as hookimpl
    from polyshard.registry.registry import StrategyRegistry as StrategyRegistry
    from polyshard.registry.registry import available_strategies as available_strategies
    from polyshard.registry.registry import observe as observe
    from polyshard.registry.registry import register as register
    from polyshard.registry.resolve import resolve_config as resolve_config
    from polyshard.strategies.ddp.config import DDPConfig as DDPConfig
    from polyshard.strategies.fsdp2.config import FSDP2Config as FSDP2Config
    from polyshard.transforms.context_parallel.context import context_parallel as context_parallel

__version__ = "0.1.0"

_HOMES = {
    "DDPConfig": "polyshard.strategies.ddp.config",
    "DistributedConfig": "polyshard.config.base",
    "DistributedSetup": "polyshard.lifecycle.distributed_setup",
    "FSDP2Config": "polyshard.strategies.fsdp2.config",
    "MeshAxisName": "polyshard.config.parallelism",
    "MeshContext": "polyshard.mesh.context",
    "MixedPrecision": "polyshard.config.precision",
    "ParallelismSizes": "polyshard.config.parallelism",
    "PolyshardError": "polyshard.exceptions",
    "StrategyInfo": "polyshard.registry.discovery",
    "StrategyRegistry": "polyshard.registry.registry",
    "accumulate": "polyshard.lifecycle.gradients",
    "available_strategies": "polyshard.registry.registry",
    "clip_grad_norm": "polyshard.lifecycle.gradients",
    "context_parallel": "polyshard.transforms.context_parallel.context",
    "full_state_dict": "polyshard.lifecycle.state_dict",
    "hookimpl": "polyshard.registry.hookspecs",
    "load_full_state_dict": "polyshard.lifecycle.state_dict",
    "maybe_shard_optimizer": "polyshard.lifecycle.parallelize",
    "observe": "polyshard.registry.registry",
    "parallelize": "polyshard.lifecycle.parallelize",
    "post_rebuild": "polyshard.lifecycle.rebuild",
    "pre_rebuild": "polyshard.lifecycle.rebuild",
    "rebuild": "polyshard.lifecycle.rebuild",
    "register": "polyshard.registry.registry",
    "resolve_config": "polyshard.registry.resolve",
}

__all__ = ["__version__", *sorted(_HOMES)]

__getattr__, __dir__ = lazy_names(globals(), _HOMES)
