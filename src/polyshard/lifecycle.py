"""The functions that a training script calls, the same under every strategy."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any
from weakref import WeakSet

from attrs import frozen
from torch import nn
from torch.optim import Optimizer

from polyshard import guards, parallelized
from polyshard.config import DistributedConfig
from polyshard.discovery import describe_owner
from polyshard.exceptions import OptimizerNotShardableError, PluginError, UnsupportedError
from polyshard.fields import describe_value
from polyshard.mesh import world_mesh
from polyshard.process_groups import one_timeout
from polyshard.ranks import agree, mesh_ranks, together, world_size
from polyshard.registry import default_registry

if TYPE_CHECKING:
    from torch import Tensor
    from torch.distributed.device_mesh import DeviceMesh

__all__ = [
    "accumulate",
    "clip_grad_norm",
    "full_state_dict",
    "maybe_shard_optimizer",
    "parallelize",
    "parameter_bytes",
    "post_rebuild",
    "pre_rebuild",
    "rebuild",
]


_ready_optimizers: WeakSet[Optimizer] = WeakSet()


def parallelize(
    model: nn.Module,
    config: DistributedConfig,
    *,
    mesh: DeviceMesh | None = None,
    optimizer: Optimizer | None = None,
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

    Returns:
        The model to train, which need not be the one given, and the optimizer to step (None if
        none was given).

    Raises:
        StrategyNotFoundError: No installed strategy has that config.
        UnsupportedError: The model is parallelized already.
        MeshError: The process is one of several ranks and has no process group.
        RanksDisagreeError: Ranks have different plugins, configs or models.
        PeerFailedError: Another rank failed.
    """
    registry = default_registry()
    mesh = world_mesh() if mesh is None else mesh
    members = mesh_ranks(mesh)
    before = guards.parameters_of(model)
    with together("parallelize", members):
        _refuse_parallelized(model)
        registry.implements("parallelize", config)
        agree("parallelize", members, guards.facts(model, config))
    # Every rank is known to come along: a strategy would wait for one that does not.
    with together("parallelize", members), one_timeout():
        result = registry.dispatch(
            "parallelize", config, model=model, mesh=mesh, optimizer=optimizer
        )
        wrapped, bound = _checked_result(result, config, optimizer)
    kept = set(wrapped.parameters())
    for name, parameter in before.items():
        if parameter not in kept:
            guards.remember_replaced(parameter, name)
    parallelized.remember(model, wrapped, config, mesh)
    if bound is not None:
        _ready_optimizers.add(bound)
    return wrapped, bound


def maybe_shard_optimizer(
    model_part: nn.Module,
    optimizer: Optimizer,
    distributed_config: DistributedConfig | None,
    *,
    allow: bool = True,
) -> Optimizer:
    """Shard an optimizer where the strategy needs it, and return the one to step.

    Returned unchanged, as the same object: with no config, under a strategy whose optimizers
    need no sharding, with one rank, and where ``parallelize`` already made it ready.

    Args:
        model_part: What ``parallelize`` returned.
        optimizer: An optimizer built on its parameters.
        distributed_config: The config that it was parallelized with, or None.
        allow: False for an optimizer whose update must not be sharded; it is then refused.

    Raises:
        OptimizerNotShardableError: The optimizer must not be sharded, by ``allow`` or because
            the strategy knows that its update needs whole matrices.
        OptimizerError: The optimizer holds parameters that ``parallelize`` replaced.
        StrategyNotFoundError: No installed strategy has that config.
    """
    if distributed_config is None:
        return optimizer
    registry = default_registry()
    shards = registry.implements("shard_optimizer", distributed_config)
    guards.refuse_replaced_parameters(optimizer)
    if not shards or world_size() == 1:
        return optimizer
    if not allow:
        info = registry.find(distributed_config.strategy)
        raise OptimizerNotShardableError(
            f"{type(optimizer).__name__} ({describe_owner(type(optimizer))}) was declared not "
            f"shardable (allow=False), but strategy {info.name!r} ({info.origin}) shards every "
            f"optimizer over its {world_size()} ranks; use an elementwise optimizer such as "
            "AdamW, or a strategy that does not shard optimizers"
        )
    if optimizer in _ready_optimizers:
        return optimizer
    with together("shard_optimizer", parallelized.members_of(model_part)), one_timeout():
        sharded = registry.dispatch(
            "shard_optimizer", distributed_config, model=model_part, optimizer=optimizer
        )
        if not isinstance(sharded, Optimizer):
            raise _wrong_result(distributed_config, "shard_optimizer", "an optimizer", sharded)
    _ready_optimizers.add(sharded)
    return sharded


@frozen(eq=False)
class RebuildSnapshot:
    """What ``pre_rebuild`` remembers for ``post_rebuild``; nothing else reads it."""

    config: DistributedConfig
    parts: Sequence[nn.Module]
    of_strategy: Sequence[object]
    versions: Sequence[guards.Versions]

    @property
    def members(self) -> tuple[int, ...]:
        """The ranks that hold any of the parts."""
        return tuple(
            sorted({rank for part in self.parts for rank in parallelized.members_of(part)})
        )

    def check(self) -> None:
        """Raise if a parameter was changed on some ranks only."""
        for part, versions in zip(self.parts, self.versions, strict=True):
            guards.agree_on_changes(versions, part, parallelized.members_of(part))

    def restore(self) -> None:
        """Let the strategy take over what the parts hold now."""
        with one_timeout():
            for part, own in zip(self.parts, self.of_strategy, strict=True):
                default_registry().dispatch("post_rebuild", self.config, model=part, snapshot=own)


@contextmanager
def rebuild(
    model: nn.Module | Sequence[nn.Module], config: DistributedConfig | None
) -> Iterator[None]:
    """Keep the strategy right while the body replaces Parameters: reload, cast, re-tie.

    Wrap it around anything that touches the parameters after ``parallelize``, on every rank.
    Afterwards the model has the values that the body left in it. Also when the body raises the
    strategy is restored, and the body's error goes on.

    Args:
        model: What ``parallelize`` returned, or several such parts.
        config: The config that they were parallelized with; None does nothing.

    Raises:
        RebuildError: What the body did cannot be made right under the strategy, or it changed a
            parameter on some ranks only.
        PeerFailedError: Another rank failed inside.
    """
    with _restoring(pre_rebuild(model, config)):
        yield


def pre_rebuild(
    model: nn.Module | Sequence[nn.Module], config: DistributedConfig | None
) -> RebuildSnapshot | None:
    """Do what ``rebuild`` does before its body, for code that has no body to wrap.

    Whatever happens afterwards, call ``post_rebuild`` with the result, on every rank.
    """
    registry = default_registry()
    if config is None or not registry.implements("post_rebuild", config):
        return None
    parts = [model] if isinstance(model, nn.Module) else list(model)
    members = sorted({rank for part in parts for rank in parallelized.members_of(part)})
    with together("pre_rebuild", members), one_timeout():
        own = [registry.dispatch("pre_rebuild", config, model=part) for part in parts]
    return RebuildSnapshot(config, parts, own, [guards.versions_of(part) for part in parts])


def post_rebuild(snapshot: RebuildSnapshot | None) -> None:
    """Do what ``rebuild`` does after its body; it raises the same errors."""
    with _restoring(snapshot):
        pass


@contextmanager
def _restoring(snapshot: RebuildSnapshot | None) -> Iterator[None]:
    if snapshot is None:
        yield
        return
    with together("rebuild", snapshot.members):
        try:
            yield
            snapshot.check()
        except BaseException as error:
            try:
                snapshot.restore()
            except Exception as second:
                error.add_note(f"restoring the model failed as well: {second}")
            raise
        snapshot.restore()


def accumulate(
    model: nn.Module, config: DistributedConfig | None, *, last: bool
) -> AbstractContextManager[None]:
    """Return a context for the forward and backward of one of several microbatches.

    The gradients of all microbatches up to the last add up to those of one big batch, provided
    that each loss is divided by their number.

    Args:
        model: What ``parallelize`` returned.
        config: The config that it was parallelized with; None is plain PyTorch.
        last: Whether the optimizer steps after this microbatch.
    """
    if config is None:
        return nullcontext()
    return _accumulating(default_registry().dispatch("accumulate", config, model=model, last=last))


@contextmanager
def _accumulating(context: AbstractContextManager[None]) -> Iterator[None]:
    """Enter the strategy's context; a first forward may make process groups."""
    with one_timeout(), context:
        yield


def clip_grad_norm(
    model: nn.Module,
    config: DistributedConfig | None,
    max_norm: float,
    norm_type: float = 2.0,
) -> float:
    """Clip the gradients by their global norm, in place, and return the norm before clipping.

    Call it on every rank between the last backward and the step.

    Args:
        model: What ``parallelize`` returned.
        config: The config that it was parallelized with; None is plain PyTorch.
        max_norm: The norm that the gradients have at most afterwards; ``inf`` only measures.
        norm_type: The p of the p-norm, more than 0; may be ``inf``.

    Returns:
        The norm that one process with the whole batch would have found.
    """
    for name, value in (("max_norm", max_norm), ("norm_type", norm_type)):
        if math.isnan(value) or value < 0 or (name == "norm_type" and value == 0):
            raise ValueError(f"clip_grad_norm: expected {name} > 0, found {describe_value(value)}")
    if config is None:
        from polyshard import defaults

        return defaults.clip_grad_norm(model, float(max_norm), float(norm_type))
    with one_timeout():
        return float(
            default_registry().dispatch(
                "clip_grad_norm",
                config,
                model=model,
                max_norm=float(max_norm),
                norm_type=float(norm_type),
            )
        )


def full_state_dict(model: nn.Module, config: DistributedConfig | None) -> dict[str, Tensor]:
    """Gather the whole model on every rank: unsharded CPU copies under the user's own names.

    Call it on every rank.

    Args:
        model: What ``parallelize`` returned.
        config: The config that it was parallelized with; None is plain PyTorch.
    """
    state: dict[str, Tensor] = _ask("full_state_dict", model, config)
    return state


def parameter_bytes(model: nn.Module, config: DistributedConfig | None) -> int:
    """Return the bytes that this rank holds for the parameters between two steps."""
    return int(_ask("parameter_bytes", model, config))


def _ask(hook: str, model: nn.Module, config: DistributedConfig | None) -> Any:
    if config is None:
        from polyshard import defaults

        return getattr(defaults, hook)(model)
    with one_timeout():
        return default_registry().dispatch(hook, config, model=model)


def _refuse_parallelized(model: nn.Module) -> None:
    known = parallelized.find(model)
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
