"""Polyshard: a registry of distributed-training strategies for PyTorch.

Public names are resolved at first access, so that importing the package loads neither
torch nor any strategy.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from polyshard.config import DistributedConfig as DistributedConfig
    from polyshard.context_parallelism import context_parallel as context_parallel
    from polyshard.discovery import StrategyInfo as StrategyInfo
    from polyshard.exceptions import PolyshardError as PolyshardError
    from polyshard.full_state import load_full_state_dict as load_full_state_dict
    from polyshard.hookspecs import hookimpl as hookimpl
    from polyshard.lifecycle import accumulate as accumulate
    from polyshard.lifecycle import clip_grad_norm as clip_grad_norm
    from polyshard.lifecycle import full_state_dict as full_state_dict
    from polyshard.lifecycle import maybe_shard_optimizer as maybe_shard_optimizer
    from polyshard.lifecycle import parallelize as parallelize
    from polyshard.lifecycle import post_rebuild as post_rebuild
    from polyshard.lifecycle import pre_rebuild as pre_rebuild
    from polyshard.lifecycle import rebuild as rebuild
    from polyshard.mesh import MeshAxisName as MeshAxisName
    from polyshard.mesh import MeshContext as MeshContext
    from polyshard.mesh import ParallelismSizes as ParallelismSizes
    from polyshard.precision import MixedPrecision as MixedPrecision
    from polyshard.registry import StrategyRegistry as StrategyRegistry
    from polyshard.registry import available_strategies as available_strategies
    from polyshard.registry import observe as observe
    from polyshard.registry import register as register
    from polyshard.resolve import resolve_config as resolve_config
    from polyshard.setup import DistributedSetup as DistributedSetup
    from polyshard.strategies.ddp.config import DDPConfig as DDPConfig
    from polyshard.strategies.fsdp2.config import FSDP2Config as FSDP2Config

__version__ = "0.1.0"

_HOMES = {
    "DDPConfig": "polyshard.strategies.ddp.config",
    "DistributedConfig": "polyshard.config",
    "DistributedSetup": "polyshard.setup",
    "FSDP2Config": "polyshard.strategies.fsdp2.config",
    "MeshAxisName": "polyshard.mesh",
    "MeshContext": "polyshard.mesh",
    "MixedPrecision": "polyshard.precision",
    "ParallelismSizes": "polyshard.mesh",
    "PolyshardError": "polyshard.exceptions",
    "StrategyInfo": "polyshard.discovery",
    "StrategyRegistry": "polyshard.registry",
    "accumulate": "polyshard.lifecycle",
    "available_strategies": "polyshard.registry",
    "clip_grad_norm": "polyshard.lifecycle",
    "context_parallel": "polyshard.context_parallelism",
    "full_state_dict": "polyshard.lifecycle",
    "hookimpl": "polyshard.hookspecs",
    "load_full_state_dict": "polyshard.full_state",
    "maybe_shard_optimizer": "polyshard.lifecycle",
    "observe": "polyshard.registry",
    "parallelize": "polyshard.lifecycle",
    "post_rebuild": "polyshard.lifecycle",
    "pre_rebuild": "polyshard.lifecycle",
    "rebuild": "polyshard.lifecycle",
    "register": "polyshard.registry",
    "resolve_config": "polyshard.resolve",
}

__all__ = ["__version__", *sorted(_HOMES)]


def __getattr__(name: str) -> object:
    try:
        home = _HOMES[name]
    except KeyError:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}") from None
    value = getattr(import_module(home), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES})
