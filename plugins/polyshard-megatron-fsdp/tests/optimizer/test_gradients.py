"""The step: microbatches, clipping, NaN, and what a script may do between backward and step."""

from __future__ import annotations

import re
import warnings

import pytest
import torch
from torch.optim import SGD

from polyshard import accumulate, clip_grad_norm, maybe_shard_optimizer, parallelize
from polyshard.conformance.models import build_model, global_batch, loss_of
from polyshard.exceptions import UnsupportedError
from polyshard_megatron_fsdp import MegatronFSDPConfig

pytestmark = pytest.mark.world_size(2)


def plain_microbatches(stage: int) -> str | None:
    """Accumulate without ``accumulate``; return the error, None if the result is right."""
    config = MegatronFSDPConfig(zero_dp_strategy=stage)
    model, _ = parallelize(build_model("plain"), config)
    optimizer = maybe_shard_optimizer(model, SGD(model.parameters(), lr=0.1), config)
    reference = build_model("plain")
    optimizer.zero_grad()
    for tokens in global_batch(0).chunk(3):
        (loss_of(reference, tokens) / 3).backward()
    expected = float(torch.nn.utils.get_total_norm([p.grad for p in reference.parameters()]))
    try:
        for tokens in global_batch(0).chunk(3):
            (loss_of(model, tokens) / 3).backward()
    except UnsupportedError as error:
        return str(error)
    norm = clip_grad_norm(model, float("inf"))
    assert norm == pytest.approx(expected, rel=1e-5)
    return None


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_microbatches_without_accumulate_are_right_or_refused(ranks, stage):
    for message in ranks.run(plain_microbatches, stage):
        if stage < 2:
            assert message is not None
            assert "polyshard.accumulate(model, last=...)" in message
        else:
            assert message is None


def step_too_early(stage: int) -> list[str]:
    config = MegatronFSDPConfig(zero_dp_strategy=stage)
    model, _ = parallelize(build_model("plain"), config)
    optimizer = maybe_shard_optimizer(model, SGD(model.parameters(), lr=0.1), config)
    with accumulate(model, last=False):
        loss_of(model, global_batch(0)).backward()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        optimizer.step()
    return [str(warning.message) for warning in caught]


@pytest.mark.parametrize("stage", [0, 3])
def test_step_before_the_last_microbatch_warns(ranks, stage):
    for messages in ranks.run(step_too_early, stage):
        assert any("accumulate(model, last=True)" in message for message in messages)


def flags_around_accumulate() -> list[tuple[bool, bool]]:
    config = MegatronFSDPConfig()
    model, _ = parallelize(build_model("plain"), config)
    seen = []
    for last in (False, True):
        before = dict(vars(model))
        with accumulate(model, last=last):
            pass
        seen.append(
            (
                before["model_auto_sync"] == model.model_auto_sync,
                before.get("is_last_microbatch", False) == model.is_last_microbatch,
            )
        )
    return seen


def test_accumulate_restores_what_it_found(ranks):
    for seen in ranks.run(flags_around_accumulate):
        assert seen == [(True, True), (True, True)]


def plant_nan(stage: int, culprit: int) -> str:
    config = MegatronFSDPConfig(zero_dp_strategy=stage, report_nan_in_param_grad=True)
    model, _ = parallelize(build_model("plain"), config)
    loss = loss_of(model, global_batch(0))
    if torch.distributed.get_rank() == culprit:
        scale = model.module.blocks[1].gain
        loss = loss + (scale * float("nan")).sum()
    try:
        loss.backward()
    except ValueError as error:
        return str(error)
    return "no error"


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("culprit", [0, 1])
def test_planted_nan_is_found_and_named_on_every_rank(ranks, stage, culprit):
    for message in ranks.run(plant_nan, stage, culprit):
        assert re.search(r"NaN or infinity in blocks\.1\.gain$", message), message


def evaluate_between(stage: int) -> tuple[set[str], bool]:
    """Look at the parameters after a forward without gradients, and load into the model."""
    config = MegatronFSDPConfig(zero_dp_strategy=stage)
    model, _ = parallelize(build_model("plain"), config)
    with torch.no_grad():
        loss_of(model, global_batch(0))
    kinds = {type(p.data).__name__ for p in model.parameters()}
    other = build_model("plain", seed=1)
    model.module.load_state_dict(other.state_dict())
    with torch.no_grad():
        same = torch.equal(loss_of(model, global_batch(0)), loss_of(other, global_batch(0)))
    return kinds, same


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_evaluation_leaves_distributed_parameters_in_place(ranks, stage):
    for kinds, same in ranks.run(evaluate_between, stage):
        assert kinds == {"DTensor"}
        assert same, "expected the loaded weights to count at once"
