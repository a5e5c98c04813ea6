"""Bringing a wrapped model back after a script has replaced its parameters.

megatron-fsdp knows parameters by identity: its buffers, hooks and dicts are keyed by the objects
made at the wrap, and each forward puts these back whatever the module holds. So values are moved,
not objects, as the core does it; what differs is how a parameter is cut.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from polyshard.exceptions import RebuildError
from polyshard.parameters.guard import ParameterGuard
from polyshard.parameters.snapshot import ParameterSnapshot, SavedParameter
from polyshard_megatron_fsdp.megatron_fsdp.private_names import local_of
from polyshard_megatron_fsdp.megatron_fsdp.version import WHO
from polyshard_megatron_fsdp.model.layout import is_laid_out_like, part_of, tensor_parallel_shape
from polyshard_megatron_fsdp.model.sharded_model import ShardedModel

__all__ = ["REPLACES", "remember", "restore"]

#: Set on a parameter that a script put in the model, to the one that it stands for: an optimizer
#: may have been built on it before the model was restored.
REPLACES = "_polyshard_replaces"


class ShardSnapshot(ParameterSnapshot):
    """The distributed parameters of a model, whose shards megatron-fsdp has cut."""

    def shapes(self, entry: SavedParameter) -> tuple[torch.Size, ...]:
        """Return the shapes that a value may have: that of the tensor-parallel part, too."""
        # The layout is on the object, unless a cast has just taken its attributes away.
        entry.restore_attributes()
        return (*super().shapes(entry), tensor_parallel_shape(entry.parameter))

    def check_value(self, value: nn.Parameter, entry: SavedParameter) -> None:
        """Raise if a parameter cannot stand for a distributed one.

        Raises:
            RebuildError: It has another shape, no value, another layout, or is trained where the
                distributed one is not, which megatron-fsdp settles at the wrap.
        """
        super().check_value(value, entry)
        assert isinstance(entry.data, DTensor)
        if value.requires_grad != entry.requires_grad:
            raise RebuildError(
                f"expected requires_grad={entry.requires_grad} for {entry.names}, as it was "
                f"wrapped, found {value.requires_grad}; choose what is trained before parallelize"
            )
        if isinstance(value, DTensor) and not is_laid_out_like(value, entry.data):
            raise RebuildError(
                f"expected {entry.names} laid out as it was, or as a full tensor, found a "
                f"DTensor laid out as {value.placements} on {value.device_mesh}; gather it first"
            )

    def local_part(self, value: Tensor, entry: SavedParameter) -> Tensor:
        """Return this rank's part of a value, cut as megatron-fsdp cut the parameter."""
        if isinstance(value, DTensor):
            return local_of(value)
        assert isinstance(entry.parameter, DTensor)
        return part_of(value, entry.parameter)

    def retire(self, new: nn.Parameter, entry: SavedParameter) -> None:
        """Let an optimizer that was built on the new parameter find the distributed one."""
        setattr(new, REPLACES, entry.parameter)


def remember(model: nn.Module) -> ParameterSnapshot:
    """Put the distributed parameters in place and remember them."""
    if not isinstance(model, ShardedModel):
        _set_in_rebuild(model, True)
        return ParameterSnapshot.take(model)
    model.show_distributed()
    model.record.snapshot = ShardSnapshot.take(model.module)
    return model.record.snapshot


def _set_in_rebuild(model: nn.Module, value: bool) -> None:
    guard = ParameterGuard.of(model)
    if guard is not None:
        guard.in_rebuild = value


@torch.no_grad()
def restore(model: nn.Module, snapshot: ParameterSnapshot) -> None:
    """Take over the values that the module holds, and put the remembered objects back.

    Raises:
        RebuildError: megatron-fsdp cannot take over what was done; the model is as it was before.
    """
    if not isinstance(model, ShardedModel):
        _set_in_rebuild(model, False)
        snapshot.restore(model)
        return
    model.record.snapshot = None
    try:
        snapshot.restore(model.module)
    except RebuildError as error:
        raise RebuildError(f"{WHO}: after rebuild, {error}") from None
    model.is_param_fsdp_distributed = True
    model.install_optimized_model_weights()
    # What was gathered before has the old values.
    model.synchronize_param_gather()
