"""DistributedSetup: strategy and mesh together, with the lifecycle functions as methods."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Literal

from attrs import frozen

from polyshard._describe import describe_value
from polyshard.config.base import DistributedConfig
from polyshard.config.parallelism import ParallelismSizes
from polyshard.config.structuring import structure
from polyshard.exceptions import ConfigError, MeshError
from polyshard.mesh.context import MeshContext, covered_ranks
from polyshard.mesh.devices import served_devices
from polyshard.processes.environment import LaunchEnvironment, read_launch_environment
from polyshard.processes.process_group import LONGEST_TIMEOUT, join_process_group
from polyshard.registry.resolve import check_parallelism, resolve_config

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn
    from torch.distributed.device_mesh import DeviceMesh
    from torch.optim import Optimizer

    from polyshard.transforms.context_parallel.attention import AttentionMethod

__all__ = ["DistributedSetup"]

ActivationCheckpointing = bool | Literal["full", "selective"]


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
        parallelism_sizes: ParallelismSizes | Mapping[str, int | None] | None = None,
        activation_checkpointing: ActivationCheckpointing = False,
        world_size: int | None = None,
        timeout_minutes: float | None = None,
        ranks: Iterable[int] | None = None,
        device: str | None = None,
    ) -> DistributedSetup:
        """Resolve the strategy and make the mesh; call it on every rank of the job.

        Where torchrun or SLURM started this process and the script has not started a process
        group, it is started here. All mistakes are found before that, without importing torch.

        Args:
            strategy: Name, alias, mapping or config.
            parallelism_sizes: Sizes, or a mapping of them (default: data parallel only).
            activation_checkpointing: Sets the config's field of that name; False leaves it.
            world_size: How many ranks there must be (default: as many as there are).
            timeout_minutes: How long a collective may wait for a rank, in every process group of
                this process (default: as the job's default group was started).
            ranks: Global ranks that train together (default: all). The others call ``build``
                too, and may train nothing with what they get.
            device: ``"cpu"`` or ``"cuda"`` (default: what the process group's backend computes on,
                and where it is started here, CUDA if each rank can have a device).

        Raises:
            ConfigError: A value is not what its field accepts, or there is no process group for
                the device.
            LaunchError: The environment describes no group of processes, or two.
            MeshError: The sizes do not multiply to the number of ranks, the strategy does not
                support one of them, or there are not ``world_size`` ranks.
            StrategyNotFoundError: No installed strategy has that name.
        """
        config = _with_checkpointing(resolve_config(strategy), activation_checkpointing)
        sizes = structure(parallelism_sizes or {}, ParallelismSizes, path=("parallelism_sizes",))
        check_parallelism(config, sizes)
        timeout = _to_timeout(timeout_minutes)
        launch_environment = None if _has_group() else read_launch_environment()
        _check_device(device, launch_environment)
        covered = covered_ranks(ranks, _job_size(launch_environment))
        _check_world_size(world_size, len(covered))
        sizes = sizes.resolve(len(covered))
        if launch_environment is not None:
            join_process_group(launch_environment, device)
        context = MeshContext.build(sizes, device=device, ranks=covered, timeout=timeout)
        return cls(config, context)

    @property
    def world_size(self) -> int:
        """The number of ranks that train together, 1 without a process group."""
        mesh = self.mesh_context.mesh
        return 1 if mesh is None else mesh.size()

    @property
    def device(self) -> torch.device:
        """The device that this rank trains on."""
        from polyshard.mesh.devices import mesh_device

        return mesh_device(self.mesh_context.mesh)

    def parallelize(
        self,
        model: nn.Module,
        optimizer: Optimizer | None = None,
        methods: Sequence[str] | None = None,
    ) -> tuple[nn.Module, Optimizer | None]:
        """Distribute a model over the mesh; see ``polyshard.parallelize``.

        Raises:
            MeshError: The mesh does not cover this rank.
        """
        from polyshard.lifecycle.parallelize import parallelize

        mesh = self._own_mesh()
        return parallelize(model, self.config, mesh=mesh, optimizer=optimizer, methods=methods)

    def shard_optimizer(self, model: nn.Module, optimizer: Optimizer) -> Optimizer:
        """Shard an optimizer if need be; see ``polyshard.maybe_shard_optimizer``."""
        from polyshard.lifecycle.parallelize import maybe_shard_optimizer

        return maybe_shard_optimizer(model, optimizer)

    def rebuild(self, model: nn.Module | Sequence[nn.Module]) -> AbstractContextManager[None]:
        """Keep the strategy right while Parameters are replaced; see ``polyshard.rebuild``."""
        from polyshard.lifecycle.rebuild import rebuild

        return rebuild(model)

    def accumulate(self, model: nn.Module, *, last: bool) -> AbstractContextManager[None]:
        """Return the context of one of several microbatches; see ``polyshard.accumulate``."""
        from polyshard.lifecycle.gradients import accumulate

        return accumulate(model, last=last)

    def context_parallel(
        self,
        *,
        buffers: Sequence[Tensor],
        seq_dims: Sequence[int],
        attention: AttentionMethod | None = None,
    ) -> AbstractContextManager[None]:
        """Cut sequences to this rank's part for a microbatch; see ``polyshard.context_parallel``.

        Where there is no context parallelism it does nothing.
        """
        from polyshard.transforms.context_parallel.context import context_parallel

        return context_parallel(
            self.mesh_context, buffers=buffers, seq_dims=seq_dims, attention=attention
        )

    def clip_grad_norm(self, model: nn.Module, max_norm: float, norm_type: float = 2.0) -> Tensor:
        """Clip the gradients by their global norm; see ``polyshard.clip_grad_norm``."""
        from polyshard.lifecycle.gradients import clip_grad_norm

        return clip_grad_norm(model, max_norm, norm_type)

    def full_state_dict(self, model: nn.Module, *, rank0_only: bool = True) -> dict[str, Tensor]:
        """Gather the whole model on the first rank; see ``polyshard.full_state_dict``."""
        from polyshard.lifecycle.state_dict import full_state_dict

        return full_state_dict(model, rank0_only=rank0_only)

    def load_full_state_dict(
        self, model: nn.Module, state_dict: Mapping[str, Tensor] | None
    ) -> None:
        """Load unsharded tensors of the first rank; see ``polyshard.load_full_state_dict``."""
        from polyshard.lifecycle.state_dict import load_full_state_dict

        load_full_state_dict(model, state_dict)

    def _own_mesh(self) -> DeviceMesh | None:
        mesh = self.mesh_context.mesh
        if mesh is not None and mesh.get_coordinate() is None:
            raise MeshError(
                f"expected one of the ranks {mesh.mesh.flatten().tolist()} that this setup "
                f"covers, found rank {mesh.get_rank()}; call it on those alone"
            )
        return mesh


def _with_checkpointing(
    config: DistributedConfig, wanted: ActivationCheckpointing
) -> DistributedConfig:
    """Return the config with activation checkpointing as wanted; False leaves it alone."""
    held = getattr(config, "activation_checkpointing", False)
    if wanted is False or wanted == held:
        return config
    if held:
        raise ConfigError(
            f"activation_checkpointing: expected it to be set once, found {held!r} in the config "
            f"of strategy {config.strategy!r} and {wanted!r} beside it",
            field="activation_checkpointing",
        )
    return resolve_config(config, activation_checkpointing=wanted)


def _to_timeout(minutes: float | None) -> timedelta | None:
    if minutes is None:
        return None
    number = isinstance(minutes, int | float) and not isinstance(minutes, bool)
    if not number or not 0 < minutes <= LONGEST_TIMEOUT:
        raise ConfigError(
            f"timeout_minutes: expected a number above 0 and at most {LONGEST_TIMEOUT}, found "
            f"{describe_value(minutes)}",
            field="timeout_minutes",
        )
    return timedelta(minutes=minutes)


def _check_device(device: str | None, launch_environment: LaunchEnvironment | None) -> None:
    """Raise if the ranks cannot train on a device of this type."""
    if device not in (None, "cpu", "cuda"):
        raise ConfigError(
            f"device: expected 'cpu' or 'cuda', found {describe_value(device)}", field="device"
        )
    served = served_devices() if _has_group() else ["cpu"]
    if launch_environment is None and device not in (None, *served):
        raise ConfigError(
            f"device: expected a process group for {device!r}, found one for "
            f"{' and '.join(served)}; start one whose backend computes there, or leave device out",
            field="device",
        )


def _has_group() -> bool:
    """Whether there is a process group, found out without importing torch."""
    module = sys.modules.get("torch.distributed")
    return module is not None and module.is_initialized()


def _job_size(launch_environment: LaunchEnvironment | None) -> int:
    if launch_environment is not None:
        return launch_environment.world_size
    if not _has_group():
        return 1
    from polyshard.processes.process_group import world_size

    return world_size()


def _check_world_size(expected: int | None, found: int) -> None:
    if expected is None:
        return
    if not isinstance(expected, int) or isinstance(expected, bool) or expected < 1:
        raise ConfigError(
            f"world_size: expected an integer of at least 1, found {describe_value(expected)}",
            field="world_size",
        )
    if expected != found:
        raise MeshError(
            f"expected {expected} ranks, as world_size says, found {found}; start that many "
            "processes, or leave world_size out"
        )
