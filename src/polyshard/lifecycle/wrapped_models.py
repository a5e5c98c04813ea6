"""What is remembered of each model that a strategy has distributed."""

from __future__ import annotations

from typing import TYPE_CHECKING
from weakref import ReferenceType, WeakKeyDictionary, ref

from attrs import frozen
from torch import nn

from polyshard.config.base import DistributedConfig
from polyshard.mesh.devices import mesh_ranks

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

__all__ = ["WrappedModel", "find", "members_of", "remember"]


@frozen(eq=False)
class WrappedModel:
    """A model that a strategy has distributed.

    Attributes:
        config: The config that it was parallelized with.
        mesh: Where it is spread; None in a process without a group.
        module: The module that was given to ``parallelize``.
    """

    config: DistributedConfig
    mesh: DeviceMesh | None
    module: ReferenceType[nn.Module]


# Both the module that was given and the one that came back are keys.
_known: WeakKeyDictionary[nn.Module, WrappedModel] = WeakKeyDictionary()


def remember(
    module: nn.Module, wrapped: nn.Module, config: DistributedConfig, mesh: DeviceMesh | None
) -> None:
    """Note that a strategy made ``wrapped`` of ``module``, which may be the same."""
    _known[module] = _known[wrapped] = WrappedModel(config, mesh, ref(module))


def find(model: nn.Module) -> WrappedModel | None:
    """Return what is known of a model, None if no strategy has distributed it."""
    return _known.get(model)


def members_of(model: nn.Module) -> tuple[int, ...]:
    """Return the ranks that a model is spread over, all of them for one that is not known."""
    known = find(model)
    return mesh_ranks(None if known is None else known.mesh)
