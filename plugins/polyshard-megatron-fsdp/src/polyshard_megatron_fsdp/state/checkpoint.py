"""What ``torch.distributed.checkpoint`` must know: where parts lie, and state to load into."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from polyshard_megatron_fsdp.megatron_fsdp.private_names import describe_for_checkpoints, local_of
from polyshard_megatron_fsdp.model.layout import is_laid_out_like, offsets_of

__all__ = ["describe_parts", "describe_state", "offer_state_to_load_into"]


def describe_parts(module: nn.Module) -> None:
    """Let parameters, and the state dict of each module in a model, say where their parts lie.

    megatron-fsdp does so for the parameters, and for the state dict of the model around them alone.
    Of other DTensors torch assumes even parts, and would save and load these in the wrong place.
    """
    for parameter in module.parameters():
        if isinstance(parameter, DTensor):
            _describe(local_of(parameter), parameter)
    for inner in module.modules():
        inner.register_state_dict_post_hook(_describe_own)  # type: ignore[no-untyped-call]


def _describe_own(module: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
    for name, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
        value = state.get(prefix + name)
        if isinstance(value, DTensor) and isinstance(parameter, DTensor):
            _describe(local_of(value), parameter)


def _describe(local: Any, parameter: DTensor) -> None:
    """Set on a part what the planners of ``torch.distributed.checkpoint`` ask it for."""
    chunk = ChunkStorageMetadata(torch.Size(offsets_of(parameter)), local.shape)

    def write_items(name: str, tensor: Tensor) -> list[WriteItem]:
        properties = TensorProperties.create_from_tensor(local)
        data = TensorWriteData(chunk, properties, tensor.size())
        index = MetadataIndex(name, chunk.offsets)
        return [WriteItem(index, WriteItemType.SHARD, tensor_data=data)] if local.numel() else []

    describe_for_checkpoints(local, lambda: [chunk], write_items)


def describe_state(optimizer: Optimizer) -> None:
    """Let the state dict of an optimizer say where the parts of its state lie.

    A rank has no state for a parameter of which it has no part, which torch takes for a state that
    is lost: the state dict has empty parts there, which are left out again when it is loaded.
    megatron-fsdp would describe state by talking to the other ranks, and fails where it makes up an
    empty part of a weight that tensor parallelism split by columns.
    """
    optimizer.register_state_dict_post_hook(_describe_state)
    optimizer.register_load_state_dict_pre_hook(_without_empty_parts)


def _describe_state(optimizer: Optimizer, state_dict: dict[str, Any]) -> None:
    packed = state_dict["state"]
    entries = [entry for state in packed.values() for entry in state.items()]
    dtypes = {key: value.dtype for key, value in entries if isinstance(value, DTensor)}
    for index, parameter in _indexed(optimizer, state_dict):
        if not isinstance(parameter, DTensor):
            continue
        if index not in packed and not local_of(parameter).numel():
            packed[index] = {k: torch.zeros_like(parameter, dtype=d) for k, d in dtypes.items()}
        for value in packed.get(index, {}).values():
            if isinstance(value, DTensor) and is_laid_out_like(value, parameter):
                _describe(local_of(value), parameter)


def _without_empty_parts(optimizer: Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
    empty = {
        i for i, parameter in _indexed(optimizer, state_dict) if not local_of(parameter).numel()
    }
    kept = {key: value for key, value in state_dict["state"].items() if key not in empty}
    return {**state_dict, "state": kept}


def _indexed(optimizer: Optimizer, state_dict: dict[str, Any]) -> Iterator[tuple[int, Tensor]]:
    """Return each parameter with the number that stands for it in a state dict.

    Groups that do not fit those of the state dict are refused by torch after the hooks.
    """
    for packed, group in zip(state_dict["param_groups"], optimizer.param_groups, strict=False):
        yield from zip(packed["params"], group["params"], strict=False)


def offer_state_to_load_into(optimizer: Optimizer) -> None:
    """Let the state dict of an optimizer that has taken no step hold the tensors to come.

    A checkpoint is loaded into the tensors of a state dict, and restores nothing where there are
    none. What is made for that goes away again with the next step if nothing was loaded.
    """
    pending = False

    def before_state_dict(_: Optimizer) -> None:
        nonlocal pending
        if not any(optimizer.state.values()):
            _make_state(optimizer)
            pending = True

    def after_load(_: Optimizer) -> None:
        nonlocal pending
        pending = False

    def before_step(*_: Any) -> None:
        nonlocal pending
        if pending:
            pending = False
            optimizer.state.clear()

    optimizer.register_state_dict_pre_hook(before_state_dict)
    optimizer.register_load_state_dict_post_hook(after_load)
    optimizer.register_step_pre_hook(before_step)


@torch.no_grad()
def _make_state(optimizer: Optimizer) -> None:
    """Let the optimizer make its state, by a step whose effect is undone."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    gradients = [p.grad for p in parameters]
    values = [local_of(p.detach()).clone() for p in parameters]
    for parameter in parameters:
        # Ranks without a part of a parameter have no state for it.
        parameter.grad = torch.zeros_like(parameter) if local_of(parameter).numel() else None
    type(optimizer).step(optimizer)
    for parameter, gradient, value in zip(parameters, gradients, values, strict=True):
        parameter.grad = gradient
        local_of(parameter.detach()).copy_(value)
    for state in optimizer.state.values():
        for entry in state.values():
            if isinstance(entry, Tensor):
                local_of(entry).zero_()
