"""What is remembered of each model that a strategy has distributed.

It is why the functions of a training loop need no config: they find it by the model.
"""

from __future__ import annotations

from typing import TYPE_CHECKING
from weakref import ReferenceType, WeakKeyDictionary, ref

from attrs import frozen
from torch import nn

from polyshard.config.base import DistributedConfig
from polyshard.exceptions import ModelError
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
        result: The model that ``parallelize`` returned; it may be the same.
    """

    config: DistributedConfig
    mesh: DeviceMesh | None
    module: ReferenceType[nn.Module]
    result: ReferenceType[nn.Module]

    @property
    def model(self) -> nn.Module:
        """The model that ``parallelize`` returned.

        Raises:
            ModelError: It is gone, and the strategy with it.
        """
        model = self.result()
        if model is None:
            raise ModelError(
                "expected the model that parallelize returned to be in use, found that only the "
                "module given to it was kept; keep what parallelize returned, and train that"
            )
        return model


# Both the module that was given and the one that came back are keys.
_known: WeakKeyDictionary[nn.Module, WrappedModel] = WeakKeyDictionary()


def remember(
    module: nn.Module, wrapped: nn.Module, config: DistributedConfig, mesh: DeviceMesh | None
) -> None:
    """Note that a strategy made ``wrapped`` of ``module``, which may be the same."""
    _known[module] = _known[wrapped] = WrappedModel(config, mesh, ref(module), ref(wrapped))


def find(model: nn.Module) -> WrappedModel | None:
    """Return what is known of a model, None if no strategy has distributed it.

    Args:
        model: What ``parallelize`` returned, the module given to it, or a module that adds no
            parameters to one of these, such as ``torch.compile`` makes.

    Raises:
        ModelError: It is a part of a distributed model, or holds more than one.
    """
    known = _known.get(model)
    if known is not None or not _known:
        return known
    inside = {id(k): k for m in model.modules() if (k := _known.get(m)) is not None}
    if inside:
        return _only(model, list(inside.values()))
    for whole in list(_known.values()):
        outer = whole.result()
        if outer is not None and any(module is model for module in outer.modules()):
            raise ModelError(
                f"expected a whole model, found {type(model).__name__}, a part of the "
                f"{type(outer).__name__} that parallelize returned; give that model"
            )
    return None


def members_of(model: nn.Module) -> tuple[int, ...]:
    """Return the ranks that a model is spread over, all of them for one that is not known."""
    known = find(model)
    return mesh_ranks(None if known is None else known.mesh)


def _only(model: nn.Module, inside: list[WrappedModel]) -> WrappedModel:
    """Return the one distributed model that is all there is of this one."""
    wholes = [known.model for known in inside]
    held = {id(parameter) for whole in wholes for parameter in whole.parameters()}
    more = [name for name, parameter in model.named_parameters() if id(parameter) not in held]
    if len(wholes) == 1 and not more:
        return inside[0]
    found = f"{len(wholes)} of them" if len(wholes) > 1 else f"{more[0]!r} beside it"
    raise ModelError(
        f"expected a model that parallelize returned, found {type(model).__name__}, which holds "
        f"{found}; give each model that parallelize returned by itself"
    )
