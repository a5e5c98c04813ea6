"""bf16 models: main weights and reduction in float32, as the config says."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.optim import SGD

from polyshard import full_state_dict, maybe_shard_optimizer, parallelize
from polyshard.conformance.models import build_model, global_batch, loss_of
from polyshard_megatron_fsdp import MegatronFSDPConfig

pytestmark = pytest.mark.world_size(2)

STEPS = 4
BF16_ROUNDING = 2**-8  # of one operation, relative


def optimizer_of(parameters: list[nn.Parameter]) -> SGD:
    return SGD(parameters, lr=0.1, momentum=0.9)


def expected_weights(main: torch.dtype, kept: torch.dtype, ranks: int) -> dict[str, torch.Tensor]:
    """Train in one process that rounds where several would: the ranks' gradients one by one."""
    model = build_model("tied").bfloat16()
    names = [name for name, _ in model.named_parameters()]
    mains = [nn.Parameter(p.detach().to(main)) for p in model.parameters()]
    optimizer = optimizer_of(mains)
    for step in range(STEPS):
        sums = [torch.zeros_like(p, dtype=kept) for p in mains]
        for tokens in global_batch(step).chunk(ranks):
            model.zero_grad()
            loss_of(model, tokens).backward()
            for total, parameter in zip(sums, model.parameters(), strict=True):
                total += parameter.grad.to(kept) / ranks
        for parameter, total in zip(mains, sums, strict=True):
            parameter.grad = total.to(parameter.dtype)
        optimizer.step()
        with torch.no_grad():
            for parameter, master in zip(model.parameters(), mains, strict=True):
                parameter.copy_(master)
    return dict(zip(names, (p.detach() for p in mains), strict=True))


def train(
    config: MegatronFSDPConfig, main: torch.dtype, kept: torch.dtype
) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor], set[str]]:
    """Return the weights after training, those expected, and the dtypes that are stepped.

    Both are computed here, since bf16 products depend on the number of threads.
    """
    model, _ = parallelize(build_model("tied").bfloat16(), config)
    optimizer = maybe_shard_optimizer(model, optimizer_of(list(model.parameters())), config)
    for step in range(STEPS):
        optimizer.zero_grad()
        loss_of(model, global_batch(step).chunk(dist.get_world_size())[dist.get_rank()]).backward()
        dtypes = {f"{p.dtype} {p.grad.dtype}" for p in model.parameters() if p.grad is not None}
        optimizer.step()
    expected = expected_weights(main, kept, dist.get_world_size())
    return full_state_dict(model, rank0_only=False), expected, dtypes


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("in_fp32", [False, True], ids=["reduce bf16", "reduce fp32"])
@pytest.mark.parametrize("preserve", [False, True], ids=["weights bf16", "weights fp32"])
def test_weights_and_dtypes_are_those_of_the_policy(ranks, preserve, in_fp32, stage):
    config = MegatronFSDPConfig(
        zero_dp_strategy=stage, preserve_fp32_weights=preserve, grad_reduce_in_fp32=in_fp32
    )
    main = torch.float32 if preserve else torch.bfloat16
    kept = torch.float32 if in_fp32 else torch.bfloat16
    # Where bf16 is stepped, torch's kernels round a tensor's last entries in another way than its
    # others, and shards have other last entries.
    tolerance = 0.0 if preserve else 2 * BF16_ROUNDING
    for weights, expected, dtypes in ranks.run(train, config, main, kept):
        assert dtypes == {f"{main} {main}"}
        for name, weight in expected.items():
            assert weights[name].dtype == main
            scale = weight.abs().max().item()
            assert (weights[name] - weight).abs().max().item() <= tolerance * scale, name


def write_in_place(config: MegatronFSDPConfig) -> tuple[float, float]:
    """Return the loss after all weights were halved in place, and the loss to be expected."""
    model, _ = parallelize(build_model("tied").bfloat16(), config)
    plain = build_model("tied").bfloat16()
    with torch.no_grad():
        loss_of(model, global_batch(0))
        for parameter in (*model.parameters(), *plain.parameters()):
            parameter.mul_(0.5)
        return float(loss_of(model, global_batch(0))), float(loss_of(plain, global_batch(0)))


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("preserve", [False, True], ids=["weights bf16", "weights fp32"])
def test_values_written_in_place_count_at_once(ranks, preserve, stage):
    config = MegatronFSDPConfig(zero_dp_strategy=stage, preserve_fp32_weights=preserve)
    for loss, expected in ranks.run(write_in_place, config):
        assert loss == pytest.approx(expected, rel=2 * BF16_ROUNDING)


def test_one_rank_says_that_the_policy_does_nothing(caplog):
    from polyshard_megatron_fsdp.megatron_fsdp.version import warn_once

    warn_once.cache_clear()
    model = build_model("plain")
    config = MegatronFSDPConfig(preserve_fp32_weights=True)
    assert parallelize(model, config)[0] is model
    assert "preserve_fp32_weights" in caplog.text
