"""Faults of bare megatron-fsdp that end the processes, or stop them.

They are shown by the failure; other tests show that Polyshard trains right, or refuses.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.optim import SGD

from polyshard import clip_grad_norm
from polyshard.conformance import RanksFailed
from polyshard.conformance.models import Block, build_model, global_batch, loss_of
from polyshard_megatron_fsdp.megatron_fsdp.patches.cuda_shim import prepare

sys.path.append(str(Path(__file__).parent))

from subjects import Bare, Polyshard, Subject, mesh_of, share


def split_by_rows(stage: int) -> tuple[nn.Module, int, Any]:
    """Return what to wrap: a model that is split by rows, a stage and the mesh."""
    mesh = mesh_of({"dp": 2, "tp": 2})
    model = build_model("plain")
    for block in model.blocks:
        parallelize_module(block, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    return model, stage, mesh


def train_rowwise(subject: Subject) -> None:
    loss_of(subject.wrap(*split_by_rows(3)), global_batch(0)).backward()


def clip(subject: Subject) -> float:
    model = subject.wrap(build_model("plain"), 3)
    loss_of(model, share(global_batch(0))).backward()
    if isinstance(subject, Polyshard):
        return float(clip_grad_norm(model, 0.1))
    norm: Any = nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    return float(norm.full_tensor())


def average(subject: Subject) -> None:
    subject.wrap(build_model("plain"), 3, average_in_collective=True)


def fp32_gradients(subject: Subject) -> None:
    from megatron_fsdp import MixedPrecisionPolicy

    policy = MixedPrecisionPolicy(main_params_dtype=None, main_grads_dtype=torch.float32)
    model = subject.wrap(build_model("plain").bfloat16(), 3, mixed_precision_policy=policy)
    loss_of(model, share(global_batch(0))).backward()


def tied_on_meta(subject: Subject) -> None:
    with torch.device("meta"):
        model = build_model("tied")
    for block in model.blocks:
        block.reset_parameters = lambda: None
    subject.wrap(model, 3, init_model_with_meta_device=True)


@pytest.mark.parametrize(
    ("measure", "expected"),
    [
        (clip, ""),
        (average, "'NoneType' object has no attribute 'size'"),
        (fp32_gradients, "gradient"),
        (tied_on_meta, "not found in FSDP parameters"),
    ],
)
def test_bare_megatron_fsdp_fails(bare_ranks, measure, expected):
    with pytest.raises(RanksFailed) as caught:
        bare_ranks.run(measure, Bare())
    assert expected in str(caught.value)


def test_rowwise_parallel_modules_fail(four_bare_ranks):
    with pytest.raises(RanksFailed, match="chunk metadata is invalid"):
        four_bare_ranks.run(train_rowwise, Bare())


@pytest.mark.world_size(2)
def test_polyshard_clips(ranks):
    model = build_model("plain")
    loss_of(model, global_batch(0)).backward()
    expected = float(nn.utils.get_total_norm([p.grad for p in model.parameters()]))
    assert ranks.run(clip, Polyshard()) == pytest.approx([expected, expected], rel=1e-6)


def replaced_groups() -> int:
    """How many groups the combined call leaves of two."""
    from megatron_fsdp import fully_shard

    prepare(torch.device("cpu"))
    model = build_model("plain")
    first, *others = model.parameters()
    optimizer = SGD([{"params": [first]}, {"params": others, "lr": 0.5}], lr=0.1)
    _, optimizer = fully_shard(
        model,
        optimizer,
        device_mesh=mesh_of({"dp": dist.get_world_size(), "tp": 1}),
        dp_shard_dim="dp",
        tp_dim="tp",
        fsdp_unit_modules=[Block],
        device=torch.device("cpu"),
    )
    return len(optimizer.param_groups)


def test_combined_call_replaces_groups(bare_ranks):
    assert bare_ranks.run(replaced_groups) == [1, 1]
