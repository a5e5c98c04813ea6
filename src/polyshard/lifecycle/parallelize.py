"""The functions that a training script calls, the same under every strategy."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING
from weakref import WeakSet

from torch import nn
from torch.optim import Optimizer

from polyshard._describe import describe_owner, describe_value
from polyshard.config.base import DistributedConfig
from polyshard.exceptions import (
    ConfigError,
    OptimizerNotShardableError,
    PluginError,
    UnsupportedError,
)
from polyshard.lifecycle import rank_checks, wrapped_models
from polyshard.lifecycle.wrapped_models import WrappedModel
from polyshard.mesh.context import world_mesh
from polyshard.mesh.devices import mesh_ranks
from polyshard.mesh.process_groups import one_timeout
from polyshard.parameters.replaced import mark_replaced, refuse_replaced_parameters
from polyshard.processes.process_group import world_size
from polyshard.processes.rank_sync import check_same_on_all_ranks, raise_on_all_ranks
from polyshard.registry.registry import default_registry
from polyshard.transforms.methods import method_names

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

__all__ = ["maybe_shard_optimizer", "parallelize"]

_ready_optimizers: WeakSet[Optimizer] = WeakSet()


def parallelize(
    model: nn.Module,
    config: DistributedConfig,
    *,
    mesh: DeviceMesh | None = None,
    optimizer: Optimizer | None = None,
    methods: Sequence[str] | None = None,
) -> tuple[nn.Module, Optimizer | None]:
    """Distribute a model, and the optimizer with it if there is one, by the config's strategy.

    Call it on every rank of the mesh. In a plain process without a process group the world has
    one rank.

    Args:
        model: The model, on any device; it may be changed in place.
        config: Its class names the strategy.
        mesh: Where the model is spread (default: one dimension ``"dp"`` over all ranks).
        optimizer: An optimizer built on the model's parameters. It comes back holding the
            distributed ones, in the same groups, ready to step.
        methods: Names of methods of the model, beside its forward, that are called on what comes
            back (default: ``generate``, if the model has it). All ranks call one together, each
            with its own arguments, and run it without each other, so that they may run the model
            a different number of times, or raise. A strategy that shards parameters gathers the
            whole model for as long as a method runs.

    Returns:
        The model to train, which need not be the one given, and the optimizer to step (None if
        none was given).

    Raises:
        StrategyNotFoundError: No installed strategy has that config.
        UnsupportedError: The model is parallelized already, or the strategy cannot prepare methods.
        ModelError: The model lacks a method, or it is none that can be prepared.
        MeshError: The process is one of several ranks and has no process group.
        RanksDisagreeError: Ranks have different plugins, configs or models.
        PeerFailedError: Another rank failed.
    """
    registry = default_registry()
    mesh = world_mesh() if mesh is None else mesh
    members = mesh_ranks(mesh)
    before = rank_checks.named_parameters_of(model)
    with raise_on_all_ranks("parallelize", members):
        _refuse_parallelized(model)
        registry.implements("parallelize", config)
        names = method_names(model, methods)
        facts = rank_checks.facts(model, config) | {"methods": "\n".join(names)}
        check_same_on_all_ranks("parallelize", members, facts)
    # Every rank is known to come along: a strategy would wait for one that does not.
    with raise_on_all_ranks("parallelize", members), one_timeout():
        result = registry.dispatch(
            "parallelize", config, model=model, mesh=mesh, optimizer=optimizer
        )
        wrapped, bound = _checked_result(result, config, optimizer)
        asked = methods is not None or registry.implements("add_methods", config)
        if names and (asked or wrapped is model):
            registry.dispatch("add_methods", config, model=wrapped, module=model, names=names)
    kept = set(wrapped.parameters())
    for name, parameter in before.items():
        if parameter not in kept:
            mark_replaced(parameter, name)
    wrapped_models.remember(model, wrapped, config, mesh)
    if bound is not None:
        _ready_optimizers.add(bound)
    return wrapped, bound


def maybe_shard_optimizer(
    model_part: nn.Module,
    optimizer: Optimizer,
    distributed_config: DistributedConfig | None = None,
    *,
    allow: bool = True,
) -> Optimizer:
    """Shard an optimizer where the strategy needs it, and return the one to step.

    Returned unchanged, as the same object: for a model that was never parallelized, under a
    strategy whose optimizers need no sharding, with one rank, and where ``parallelize`` already
    made it ready.

    Args:
        model_part: What ``parallelize`` returned, or the module given to it.
        optimizer: An optimizer built on its parameters.
        distributed_config: The config that it was parallelized with (default: found by the
            model). For a model that was not, the strategy that it names is asked.
        allow: False for an optimizer whose update must not be sharded; it is then refused.

    Raises:
        ConfigError: The config is of another strategy than the model.
        OptimizerNotShardableError: The optimizer must not be sharded, by ``allow`` or because
            the strategy knows that its update needs whole matrices.
        OptimizerError: The optimizer holds parameters that ``parallelize`` replaced.
        StrategyNotFoundError: No installed strategy has that config.
    """
    known = wrapped_models.find(model_part)
    config = _config_of(known, distributed_config)
    if config is None:
        return optimizer
    model = model_part if known is None else known.model
    registry = default_registry()
    shards = registry.implements("shard_optimizer", config)
    refuse_replaced_parameters(optimizer)
    if not shards or world_size() == 1:
        return optimizer
    if not allow:
        info = registry.find(config.strategy)
        raise OptimizerNotShardableError(
            f"{type(optimizer).__name__} ({describe_owner(type(optimizer))}) was declared not "
            f"shardable (allow=False), but strategy {info.name!r} ({info.origin}) shards every "
            f"optimizer over its {world_size()} ranks; use an elementwise optimizer such as "
            "AdamW, or a strategy that does not shard optimizers"
        )
    if optimizer in _ready_optimizers:
        return optimizer
    with (
        raise_on_all_ranks("shard_optimizer", wrapped_models.members_of(model)),
        one_timeout(),
    ):
        sharded = registry.dispatch("shard_optimizer", config, model=model, optimizer=optimizer)
        if not isinstance(sharded, Optimizer):
            raise _wrong_result(config, "shard_optimizer", "an optimizer", sharded)
    _ready_optimizers.add(sharded)
    return sharded


def _config_of(
    known: WrappedModel | None, given: DistributedConfig | None
) -> DistributedConfig | None:
    """Return the config of a model, None if there is none.

    Raises:
        ConfigError: The one that is given is of another strategy.
    """
    if known is None:
        return given
    if given is not None and type(given) is not type(known.config):
        raise ConfigError(
            f"distributed_config: expected the config of strategy {known.config.strategy!r}, which "
            f"parallelized the model, found {describe_value(given)}; leave it out",
            field="distributed_config",
        )
    return known.config


def _refuse_parallelized(model: nn.Module) -> None:
    known = wrapped_models.find(model)
    if known is not None:
        raise UnsupportedError(
            f"expected a model that is not parallelized yet, found {type(model).__name__}, which "
            f"{known.config.strategy!r} has parallelized; build a new one"
        )


def _checked_result(
    result: object, config: DistributedConfig, optimizer: Optimizer | None
) -> tuple[nn.Module, Optimizer | None]:
    """Return what ``parallelize`` gave back, or say what is wrong with it."""
    if isinstance(result, tuple) and len(result) == 2 and isinstance(result[0], nn.Module):
        model, bound = result
        if bound is None if optimizer is None else isinstance(bound, Optimizer):
            return model, bound
    expected = "(model, None)" if optimizer is None else "(model, optimizer)"
    raise _wrong_result(config, "parallelize", expected, result)


def _wrong_result(
    config: DistributedConfig, hook: str, expected: str, found: object
) -> PluginError:
    info = default_registry().find(config.strategy)
    return PluginError(
        f"hook {hook!r} of strategy {info.name!r} ({info.origin}): expected it to return "
        f"{expected}, found {describe_value(found)}"
    )
