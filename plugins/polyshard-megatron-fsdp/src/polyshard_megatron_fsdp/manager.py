"""MegatronFSDPManager: a config and a mesh, and the models that are wrapped with them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import attrs

from polyshard._describe import describe_value
from polyshard.exceptions import ConfigError, MeshError
from polyshard_megatron_fsdp.config import MegatronFSDPConfig
from polyshard_megatron_fsdp.megatron_fsdp.version import WHO, require_version

if TYPE_CHECKING:
    from torch import nn
    from torch.distributed.device_mesh import DeviceMesh
    from torch.optim import Optimizer

__all__ = ["MegatronFSDPManager"]


class MegatronFSDPManager:
    """Parallelizes models with Megatron-FSDP over the dimensions of a mesh made outside.

    Each field of the config is an attribute of the manager too.

    Attributes:
        config: How models are wrapped.
        device_mesh: Over which ranks, by names as ``polyshard.MeshAxisName`` has them.
    """

    def __init__(self, config: MegatronFSDPConfig, device_mesh: DeviceMesh) -> None:
        """Take a config and a mesh; nothing is set up until ``parallelize``.

        Raises:
            ConfigError: ``config`` is not a MegatronFSDPConfig.
            MeshError: ``device_mesh`` is not a DeviceMesh.
            PluginLoadError: megatron-fsdp is missing or too old.
        """
        require_version()
        who = f"MegatronFSDPManager ({WHO})"
        if not isinstance(config, MegatronFSDPConfig):
            raise ConfigError(f"{who}: expected a MegatronFSDPConfig, {_found(config)}")
        # Only its shape is asked for, so that a config can be checked without torch.
        if not hasattr(device_mesh, "mesh_dim_names"):
            raise MeshError(
                f"{who}: expected a DeviceMesh, {_found(device_mesh)}; initialize the process "
                "group and make one with torch.distributed.device_mesh.init_device_mesh"
            )
        self.config = config
        self.device_mesh = device_mesh
        for field in attrs.fields(MegatronFSDPConfig):
            setattr(self, field.name, getattr(config, field.name))

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any: ...

    def parallelize(
        self, model: nn.Module, optimizer: Optimizer | None = None
    ) -> tuple[nn.Module, Optimizer | None]:
        """Wrap a model, and shard the optimizer with it if there is one.

        Without an optimizer the script shards one later, with ``fully_shard_optimizer`` or
        ``maybe_shard_optimizer``, or calls the model's ``finish_grad_sync``,
        ``install_optimized_model_weights`` and ``zero_grad_buffer`` around its own steps. An
        optimizer that is given keeps its groups and hyperparameters. With one rank both come
        back as they are. ``generate`` works on what comes back, if the model has it.

        Raises:
            MeshError: The mesh has no dimension to shard over.
            OptimizerError: The optimizer is not the model's, or must not be sharded.
            UnsupportedError: The model is wrapped already.
        """
        from polyshard.lifecycle import wrapped_models
        from polyshard.transforms.methods import method_names
        from polyshard_megatron_fsdp.model.sharded_model import ShardedModel
        from polyshard_megatron_fsdp.parallelize import parallelize

        wrapped, bound = parallelize(
            self.config, model, self.device_mesh, optimizer, by_hand=optimizer is None
        )
        if isinstance(wrapped, ShardedModel):
            # So that Polyshard's functions know it as one that polyshard.parallelize returned.
            wrapped_models.remember(model, wrapped, self.config, self.device_mesh)
            wrapped.add_methods(method_names(model, None))
        return wrapped, bound


def _found(value: object) -> str:
    return f"found {describe_value(value)}"
