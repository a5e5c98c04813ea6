"""The hooks of Polyshard: what a strategy implements and an observer may wrap.

A strategy implements some of these as functions (or methods) marked with
``polyshard.hookimpl``. Exactly one strategy answers each call, the one that the config names;
observers wrap the call whatever the strategy.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import pluggy

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from contextlib import AbstractContextManager

    from torch import Tensor, nn
    from torch.distributed.device_mesh import DeviceMesh
    from torch.optim import Optimizer

    from polyshard.config.base import DistributedConfig

PROJECT_NAME: Final = "polyshard"


#: Raised by one whenever a hook or a hook argument is added. Neither is ever removed, so a
#: plugin written for a version works with every later one.
API_VERSION: Final = 1


hookspec = pluggy.HookspecMarker(PROJECT_NAME)


hookimpl = pluggy.HookimplMarker(PROJECT_NAME)


@hookspec(firstresult=True)
def parallelize(
    config: DistributedConfig,
    model: nn.Module,
    mesh: DeviceMesh | None,
    optimizer: Optimizer | None,
) -> tuple[nn.Module, Optimizer | None]:
    """Distribute the model over the ranks, and the optimizer with it if there is one.

    Called once per model part, on every rank; the strategy that ``config`` names answers alone.
    ``mesh`` is None only in a process without a process group. The optimizer that is returned
    holds the parameters of the model that is returned, in the groups that the user made, and is
    ready to step: ``shard_optimizer`` is not called for it.
    """


@hookspec(firstresult=True)
def add_methods(
    config: DistributedConfig, model: nn.Module, module: nn.Module, names: Sequence[str]
) -> None:
    """Make methods of the user's module work on the model that ``parallelize`` returned.

    Called once, on every rank, after ``parallelize`` and as a part of the same step, where there
    are ``names``; the strategy that ``config`` names answers alone. ``module`` is what was given
    to ``parallelize`` and has each of them. All ranks call such a method together; its body must
    need no other rank, for each may run it differently, or raise. With gradients the backward that
    follows is that of a forward. Without an implementation the methods are left as they are, and
    refused if ``model`` is a wrapper around ``module``.
    """


@hookspec(firstresult=True)
def shard_optimizer(config: DistributedConfig, model: nn.Module, optimizer: Optimizer) -> Optimizer:
    """Shard an optimizer that was built on the parallelized model, and return the one to step.

    Called once per optimizer, after ``parallelize``, with more than one rank only; the strategy
    that ``config`` names answers alone. A strategy whose optimizers need no sharding leaves it
    out. It takes no step: weights, step count and groups stay as they were.
    """


@hookspec(firstresult=True)
def pre_rebuild(config: DistributedConfig, model: nn.Module) -> object:
    """Remember what the strategy keeps on the Parameter objects, and return it.

    Called before anything that replaces Parameter objects; the strategy that ``config`` names
    answers alone and the result goes to ``post_rebuild`` unseen.
    """


@hookspec(firstresult=True)
def post_rebuild(config: DistributedConfig, model: nn.Module, snapshot: object) -> None:
    """Bring the model back under the strategy, with the values that the rebuild left in it.

    Called after the rebuild, also when it raised; the strategy that ``config`` names answers
    alone, with what its ``pre_rebuild`` returned.
    """


@hookspec(firstresult=True)
def accumulate(
    config: DistributedConfig, model: nn.Module, last: bool
) -> AbstractContextManager[None]:
    """Return a context in which one microbatch's gradients are added to those before it.

    Called around the forward and backward of each microbatch; the strategy that ``config``
    names answers alone, and without an implementation gradients add up as in plain PyTorch.
    ``last`` is true for the microbatch after which the optimizer steps.
    """


@hookspec(firstresult=True)
def clip_grad_norm(
    config: DistributedConfig, model: nn.Module, max_norm: float, norm_type: float
) -> Tensor:
    """Scale the gradients so that their global norm is at most ``max_norm``; return the norm.

    The norm is a tensor of shape ``()`` on the device of the gradients, the same on every rank.

    Called between backward and step, on every rank; the strategy that ``config`` names answers
    alone, and without an implementation plain tensors and DTensors are handled by the core.
    """


@hookspec(firstresult=True)
def full_tensors(config: DistributedConfig, model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield every parameter and persistent buffer, whole, under the user's own name.

    Called on every rank, all of which run through it; the strategy that ``config`` names answers
    alone, and without an implementation plain tensors and DTensors are handled by the core. A
    tensor is gathered when its turn comes, and is let go of before the next: the caller copies
    what it keeps. It may be on any device.
    """


@hookspec(firstresult=True)
def parameter_bytes(config: DistributedConfig, model: nn.Module) -> int:
    """Count the bytes that this rank holds for the parameters between two steps.

    Called for reports; the strategy that ``config`` names answers alone, and without an
    implementation the local tensors of ``model.parameters()`` are counted. Compute copies and
    main copies both count, gradients do not.
    """
