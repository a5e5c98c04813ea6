"""Megatron-FSDP as a strategy of Polyshard, and the public names of the module it replaces.

Names are resolved at first access: importing the package loads neither torch nor megatron-fsdp.
"""

from typing import TYPE_CHECKING

from polyshard._lazy import lazy_names

if TYPE_CHECKING:
    from polyshard.lifecycle.parallelize import maybe_shard_optimizer as maybe_shard_optimizer
    from polyshard_megatron_fsdp.compat import fully_shard_optimizer as fully_shard_optimizer
    from polyshard_megatron_fsdp.compat import (
        restore_distributed_param_attrs as restore_distributed_param_attrs,
    )
    from polyshard_megatron_fsdp.compat import (
        snapshot_distributed_param_attrs as snapshot_distributed_param_attrs,
    )
    from polyshard_megatron_fsdp.config import MegatronFSDPConfig as MegatronFSDPConfig
    from polyshard_megatron_fsdp.manager import MegatronFSDPManager as MegatronFSDPManager
    from polyshard_megatron_fsdp.megatron_fsdp.version import HAS_MEGATRON_FSDP as HAS_MEGATRON_FSDP
    from polyshard_megatron_fsdp.megatron_fsdp.version import logger as logger

_HOMES = {
    "HAS_MEGATRON_FSDP": "polyshard_megatron_fsdp.megatron_fsdp.version",
    "MegatronFSDPConfig": "polyshard_megatron_fsdp.config",
    "MegatronFSDPManager": "polyshard_megatron_fsdp.manager",
    "fully_shard_optimizer": "polyshard_megatron_fsdp.compat",
    "logger": "polyshard_megatron_fsdp.megatron_fsdp.version",
    "maybe_shard_optimizer": "polyshard.lifecycle.parallelize",
    "restore_distributed_param_attrs": "polyshard_megatron_fsdp.compat",
    "snapshot_distributed_param_attrs": "polyshard_megatron_fsdp.compat",
}

__all__ = sorted(_HOMES)

__getattr__, __dir__ = lazy_names(globals(), _HOMES)
