"""The wrapped model: megatron-fsdp's, with what a training script may rely on added."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any
from weakref import WeakSet

import torch
import torch.distributed as dist
from attrs import Factory, define
from torch import Tensor, nn
from torch.optim import Optimizer

from polyshard.exceptions import PolyshardError, RebuildError, UnsupportedError
from polyshard.parameters.guard import ParameterGuard
from polyshard.parameters.slots import ParameterSlot
from polyshard.parameters.snapshot import ParameterSnapshot
from polyshard.transforms.methods import (
    attribute_behind,
    has_gradients,
    refuse_shadowed,
    tensors_in,
)
from polyshard_megatron_fsdp.config import MegatronFSDPConfig
from polyshard_megatron_fsdp.megatron_fsdp.patches.patched_model import PatchedModel
from polyshard_megatron_fsdp.megatron_fsdp.private_names import (
    begin_backward,
    distributed_parameters,
    gathered_whole,
    has_original,
    local_of,
    original_of,
    restore_ties,
    show_distributed,
    show_raw,
    times_written,
)
from polyshard_megatron_fsdp.megatron_fsdp.version import WHO
from polyshard_megatron_fsdp.model.topology import Topology

__all__ = [
    "NotFiniteError",
    "Record",
    "ShardedModel",
    "adopt",
    "lost_layout",
    "unwrapped",
    "wrapped",
]

#: Models that were parallelized and have nothing for megatron-fsdp to do.
unwrapped: WeakSet[nn.Module] = WeakSet()


class NotFiniteError(PolyshardError, ValueError):
    """A gradient has a NaN or an infinity in it."""


@define(eq=False)
class Record:
    """What is known of one wrapped model.

    Attributes:
        config: The config that it was wrapped with.
        topology: The dimensions of its mesh.
        by_hand: Whether the script may step an optimizer that was not sharded, and call
            megatron-fsdp's own methods around it.
        optimizers: The optimizers that were sharded for it.
        unreduced: Microbatches whose gradients are not reduced yet.
        reduced: Whether the gradients that are there are reduced.
        with_gradient: Positions of the parameters that got a gradient since they were zeroed.
        not_finite: Positions of the parameters whose gradient was not finite.
        snapshot: The distributed parameters, while a script replaces them inside ``rebuild``.
        exposed: Whether a state dict with the distributed parameters has been handed out, which
            ``torch.distributed.checkpoint`` loads into in slot.
        copied: The parameters whose values the model computes with copies of, in another dtype.
        version: How often these had been written to when they were copied last.
    """

    config: MegatronFSDPConfig
    topology: Topology
    by_hand: bool = False
    optimizers: WeakSet[Optimizer] = Factory(WeakSet)
    unreduced: int = 0
    reduced: bool = False
    with_gradient: set[int] = Factory(set)
    not_finite: set[int] = Factory(set)
    snapshot: ParameterSnapshot | None = None
    exposed: bool = False
    copied: list[nn.Parameter] = Factory(list)
    version: int = 0

    @property
    def present_version(self) -> int:
        """How often the parameters that are copied have been written to."""
        return sum(times_written(local_of(parameter)) for parameter in self.copied)

    @property
    def reduces_in_place(self) -> bool:
        """Whether a second reduction would count the gradients of the first again."""
        return self.config.zero_dp_strategy < 2 or self.topology.outer is not None


class ShardedModel(PatchedModel):
    """A ``MegatronFSDP`` whose parameters are the distributed ones whenever a script looks.

    It is never built: ``adopt`` makes one of the model that megatron-fsdp built.
    """

    record: Record

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module with the values that the distributed parameters have now."""
        self._take_new_values()
        return super().forward(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        """Return what the user's module has where the wrapper has nothing of that name."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name in self.__dict__.get("prepared_methods", ()):
                return self._prepared(getattr(self.module, name))
            return attribute_behind(self, name)

    def add_methods(self, names: Sequence[str]) -> None:
        """Let these methods of the user's module gather all of it before they begin.

        Raises:
            UnsupportedError: The wrapper has another attribute of that name.
        """
        refuse_shadowed(self, names)
        self.prepared_methods = frozenset(names)

    def _prepared(self, method: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(method)
        def call(*args: Any, **kwargs: Any) -> Any:
            return self._call_gathered(method, args, kwargs)

        return call

    def _call_gathered(
        self, method: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Run a method whose body needs no other rank, with the whole model gathered."""
        if self.ddp_config.fsdp_double_buffer:
            raise UnsupportedError(
                f"{WHO}: expected fsdp_double_buffer=False for {method.__name__}, which computes "
                "with the whole model, found two buffers for two of its units; turn it off"
            )
        guard = ParameterGuard.of(self)
        if guard is not None:
            guard.before_forward()
        self._take_new_values()
        show_raw(self)
        trains = False
        try:
            with gathered_whole(self):
                output = method(*args, **kwargs)
            trains = has_gradients(output)
        finally:
            if not trains:
                show_distributed(self)  # as after a forward without gradients
        found: list[Any] = [tensor for tensor in tensors_in(output) if tensor.grad_fn is not None]
        for tensor in found:
            tensor.register_hook(lambda _: begin_backward(self))
        return output

    def show_distributed(self) -> None:
        """Let the module hold the parameters that optimizers step."""
        show_distributed(self)

    def install_optimized_model_weights(self) -> None:
        """Compute with the values that the distributed parameters have now."""
        super().install_optimized_model_weights()
        self.record.version = self.record.present_version

    def finish_grad_sync(self, force_all_reduce: bool | None = False) -> None:
        """Wait for the reduction; parameters without a gradient on every rank have none after."""
        super().finish_grad_sync(force_all_reduce)
        self.record.reduced = True
        self.record.unreduced = 0
        self._settle_gradients()

    def zero_grad_buffer(self) -> None:
        """Forget all gradients."""
        super().zero_grad_buffer()
        self.record.reduced = False
        self.record.unreduced = 0
        self.record.with_gradient.clear()
        self.record.not_finite.clear()

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Return the distributed parameters; what is loaded into them counts at once."""
        self.record.exposed = True
        state: dict[str, Any] = super().state_dict(*args, **kwargs)
        return state

    def distributed_parameters(self) -> list[tuple[str, nn.Parameter]]:
        """Return the parameters that optimizers step, tied ones once, in an order all ranks share.

        Names are those in the wrapped module.
        """
        return distributed_parameters(self)

    def _take_new_values(self) -> None:
        """Compute with the values that the distributed parameters have now."""
        if not self.record.exposed and self.record.version == self.record.present_version:
            return
        self.record.exposed = False
        self.install_optimized_model_weights()
        self.synchronize_param_gather()

    def _settle_gradients(self) -> None:
        """Tell all ranks which parameters got a gradient, and which of these is not finite.

        megatron-fsdp gives zeros to a parameter that no rank used, and an optimizer with momentum
        or weight decay would move it; plain PyTorch leaves its gradient None.
        """
        parameters = self.distributed_parameters()
        flags = torch.zeros(2, len(parameters), dtype=torch.uint8)
        flags[0, list(self.record.with_gradient)] = 1
        flags[1, list(self.record.not_finite)] = 1
        flags = flags.to(self.device)
        for group in self._groups():
            dist.all_reduce(flags, op=dist.ReduceOp.MAX, group=group)
        used, not_finite = flags.tolist()
        if any(not_finite):
            names = [name for (name, _), bad in zip(parameters, not_finite, strict=True) if bad]
            raise NotFiniteError(
                "report_nan_in_param_grad: expected finite gradients, found NaN or infinity in "
                f"{', '.join(names)}"
            )
        for (_, parameter), has_gradient in zip(parameters, used, strict=True):
            if not has_gradient:
                parameter.grad = None

    def _groups(self) -> list[dist.ProcessGroup]:
        groups = [self.dist_index.get_dp_group()]
        tensor = self.record.topology.tensor
        if tensor is not None:
            groups.append(self.record.topology.mesh[tensor].get_group())
        return groups


class ShardedGuard(ParameterGuard):
    """Refuses a forward that would discard what replaced a distributed parameter, or miss a cast.

    Args:
        model: The user's module, which holds the distributed parameters.
        called: The model around it.
    """

    settles_training = True

    def __init__(self, model: nn.Module, called: nn.Module) -> None:
        super().__init__(model, called, loads=False)
        # megatron-fsdp swaps these in for the forward and backward.
        self.originals = {
            (slot.module, slot.attribute): original_of(p) for slot, p, *_ in self.expected
        }

    def is_own(self, slot: ParameterSlot, parameter: nn.Parameter | None) -> bool:
        """Tell whether megatron-fsdp has put a parameter there to compute with."""
        return parameter is self.originals[slot.module, slot.attribute]

    def before_forward(self, *arguments: Any) -> None:
        """Raise if a distributed parameter was replaced, or cast or moved."""
        super().before_forward(*arguments)
        for slot, parameter, *_ in self.expected:
            # A cast exchanges what is inside of the object, and takes its attributes away.
            if not has_original(parameter):
                raise lost_layout(slot.name)


def lost_layout(name: str) -> RebuildError:
    """Return the error for a distributed parameter that has lost what megatron-fsdp set on it."""
    return RebuildError(
        f"{WHO}: expected the dtype and device that {name!r} had at parallelize, found that they "
        "were changed; do it inside `with polyshard.rebuild(model):`"
    )


def adopt(model: Any, record: Record) -> ShardedModel:
    """Make a ``ShardedModel`` of a model that megatron-fsdp built."""
    # megatron-fsdp builds its own class; as torch's fully_shard does, the class is exchanged.
    model.__class__ = ShardedModel
    sharded: ShardedModel = model
    sharded.record = record
    sharded.show_distributed()
    restore_ties(sharded)
    parameters = [parameter for _, parameter in sharded.distributed_parameters()]
    record.copied = [p for p in parameters if p.dtype != original_of(p).dtype]
    record.version = record.present_version
    ShardedGuard(sharded.module, sharded)
    for part in sharded.modules():
        part.__dict__["__deepcopy__"] = _refuse_copy
    for position, parameter in enumerate(parameters):
        _observe_gradients(original_of(parameter), position, record)
    return sharded


def _refuse_copy(_: object) -> None:
    """Stand between ``copy.deepcopy`` and parameters without storage, which end the process."""
    raise UnsupportedError(
        f"{WHO}: expected a wrapped model not to be copied; copy what "
        "polyshard.full_state_dict(model) returns, or load that into a plain model"
    )


def wrapped(model: nn.Module) -> ShardedModel:
    """Return a model that the strategy wrapped.

    Raises:
        UnsupportedError: The strategy did not wrap it.
    """
    if not isinstance(model, ShardedModel):
        raise UnsupportedError(
            f"{WHO}: expected the model that parallelize returned, found "
            f"{type(model).__name__}, which is not wrapped with Megatron-FSDP"
        )
    return model


def _observe_gradients(parameter: Any, position: int, record: Record) -> None:
    """Note which parameters get a gradient, before megatron-fsdp takes it away."""
    if not parameter.requires_grad:
        return

    def note(_: Tensor) -> None:
        if record.reduced and record.reduces_in_place:
            raise UnsupportedError(
                "expected the gradients to be zeroed before the next backward, found reduced ones, "
                f"which zero_dp_strategy={record.config.zero_dp_strategy} would reduce again; "
                "call optimizer.zero_grad() after each step, and put microbatches in "
                "polyshard.accumulate(model, last=...)"
            )
        record.with_gradient.add(position)

    def check(gradient: Tensor) -> None:
        if not torch.isfinite(local_of(gradient)).all():
            record.not_finite.add(position)

    parameter.register_post_accumulate_grad_hook(note)
    if record.config.report_nan_in_param_grad:
        parameter.register_hook(check)
