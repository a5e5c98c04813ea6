"""Optimizers that are refused: before anything is touched, and under ``python -O`` too."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import LBFGS, SGD, Adafactor, Adam, AdamW, Optimizer

from polyshard import maybe_shard_optimizer, parallelize
from polyshard.conformance.models import build_model, global_batch, loss_of
from polyshard.exceptions import OptimizerError, OptimizerNotShardableError
from polyshard_megatron_fsdp import MegatronFSDPConfig, MegatronFSDPManager

pytestmark = pytest.mark.world_size(2)


class Dion(SGD):
    """Named like the optimizer that orthogonalizes whole matrices."""


class Tuned(Dion):
    """A user's subclass of it."""


class NorMuon(SGD):
    """One of its kin."""


def muon(parameters: list[nn.Parameter]) -> Optimizer:
    return torch.optim.Muon([p for p in parameters if p.ndim == 2], lr=1e-2)


WHOLE_MATRIX = {
    "Dion": lambda parameters: Dion(parameters, lr=0.1),
    "Tuned": lambda parameters: Tuned(parameters, lr=0.1),
    "NorMuon": lambda parameters: NorMuon(parameters, lr=0.1),
    "Adafactor": Adafactor,
    "LBFGS": LBFGS,
    "Muon": muon,
}


def refuse(name: str, passed: bool) -> tuple[str, bool, list[str]]:
    """Return the error, whether the optimizer is as it was, and the module's parameter types."""
    config = MegatronFSDPConfig()
    model: Any = build_model("plain")
    if not passed:
        model, _ = parallelize(model, config)
    optimizer = WHOLE_MATRIX[name](list(model.parameters()))
    held = [id(p) for group in optimizer.param_groups for p in group["params"]]
    try:
        if passed:
            parallelize(model, config, optimizer=optimizer)
        else:
            maybe_shard_optimizer(model, optimizer)
    except OptimizerNotShardableError as error:
        after = [id(p) for group in optimizer.param_groups for p in group["params"]]
        untouched = held == after and "step" not in vars(optimizer)
        return str(error), untouched, sorted({type(p).__name__ for p in model.parameters()})
    raise AssertionError("expected the optimizer to be refused")


@pytest.mark.parametrize("passed", [True, False], ids=["passed", "built after"])
@pytest.mark.parametrize("name", WHOLE_MATRIX)
def test_optimizers_that_need_whole_matrices_are_refused(ranks, name, passed):
    for message, untouched, kinds in ranks.run(refuse, name, passed):
        assert name in message
        assert "'megatron_fsdp'" in message
        assert "use AdamW or SGD" in message
        assert untouched
        assert not passed or kinds == ["Parameter"], "expected the model to be left alone"


OPTIMIZED = """
from torch.optim import SGD
from polyshard_megatron_fsdp.optimizer.optimizer_checks import refuse_unshardable
import torch

class Dion(SGD): ...

assert False, "unreachable under -O"
try:
    refuse_unshardable(Dion([torch.zeros(1)], lr=0.1))
except AssertionError as error:
    print("refused")
"""


def test_guard_holds_without_asserts():
    result = subprocess.run(
        [sys.executable, "-O", "-W", "ignore", "-c", OPTIMIZED],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert result.stdout.strip() == "refused", result.stderr


def message_of(action: str) -> str:
    """Return the error of one mistake, on this rank."""
    config = MegatronFSDPConfig()
    model, _ = parallelize(build_model("plain"), config)
    try:
        if action == "another model":
            other, _ = parallelize(build_model("plain"), config)
            maybe_shard_optimizer(model, AdamW(other.parameters()), config)
        elif action == "another model, passed":
            parallelize(
                build_model("plain"), config, optimizer=AdamW(build_model("plain").parameters())
            )
        elif action == "no parameters":
            optimizer = Adam(model.parameters())
            optimizer.param_groups[0]["params"] = []
            maybe_shard_optimizer(model, optimizer)
        elif action == "allow=False":
            maybe_shard_optimizer(model, AdamW(model.parameters()), config, allow=False)
        elif action == "replaced":
            model.module.head.weight = nn.Parameter(model.module.head.weight.detach())
            maybe_shard_optimizer(model, AdamW(model.parameters()), config)
        elif action == "never sharded":
            loss_of(model, global_batch(0)).backward()
            AdamW(model.parameters()).step()
    except OptimizerError as error:
        return str(error)
    raise AssertionError(f"expected {action!r} to be refused")


@pytest.mark.parametrize(
    ("action", "expected"),
    [
        ("another model", "wrapped, found 24 of 24 that are not"),
        ("another model, passed", "are not; build the optimizer on this model's parameters"),
        ("no parameters", "expected parameters in at least one group, found none"),
        ("allow=False", "allow=False"),
        ("replaced", "only inside polyshard.rebuild(model)"),
        ("never sharded", "polyshard.maybe_shard_optimizer(model, optimizer)"),
    ],
)
def test_mistakes_are_named(ranks, action, expected):
    for message in ranks.run(message_of, action):
        assert expected in message


def step_by_hand(stage: int) -> float:
    """Train without a sharded optimizer, with megatron-fsdp's own calls around the step."""
    config = MegatronFSDPConfig(zero_dp_strategy=stage)
    mesh = _mesh()
    model, _ = MegatronFSDPManager(config, mesh).parallelize(build_model("plain"))
    reference = build_model("plain")
    plain, by_hand = SGD(reference.parameters(), lr=0.1), SGD(model.parameters(), lr=0.1)
    tokens = global_batch(0)
    for _ in range(3):
        plain.zero_grad()
        expected = loss_of(reference, tokens)
        expected.backward()
        plain.step()
        model.zero_grad_buffer()
        loss = loss_of(model, tokens)
        loss.backward()
        by_hand.step()
        model.install_optimized_model_weights()
        model.synchronize_param_gather()
    return abs(loss.item() - expected.item())


def _mesh() -> Any:
    from torch.distributed.device_mesh import init_device_mesh

    return init_device_mesh("cpu", (torch.distributed.get_world_size(),), mesh_dim_names=("dp",))


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_managers_models_may_be_stepped_by_hand(ranks, stage):
    assert max(ranks.run(step_by_hand, stage)) < 1e-6
