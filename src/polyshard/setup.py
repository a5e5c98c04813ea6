"""DistributedSetup: strategy and mesh together, with the lifecycle functions as methods."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

from attrs import frozen

from polyshard.config import DistributedConfig
from polyshard.mesh import MeshContext, ParallelismSizes
from polyshard.resolve import resolve_config

if TYPE_CHECKING:
    import torch
    from torch import nn
    from torch.optim import Optimizer

__all__ = ["DistributedSetup"]


@frozen
class DistributedSetup:
    """How a job trains: by which strategy, and over which mesh.

    Make one with ``DistributedSetup.build``.

    Attributes:
        config: The strategy's config.
        mesh_context: The live mesh.
    """

    config: DistributedConfig
    mesh_context: MeshContext

    @classmethod
    def build(
        cls,
        strategy: str | Mapping[str, Any] | DistributedConfig = "fsdp2",
        parallelism_sizes: ParallelismSizes | Mapping[str, int] | None = None,
    ) -> DistributedSetup:
        """Resolve the strategy and make the mesh.

        Args:
            strategy: Name, alias, mapping or config.
            parallelism_sizes: Sizes, or a mapping of them (default: data parallel only).

        Raises:
            ConfigError: A value is not what its field accepts.
            MeshError: The sizes do not multiply to the number of ranks.
            StrategyNotFoundError: No installed strategy has that name.
        """
        from polyshard.structuring import structure

        config = resolve_config(strategy)
        sizes = structure(parallelism_sizes or {}, ParallelismSizes, path=("parallelism_sizes",))
        return cls(config, MeshContext.build(sizes))

    @property
    def world_size(self) -> int:
        """The number of ranks of the job, 1 without a process group."""
        from polyshard.ranks import world_size

        return world_size()

    @property
    def device(self) -> torch.device:
        """The device that this rank trains on."""
        import torch

        mesh = self.mesh_context.mesh
        if mesh is None or mesh.device_type == "cpu":
            return torch.device("cpu")
        return torch.device(mesh.device_type, torch.accelerator.current_device_index())

    def parallelize(
        self, model: nn.Module, optimizer: Optimizer | None = None
    ) -> tuple[nn.Module, Optimizer | None]:
        """Distribute a model over the mesh; see ``polyshard.parallelize``."""
        from polyshard.lifecycle import parallelize

        return parallelize(model, self.config, mesh=self.mesh_context.mesh, optimizer=optimizer)

    def shard_optimizer(self, model: nn.Module, optimizer: Optimizer) -> Optimizer:
        """Shard an optimizer if need be; see ``polyshard.maybe_shard_optimizer``."""
        from polyshard.lifecycle import maybe_shard_optimizer

        return maybe_shard_optimizer(model, optimizer, self.config)

    def rebuild(self, model: nn.Module | Sequence[nn.Module]) -> AbstractContextManager[None]:
        """Keep the strategy right while Parameters are replaced; see ``polyshard.rebuild``."""
        from polyshard.lifecycle import rebuild

        return rebuild(model, self.config)
