"""What scripts do to the parameters of a model that is parallelized already.

``RebuildConformance`` has a test for each of the ``CHANGES``, which all act on the model "mixed".
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from attrs import frozen
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from polyshard.conformance.models import TinyModel
from polyshard.parameters.dtensors import local_of
from polyshard.parameters.names import canonical_parameter_name

__all__ = ["CHANGES", "Change", "Values"]

Values = Mapping[str, Tensor]
Apply = Callable[[TinyModel, Values], None]


@frozen
class Change:
    """Something that a script does to the parameters of a model after it was parallelized.

    Attributes:
        summary: What it does, for a table.
        apply: Does it to the user's module, on every rank; the values are full tensors under the
            user's names.
        expected: Does in place to a plain model what should come of it; None for what a strategy
            must refuse.
    """

    summary: str
    apply: Apply
    expected: Apply | None


# What a script does


def _nothing(module: TinyModel, values: Values) -> None:
    pass


def _replace(module: TinyModel, values: Values) -> None:
    _replace_all(module, lambda name, _: values[canonical_parameter_name(name)].clone())


def _replace_over_storage(module: TinyModel, values: Values) -> None:
    _replace_all(module, lambda _, old: old.detach())


def _replace_all(module: TinyModel, value: Callable[[str, nn.Parameter], Tensor]) -> None:
    """Put new Parameters in the places of all, one for those that are tied."""
    new: dict[nn.Parameter, nn.Parameter] = {}
    for name, old in list(module.named_parameters(remove_duplicate=False)):
        if old not in new:
            new[old] = nn.Parameter(value(name, old), requires_grad=old.requires_grad)
        _put(module, name, new[old])


def _replace_one(module: TinyModel, values: Values) -> None:
    module.blocks[1].up.weight = nn.Parameter(values["blocks.1.up.weight"].clone())  # type: ignore[union-attr]


def _replace_one_over_storage(module: TinyModel, values: Values) -> None:
    module.blocks[1].up.weight = nn.Parameter(module.blocks[1].up.weight.detach())  # type: ignore[union-attr,operator]


def _exchange(module: TinyModel, values: Values) -> None:
    """Exchange the storages of two Parameters."""
    one, other = (module.blocks[i].get_parameter("up.weight") for i in (1, 2))
    _put(module, "blocks.1.up.weight", nn.Parameter(other.detach(), one.requires_grad))
    _put(module, "blocks.2.up.weight", nn.Parameter(one.detach(), other.requires_grad))


def _load(module: TinyModel, values: Values) -> None:
    module.load_state_dict(values)


def _load_by_assignment(module: TinyModel, values: Values) -> None:
    module.load_state_dict(values, assign=True)


def _load_some(module: TinyModel, values: Values) -> None:
    module.load_state_dict(_some(values), strict=False)


def _load_some_by_assignment(module: TinyModel, values: Values) -> None:
    module.load_state_dict(_some(values), strict=False, assign=True)


def _load_halves(module: TinyModel, values: Values) -> None:
    module.load_state_dict(_halves(module))


def _load_halves_by_assignment(module: TinyModel, values: Values) -> None:
    module.load_state_dict(_halves(module), assign=True)


def _halves(module: TinyModel) -> dict[str, Tensor]:
    """Return the module's own state dict, in whatever layout, with halved values."""
    return {name: value.clone().mul_(0.5) for name, value in module.state_dict().items()}


def _load_on_rank_0_alone(module: TinyModel, values: Values) -> None:
    """Load on rank 0 and expect that it reaches the others by itself."""
    if _rank() == 0:
        module.load_state_dict(values)


def _load_from_rank_0(module: TinyModel, values: Values) -> None:
    """Load values that rank 0 alone has and sends to all."""
    sent = [dict(values) if _rank() == 0 else {}]
    if dist.is_initialized():
        dist.broadcast_object_list(sent, src=0)
    module.load_state_dict(sent[0])


def _set(module: TinyModel, values: Values) -> None:
    _set_with(module, dict(values), StateDictOptions(full_state_dict=True))


def _set_from_rank_0(module: TinyModel, values: Values) -> None:
    # It broadcasts, which a process without a group cannot.
    several = dist.is_initialized()
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=several)
    _set_with(module, dict(values) if _rank() == 0 else {}, options)


def _set_with(module: TinyModel, values: dict[str, Any], options: StateDictOptions) -> None:
    set_model_state_dict(module, values, options=options)


def _load_checkpoint(module: TinyModel, values: Values) -> None:
    """Load a checkpoint into the tensors of the module's state dict, and that into the module."""
    module.load_state_dict(_state_from_checkpoint(module, values))


def _load_checkpoint_in_place(module: TinyModel, values: Values) -> None:
    """Load it into these tensors alone, which are those that the module computes with."""
    _state_from_checkpoint(module, values)


def _state_from_checkpoint(module: TinyModel, values: Values) -> dict[str, Any]:
    """Return the module's state dict, loaded from what one process has saved.

    Each rank has a copy of the checkpoint to itself.
    """
    state = module.state_dict()
    with tempfile.TemporaryDirectory() as folder:
        save(dict(values), checkpoint_id=folder, no_dist=True)
        load(state, checkpoint_id=folder, no_dist=True)
    return state


def _cast_there_and_back(module: TinyModel, values: Values) -> None:
    module.double().float()


def _cast_down(module: TinyModel, values: Values) -> None:
    module.to(torch.bfloat16)


def _move(module: TinyModel, values: Values) -> None:
    module.to(next(module.parameters()).device)


def _empty_and_load(module: TinyModel, values: Values) -> None:
    module.to_empty(device=next(module.parameters()).device)
    module.load_state_dict(values)


def _halve_shards(module: TinyModel, values: Values) -> None:
    with torch.no_grad():
        for tensor in (*module.parameters(), *module.buffers()):
            local = local_of(tensor)
            local.copy_(local * 0.5)


def _retie(module: TinyModel, values: Values) -> None:
    shared = nn.Parameter(values["head.weight"].clone())
    module.embedding.weight = shared
    module.head.weight = shared


def _tie_as_transformers_does(module: TinyModel, values: Values) -> None:
    """Replace one end and tie the other to it."""
    module.embedding.weight = nn.Parameter(values["head.weight"].clone())
    module.head.weight = module.embedding.weight


def _untie(module: TinyModel, values: Values) -> None:
    module.head.weight = nn.Parameter(values["head.weight"].clone())


def _tie(module: TinyModel, values: Values) -> None:
    module.blocks[0].up.weight = module.blocks[1].up.weight  # type: ignore[union-attr]


class _Adapted(nn.Module):
    """A frozen layer and a trained product of two thin ones."""

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        self.layer = layer.requires_grad_(False)
        self.thin = nn.Linear(layer.in_features, 2, bias=False)
        self.wide = nn.Linear(2, layer.out_features, bias=False)

    def forward(self, hidden: Tensor) -> Tensor:
        output: Tensor = self.layer(hidden) + self.wide(self.thin(hidden))
        return output


def _adapt(module: TinyModel, values: Values) -> None:
    block: Any = module.blocks[1]
    block.up = _Adapted(block.up)


def _replace_layer(module: TinyModel, values: Values) -> None:
    block: Any = module.blocks[1]
    block.up = nn.Linear(block.up.in_features, block.up.out_features)


def _add(module: TinyModel, values: Values) -> None:
    module.head.bias = nn.Parameter(torch.zeros(module.head.out_features))


def _remove(module: TinyModel, values: Values) -> None:
    module.blocks[1].up.bias = None  # type: ignore[union-attr]


def _resize(module: TinyModel, values: Values) -> None:
    """Do as a tokenizer with more tokens asks for."""
    shared = nn.Parameter(torch.cat([values["head.weight"]] * 2))
    module.embedding.weight = module.head.weight = shared


def _freeze(module: TinyModel, values: Values) -> None:
    module.blocks[1].requires_grad_(False)


def _replace_by_frozen(module: TinyModel, values: Values) -> None:
    value = values["blocks.1.up.weight"].clone()
    module.blocks[1].up.weight = nn.Parameter(value, requires_grad=False)  # type: ignore[union-attr]


def _empty(module: TinyModel, values: Values) -> None:
    module.blocks[1].up.bias = nn.Parameter(torch.empty(64, device="meta"))  # type: ignore[union-attr]


# What should come of it in a plain model


def _set_all(module: TinyModel, values: Values) -> None:
    with torch.no_grad():
        for name, value in values.items():
            module.state_dict(keep_vars=True)[name].copy_(value)


def _set_parameters(module: TinyModel, values: Values) -> None:
    names = dict(module.named_parameters(remove_duplicate=False))
    _set_all(module, {name: values[name] for name in names})


def _set_one(module: TinyModel, values: Values) -> None:
    _set_all(module, {"blocks.1.up.weight": values["blocks.1.up.weight"]})


def _exchange_values(module: TinyModel, values: Values) -> None:
    one, other = (module.blocks[i].get_parameter("up.weight").detach() for i in (1, 2))
    _set_all(module, {"blocks.1.up.weight": other, "blocks.2.up.weight": one.clone()})


def _set_frozen(module: TinyModel, values: Values) -> None:
    _set_one(module, values)
    module.get_parameter("blocks.1.up.weight").requires_grad_(False)


def _set_some(module: TinyModel, values: Values) -> None:
    _set_all(module, _some(values))


def _set_tied(module: TinyModel, values: Values) -> None:
    _set_all(module, {"head.weight": values["head.weight"]})


def _halve(module: TinyModel, values: Values) -> None:
    with torch.no_grad():
        for tensor in (*module.parameters(), *module.buffers()):
            tensor.mul_(0.5)


def _round(module: TinyModel, values: Values) -> None:
    with torch.no_grad():
        for tensor in (*module.parameters(), *module.buffers()):
            tensor.copy_(tensor.bfloat16())


def _some(values: Values) -> dict[str, Tensor]:
    return {name: value for name, value in values.items() if name.startswith("blocks.1.")}


def _put(module: nn.Module, name: str, parameter: nn.Parameter) -> None:
    owner, _, leaf = name.rpartition(".")
    setattr(module.get_submodule(owner), leaf, parameter)


def _rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


#: The changes by the name under which ``RebuildConformance`` asks for them.
CHANGES: Mapping[str, Change] = {
    "nothing": Change("nothing", _nothing, _nothing),
    "new": Change("new Parameters on new storage", _replace, _set_parameters),
    "new over storage": Change(
        "new Parameters over the old storage", _replace_over_storage, _nothing
    ),
    "one new": Change("one new Parameter on new storage", _replace_one, _set_one),
    "one new over storage": Change(
        "one new Parameter over the old storage", _replace_one_over_storage, _nothing
    ),
    "exchange": Change(
        "two new Parameters over each other's old storage", _exchange, _exchange_values
    ),
    "load": Change("`load_state_dict` of full tensors", _load, _set_all),
    "load assign": Change(
        "`load_state_dict(assign=True)` of full tensors", _load_by_assignment, _set_all
    ),
    "load some": Change("`load_state_dict(strict=False)` of one block", _load_some, _set_some),
    "load some assign": Change(
        "`load_state_dict(strict=False, assign=True)` of one block",
        _load_some_by_assignment,
        _set_some,
    ),
    "load own": Change(
        "`load_state_dict` of the model's own state dict, changed", _load_halves, _halve
    ),
    "load own assign": Change(
        "`load_state_dict(assign=True)` of the model's own state dict, changed",
        _load_halves_by_assignment,
        _halve,
    ),
    "load on rank 0": Change("`load_state_dict` on rank 0 alone", _load_on_rank_0_alone, _set_all),
    "load from rank 0": Change(
        "`load_state_dict` of full tensors that rank 0 had and sent to all",
        _load_from_rank_0,
        _set_all,
    ),
    "set": Change("torch's `set_model_state_dict` of full tensors", _set, _set_all),
    "set from rank 0": Change(
        "torch's `set_model_state_dict` with `broadcast_from_rank0`", _set_from_rank_0, _set_all
    ),
    "load checkpoint": Change(
        "`dcp.load` into the state dict, and `load_state_dict` of that", _load_checkpoint, _set_all
    ),
    "load checkpoint in place": Change(
        "`dcp.load` into the state dict alone", _load_checkpoint_in_place, _set_all
    ),
    "cast back": Change("`model.double().float()`", _cast_there_and_back, _nothing),
    "cast": Change("`model.to(torch.bfloat16)`, which rounds the values", _cast_down, _round),
    "move": Change("`model.to(device)`", _move, _nothing),
    "empty and load": Change("`model.to_empty(device)` and a load", _empty_and_load, _set_all),
    "in place": Change("copies into the local shards", _halve_shards, _halve),
    "retie": Change("both ends of a tie replaced by one new Parameter", _retie, _set_tied),
    "retie to one end": Change(
        "one end of a tie replaced and the other tied to it", _tie_as_transformers_does, _set_tied
    ),
    "untie": Change("one end of a tie replaced by another value", _untie, None),
    "tie": Change("two Parameters tied that were not", _tie, None),
    "adapter": Change("a layer put inside of an adapter", _adapt, None),
    "new layer": Change("a layer replaced", _replace_layer, None),
    "add": Change("a Parameter added", _add, None),
    "remove": Change("a Parameter removed", _remove, None),
    "resize": Change("a Parameter of another shape", _resize, None),
    "freeze": Change("`requires_grad_(False)`", _freeze, _freeze),
    "frozen new": Change("a new Parameter that is not trained", _replace_by_frozen, _set_frozen),
    "empty": Change("a new Parameter without a value", _empty, None),
}
