"""An optimizer built before the wrap follows its parameters by name, with groups and state."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from polyshard.conformance import RankPool
from polyshard.exceptions import OptimizerError
from polyshard.parameters.dtensors import shard_like
from polyshard.parameters.names import (
    canonical_parameter_name,
    canonical_parameters,
    strip_wrappers,
)
from polyshard.parameters.optimizer_binding import rebind, record_names, split_mixed_groups


@pytest.mark.parametrize(
    ("name", "canonical", "own"),
    [
        ("weight", "weight", "weight"),
        ("module.weight", "weight", "module.weight"),
        ("blocks.0._checkpoint_wrapped_module.up.bias", "blocks.0.up.bias", "blocks.0.up.bias"),
        ("module._orig_mod.module.weight", "module.weight", "module.module.weight"),
    ],
)
def test_names_without_what_wrappers_add(name: str, canonical: str, own: str) -> None:
    assert canonical_parameter_name(name) == canonical
    assert strip_wrappers(name) == own


def test_a_tied_parameter_has_all_its_names() -> None:
    model = nn.ModuleDict({"a": nn.Linear(2, 2), "b": nn.Linear(2, 2)})
    model["b"].weight = model["a"].weight
    assert canonical_parameters(model).keys() == {"a.weight", "a.bias", "b.weight", "b.bias"}


def trained() -> tuple[nn.Sequential, torch.optim.AdamW]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1))
    groups: list[dict[str, Any]] = [
        {"params": [model[0].weight, model[1].weight], "role": "decayed"},
        {"params": [model[0].bias, model[1].bias], "weight_decay": 0.0, "lr": 0.5},
    ]
    optimizer = torch.optim.AdamW(groups, lr=0.1)
    model(torch.ones(4, 2)).square().sum().backward()
    optimizer.step()
    return model, optimizer


def test_groups_options_and_state_follow_the_names() -> None:
    model, optimizer = trained()
    names = record_names(optimizer, model)
    states = {names[p]: copy.copy(state) for p, state in optimizer.state.items()}
    options = [{k: v for k, v in g.items() if k != "params"} for g in optimizer.param_groups]
    lists = [group["params"] for group in optimizer.param_groups]
    for layer in model:
        layer.weight = nn.Parameter(layer.weight.detach().clone())
        layer.bias = nn.Parameter(layer.bias.detach().clone())
    rebind(optimizer, names, model)
    assert all(
        group["params"] is before
        for group, before in zip(optimizer.param_groups, lists, strict=True)
    ), "LBFGS and its like hold on to the list"
    assert [p is q for p, q in zip(lists[0], (model[0].weight, model[1].weight), strict=True)]
    assert lists[0][0] is model[0].weight
    assert lists[1][1] is model[1].bias
    assert options == [
        {k: v for k, v in g.items() if k != "params"} for g in optimizer.param_groups
    ]
    present = canonical_parameters(model)
    assert {id(p) for p in optimizer.state} == {id(p) for p in present.values()}
    for name, state in states.items():
        assert optimizer.state[present[name]] == state


def test_parameters_of_another_model_are_counted() -> None:
    model, _ = trained()
    other = nn.Linear(2, 2)
    optimizer = torch.optim.SGD([*model.parameters(), *other.parameters()], lr=0.1)
    with pytest.raises(OptimizerError, match=r"SGD: .* found 2 of 6 that are not"):
        record_names(optimizer, model)


@pytest.mark.world_size(1, 2, 4)
def test_full_tensors_are_cut_like_the_parameter(ranks: RankPool) -> None:
    for rank, local in enumerate(ranks.run(cut_on_every_rank)):
        expected = torch.arange(10.0).view(5, 2).chunk(ranks.world_size)
        assert local.tolist() == (expected[rank].tolist() if rank < len(expected) else [])


def cut_on_every_rank() -> Tensor:
    return shard_like(torch.arange(10.0).view(5, 2), sharded(torch.zeros(5, 2))).to_local()


def sharded(tensor: Tensor) -> DTensor:
    import torch.distributed as dist

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    return distribute_tensor(tensor, mesh, [Shard(0)])


@pytest.mark.world_size(2)
def test_state_is_sharded_with_its_parameter(ranks: RankPool) -> None:
    for rank, (first, second, step) in enumerate(ranks.run(rebind_to_shards)):
        assert first.tolist() == [[10.0 * rank, 10.0 * rank + 1]]
        assert second.tolist() == ([[7.0]] if rank == 0 else [])
        assert step == 1


def rebind_to_shards() -> tuple[Tensor, Tensor, float]:
    model = nn.ParameterDict({"two": torch.zeros(2, 2), "one": torch.zeros(1, 1)})
    optimizer = torch.optim.Adam(model.values(), lr=0.1)
    sum(p.sum() for p in model.values()).backward()  # type: ignore[union-attr]
    optimizer.step()
    optimizer.state[model["two"]]["exp_avg"] = torch.tensor([[0.0, 1.0], [10.0, 11.0]])
    optimizer.state[model["one"]]["exp_avg"] = torch.tensor([[7.0]])
    names = record_names(optimizer, model)
    for name, parameter in list(model.items()):
        model[name] = nn.Parameter(sharded(parameter.detach()))
    rebind(optimizer, names, model)
    two, one = optimizer.state[model["two"]], optimizer.state[model["one"]]
    return two["exp_avg"].to_local(), one["exp_avg"].to_local(), two["step"].item()


@pytest.mark.world_size(2)
@pytest.mark.parametrize("option", ["foreach", "fused", None])
def test_groups_of_two_kinds_are_parted_where_one_operation_steps_them(
    ranks: RankPool, option: str | None
) -> None:
    for groups, values in ranks.run(step_two_kinds, option):
        assert groups == ([2, 1, 1, 1] if option else [3, 1, 1])
        assert values == pytest.approx([0.9] * 4 + [0.5], rel=1e-5)


def step_two_kinds(option: str | None) -> tuple[list[int], list[float]]:
    """Return the sizes of the groups, and what a step made of parameters of ones."""
    model = nn.ParameterList([sharded(torch.ones(2, 2)), torch.ones(2), sharded(torch.ones(2))])
    model.extend([nn.Parameter(torch.ones(3)), nn.Parameter(sharded(torch.ones(4)))])
    groups: list[dict[str, Any]] = [
        {"params": list(model[:3])},
        {"params": [model[3]]},
        {"params": [model[4]], "lr": 0.5},
    ]
    options = {option: True} if option else {}
    optimizer = torch.optim.Adam(groups, lr=0.1, **options)
    split_mixed_groups(optimizer)
    split_mixed_groups(optimizer)
    sum(_whole(p).sum() for p in model.parameters()).backward()  # type: ignore[union-attr]
    optimizer.step()
    sizes = [len(group["params"]) for group in optimizer.param_groups]
    return sizes, [_whole(p).mean().item() for p in model.parameters()]


def _whole(parameter: Tensor) -> Tensor:
    return parameter.full_tensor() if isinstance(parameter, DTensor) else parameter


@pytest.mark.world_size(1)
def test_state_of_another_shape_is_refused(ranks: RankPool) -> None:
    (message,) = ranks.run(rebind_adafactor)
    assert "Adafactor state 'row_var' of weight: expected a scalar or the shape [3, 2]" in message


def rebind_adafactor() -> str:
    model = nn.Linear(2, 3)
    optimizer = torch.optim.Adafactor(model.parameters())
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    names = record_names(optimizer, model)
    model.weight = nn.Parameter(sharded(model.weight.detach()))
    try:
        rebind(optimizer, names, model)
    except OptimizerError as error:
        return str(error)
    return "no error"
