"""Rebuilds: the objects that DistributedDataParallel hooked come back, or it hooks anew."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from attrs import frozen
from torch import nn
from torch.distributed import _register_comm_hook  # type: ignore[attr-defined]
from torch.nn.parallel import DistributedDataParallel

from polyshard.parameters.snapshot import ParameterSnapshot
from polyshard.strategies.ddp.guard import DDPGuard, accumulators
from polyshard.strategies.ddp.wrap import inner_module

if TYPE_CHECKING:
    from torch.autograd.graph import Node

__all__ = ["Snapshot", "after_rebuild", "before_rebuild"]


@frozen(eq=False)
class Snapshot:
    """The parameters before a rebuild, and the nodes that are hooked."""

    parameters: ParameterSnapshot
    accumulators: dict[nn.Parameter, Node]


def before_rebuild(model: nn.Module) -> Snapshot:
    """Remember the parameters, and allow assigning loads from now on."""
    _set_in_rebuild(model, True)
    inner = inner_module(model)
    return Snapshot(ParameterSnapshot.take(inner), accumulators(inner))


def after_rebuild(model: nn.Module, snapshot: Snapshot) -> None:
    """Put the old objects back with the new values, and hook them again where that is lost."""
    _set_in_rebuild(model, False)
    inner = inner_module(model)
    snapshot.parameters.restore(inner)
    present = accumulators(inner)
    if isinstance(model, DistributedDataParallel) and not _same(present, snapshot.accumulators):
        _hook_anew(model)


def _set_in_rebuild(model: nn.Module, value: bool) -> None:
    guard = DDPGuard.of(model)
    if guard is not None:
        guard.in_rebuild = value


def _same(one: dict[nn.Parameter, Node], other: dict[nn.Parameter, Node]) -> bool:
    return one.keys() == other.keys() and all(one[p] is other[p] for p in one)


def _hook_anew(model: DistributedDataParallel) -> None:
    """Give the wrapper a new reducer, as it gives itself one when it is unpickled."""
    reducing: Any = model  # what follows has no annotations
    parameters, sparse = reducing._build_params_for_reducer()
    names = reducing._build_debug_param_to_name_mapping(parameters)
    reducing._ddp_init_helper(parameters, sparse, names, model.static_graph)
    if model.static_graph:
        model.static_graph = False  # or the call does nothing
        reducing._set_static_graph()
    for hook, state in model._comm_hooks:
        _register_comm_hook(model.reducer, state, hook)
    guard = DDPGuard.of(model)
    if isinstance(guard, DDPGuard):
        guard.watch(model.module)
