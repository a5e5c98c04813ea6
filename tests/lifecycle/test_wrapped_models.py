"""What the functions of a loop know of a model: its config is never named again."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any
from weakref import ref

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import SGD

import polyshard
from polyshard import DDPConfig, FSDP2Config
from polyshard.conformance import RankPool
from polyshard.conformance.models import build_model
from polyshard.exceptions import ConfigError, ModelError
from polyshard.lifecycle.state_dict import parameter_bytes
from polyshard.registry.resolve import resolve_config

each_strategy = pytest.mark.parametrize(
    "strategy",
    [
        pytest.param(name, marks=pytest.mark.strategy(name))
        for name in ("ddp", "fsdp2", "megatron_fsdp")
    ],
)


def batch() -> Tensor:
    generator = torch.Generator().manual_seed(dist.get_rank() if dist.is_initialized() else 0)
    return torch.randint(0, 16, (2, 8), generator=generator)


def backward(model: nn.Module) -> None:
    model(batch()).float().pow(2).mean().backward()


def call_all(strategy: str, of: str) -> dict[str, Any]:
    """Call every function with what came back, the module given, or what compile made of it."""
    module = build_model("tied")
    model, _ = polyshard.parallelize(module, resolve_config(strategy).in_full_precision())
    optimizer = SGD(model.parameters(), lr=0.1)
    handle = {"result": model, "module": module}.get(of)
    if handle is None:
        handle = nn.Sequential(model)  # as torch.compile does: a module that adds nothing
    optimizer = polyshard.maybe_shard_optimizer(handle, optimizer)
    for last in (False, True):
        with polyshard.accumulate(handle, last=last):
            backward(model)
    norm = polyshard.clip_grad_norm(handle, 0.5)
    optimizer.step()
    optimizer.zero_grad()
    with polyshard.rebuild(handle):
        module.get_parameter("head.weight").data.mul_(2.0)
    polyshard.load_full_state_dict(handle, polyshard.full_state_dict(handle))
    return {
        "norm": (norm.item(), norm.shape, norm.dtype, norm.device.type),
        "bytes": parameter_bytes(handle),
        "weights": polyshard.full_state_dict(handle, rank0_only=False),
    }


@each_strategy
@pytest.mark.world_size(2)
def test_each_function_takes_the_module_as_well(ranks: RankPool, strategy: str) -> None:
    expected = ranks.run(call_all, strategy, "result")
    for of in ("module", "around"):
        for found, wanted in zip(ranks.run(call_all, strategy, of), expected, strict=True):
            assert found["norm"] == wanted["norm"]
            assert found["bytes"] == wanted["bytes"]
            for name, value in wanted["weights"].items():
                assert torch.equal(found["weights"][name], value), name


@each_strategy
@pytest.mark.world_size(2)
def test_the_norm_is_a_tensor_and_the_same_everywhere(ranks: RankPool, strategy: str) -> None:
    norms = [found["norm"] for found in ranks.run(call_all, strategy, "result")]
    assert norms[0] == norms[1]
    assert norms[0][1:] == (torch.Size([]), torch.float32, "cpu")


def gather(strategy: str) -> dict[str, Any]:
    """Gather on the first rank, and watch how many whole tensors the others hold at a time."""
    model, _ = polyshard.parallelize(
        build_model("tied"), resolve_config(strategy).in_full_precision()
    )
    names = list(polyshard.full_state_dict(model))
    alive = []
    known = polyshard.lifecycle.wrapped_models.find(model)
    previous: list[Callable[[], Tensor | None]] = []
    for _, tensor in polyshard.lifecycle.state_dict._full_tensors(model, known):
        alive.append(sum(reference() is not None for reference in previous))
        previous.append(ref(tensor))
        del tensor
    return {"names": names, "alive": max(alive)}


@pytest.mark.parametrize(
    "strategy",
    [
        pytest.param("fsdp2", marks=pytest.mark.strategy("fsdp2")),
        pytest.param("megatron_fsdp", marks=pytest.mark.strategy("megatron_fsdp")),
    ],
)
@pytest.mark.world_size(2)
def test_tensors_are_gathered_one_by_one_for_the_first_rank(ranks: RankPool, strategy: str) -> None:
    first, second = ranks.run(gather, strategy)
    assert first["names"] == list(build_model("tied").state_dict())
    assert second["names"] == []
    assert first["alive"] == second["alive"] == 0


def wrapped() -> tuple[nn.Module, nn.Module]:
    module = build_model("tied")
    return module, polyshard.parallelize(module, DDPConfig())[0]


FUNCTIONS: dict[str, Callable[[nn.Module], object]] = {
    "accumulate": lambda model: polyshard.accumulate(model, last=True),
    "clip_grad_norm": lambda model: polyshard.clip_grad_norm(model, 1.0),
    "pre_rebuild": polyshard.pre_rebuild,
    "full_state_dict": polyshard.full_state_dict,
    "load_full_state_dict": lambda model: polyshard.load_full_state_dict(model, {}),
    "maybe_shard_optimizer": lambda model: polyshard.maybe_shard_optimizer(
        model, SGD(model.parameters())
    ),
}


@pytest.mark.strategy("ddp")
@pytest.mark.parametrize("function", FUNCTIONS)
def test_a_part_of_a_model_is_refused(function: str) -> None:
    module, model = wrapped()
    with pytest.raises(ModelError, match="a part of the"):
        FUNCTIONS[function](module.get_submodule("blocks.0"))
    del model


@pytest.mark.strategy("ddp")
@pytest.mark.parametrize("function", FUNCTIONS)
def test_more_than_one_model_is_refused(function: str) -> None:
    models = nn.ModuleList([wrapped()[1], wrapped()[1]])
    with pytest.raises(ModelError, match="holds 2 of them"):
        FUNCTIONS[function](models)


@pytest.mark.strategy("ddp")
def test_a_model_with_parameters_beside_it_is_refused() -> None:
    around = nn.ModuleDict({"model": wrapped()[1], "probe": nn.Linear(2, 2)})
    with pytest.raises(ModelError, match=r"'probe\.weight' beside it"):
        polyshard.clip_grad_norm(around, 1.0)


def keep_the_module_alone() -> str:
    module, model = wrapped()
    del model
    gc.collect()
    try:
        polyshard.clip_grad_norm(module, 1.0)
    except ModelError as error:
        return str(error)
    return "no error"


@pytest.mark.strategy("ddp")
@pytest.mark.world_size(2)
def test_a_model_that_was_let_go_of_is_named(ranks: RankPool) -> None:
    for message in ranks.run(keep_the_module_alone):
        assert "keep what parallelize returned" in message


@pytest.mark.strategy("ddp")
def test_the_config_of_another_strategy_is_refused() -> None:
    _, model = wrapped()
    optimizer = SGD(model.parameters())
    assert polyshard.maybe_shard_optimizer(model, optimizer, DDPConfig()) is optimizer
    with pytest.raises(ConfigError, match=r"expected the config of strategy 'ddp'.*FSDP2Config"):
        polyshard.maybe_shard_optimizer(model, optimizer, FSDP2Config())
