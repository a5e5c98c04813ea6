"""Each fault of bare megatron-fsdp, shown on it, and its absence through Polyshard.

Where a test of bare megatron-fsdp fails, a newer version is right: note it in
docs/explanation/megatron-fsdp-faults.md, and let the patch end with the version before.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from weakref import ref

import pytest
import torch
import torch.distributed as dist
from packaging.version import Version
from torch import Tensor, nn
from torch.optim import SGD, AdamW

from polyshard.conformance.models import ModelWithAdapter, build_model, global_batch, loss_of
from polyshard_megatron_fsdp.megatron_fsdp.version import OLDEST, require_version

sys.path.append(str(Path(__file__).parent))

from subjects import (
    REPLICAS,
    Bare,
    Polyshard,
    Subject,
    gradient_sum,
    mesh_of,
    plain_gradient_sum,
    share,
)

# Each takes a subject and returns how wrong it is: 0 is right.


def hidden_step(subject: Subject) -> float:
    """How often the optimizer has stepped once it is sharded."""
    model = subject.wrap(build_model("plain"), 3)
    optimizer = subject.shard(model, AdamW(model.parameters()))
    steps = [float(state["step"]) for state in optimizer.state.values()]
    return max(steps, default=0.0)


def hidden_decay(subject: Subject) -> float:
    """How far sharding an optimizer with weight decay moves a weight."""
    model = subject.wrap(build_model("plain"), 3)
    before = [p._local_tensor.clone() for p in model.parameters()]
    subject.shard(model, SGD(model.parameters(), lr=0.1, weight_decay=0.1))
    moved = [
        float((p._local_tensor - b).abs().max()) if b.numel() else 0.0
        for p, b in zip(model.parameters(), before, strict=True)
    ]
    return max(moved)


def odd_group(subject: Subject, empty: bool) -> float:
    """Whether a group that begins with another key, or is empty, cannot be sharded."""
    model = subject.wrap(build_model("plain"), 3)
    groups: list[dict[str, Any]] = [{"lr": 0.1, "params": list(model.parameters())}]
    if empty:
        groups = [{"params": []}, {"params": list(model.parameters())}]
    try:
        subject.shard(model, SGD(groups, lr=0.1))
    except (TypeError, IndexError):
        return 1.0
    return 0.0


def first_key_is_not_params(subject: Subject) -> float:
    return odd_group(subject, empty=False)


def first_group_is_empty(subject: Subject) -> float:
    return odd_group(subject, empty=True)


def accumulated(subject: Subject, stage: int) -> float:
    """The relative error of the gradients of three microbatches."""
    model = subject.wrap(build_model("plain"), stage)
    model.zero_grad_buffer()
    subject.backward(model, [share(tokens) for tokens in global_batch(0).chunk(3)])
    return abs(gradient_sum(model) / plain_gradient_sum() - 1.0)


def accumulation_under_stage_1(subject: Subject) -> float:
    return accumulated(subject, 1)


def forward_before_step(subject: Subject) -> float:
    """The error of the loss after a step before which there was a forward without gradients."""
    reference = build_model("plain")
    plain = SGD(reference.parameters(), lr=0.5)
    loss_of(reference, global_batch(0)).backward()
    plain.step()
    model = subject.wrap(build_model("plain"), 3)
    optimizer = subject.shard(model, SGD(model.parameters(), lr=0.5))
    loss_of(model, share(global_batch(0))).backward()
    with torch.no_grad():
        loss_of(model, global_batch(1))
    optimizer.step()
    with torch.no_grad():
        return abs(float(loss_of(model, global_batch(1)) - loss_of(reference, global_batch(1))))


def parameters_after_evaluation(subject: Subject) -> float:
    """Whether the model shows the raw parameters, which have no storage, after an evaluation."""
    model = subject.wrap(build_model("plain"), 3)
    with torch.no_grad():
        loss_of(model, global_batch(0))
    return float(any(type(p.data) is Tensor for p in model.parameters()))


def unused_parameter(subject: Subject) -> float:
    """How far a parameter moves in a step that does not use it: by momentum and decay."""
    model = subject.wrap(build_model("adapter"), 1)
    optimizer = SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.1)
    optimizer = subject.shard(model, optimizer)
    tokens = share(global_batch(0))
    loss_of(model, tokens).backward()
    optimizer.step()
    optimizer.zero_grad()
    weight = dict(model.named_parameters())["module.adapter.weight"]._local_tensor
    before = weight.clone()
    loss_of(model, tokens, adapt=False).backward()
    optimizer.step()
    return float((weight - before).abs().max()) if weight.numel() else 0.0


def reduced_twice(subject: Subject) -> float:
    """The relative error of the gradients under stage 1 without overlap."""
    model = subject.wrap(build_model("plain"), 1, overlap_grad_reduce=False)
    loss_of(model, share(global_batch(0))).backward()
    return abs(gradient_sum(model) / plain_gradient_sum() - 1.0)


class AnswersInDict(ModelWithAdapter):
    """A model whose output is no tensor."""

    def forward(self, tokens: Tensor, **others: Any) -> Any:
        return {"logits": super().forward(tokens, **others)}


def output_is_a_dict(subject: Subject) -> float:
    """The relative error of the gradients of a model that returns a dict."""
    module = AnswersInDict()
    module.load_state_dict(build_model("adapter").state_dict())
    model = subject.wrap(module, 3)

    def logits_of(tokens: Tensor, **others: Any) -> Tensor:
        return model(tokens, **others)["logits"]

    loss_of(logits_of, share(global_batch(0))).backward()
    return abs(gradient_sum(model) / plain_gradient_sum("adapter") - 1.0)


def module_of_two_units(subject: Subject) -> float:
    """The relative error of the gradients of a model whose blocks have a module in common."""
    plain, model = build_model("plain"), build_model("plain")
    for each in (plain, model):
        each.blocks[2].down = each.blocks[0].down
    wrapped = subject.wrap(model, 2)
    loss_of(wrapped, share(global_batch(0))).backward()
    loss_of(plain, global_batch(0)).backward()
    expected = sum(float(p.grad.abs().sum()) for p in plain.parameters())
    return abs(gradient_sum(wrapped) / expected - 1.0)


def last_module_is_used_first(subject: Subject) -> float:
    """The relative error of the gradients of a model whose last module is not used last."""
    model = subject.wrap(build_model("adapter"), 3)
    loss_of(model, share(global_batch(0))).backward()
    return abs(gradient_sum(model) / plain_gradient_sum("adapter") - 1.0)


def new_parameter(subject: Subject) -> float:
    """Whether an optimizer on a Parameter that was replaced trains nothing, and nothing says so."""
    model = subject.wrap(build_model("plain"), 3)
    old = model.module.head.weight
    new = nn.Parameter(old.detach())
    new.__dict__.update(old.__dict__)
    model.module.head.weight = new
    try:
        optimizer = subject.shard(model, SGD([*model.parameters()], lr=0.1))
    except ValueError:
        return 0.0
    loss_of(model, share(global_batch(0))).backward()
    optimizer.step()
    return float(new.grad is None)


def optimizer_not_sharded(subject: Subject) -> float:
    """Whether a step of an optimizer that was never sharded is taken without a word."""
    model = subject.wrap(build_model("plain"), 3)
    loss_of(model, share(global_batch(0))).backward()
    try:
        SGD(model.parameters(), lr=0.1).step()
    except ValueError:
        return 0.0
    return 1.0


def seed_per_rank(subject: Subject) -> float:
    """How different the unsharded weights of two ranks are that initialized them differently."""
    model = subject.wrap(build_model("plain", seed=dist.get_rank()), 0)
    total = torch.tensor([float(sum(p._local_tensor.sum() for p in model.parameters()))])
    totals = [torch.zeros(1) for _ in range(dist.get_world_size())]
    dist.all_gather(totals, total)
    return float(abs(totals[0] - totals[-1]))


def never_freed(subject: Subject) -> float:
    """Whether a wrapped model stays in memory when nothing refers to it any more."""
    reference = ref(subject.wrap(build_model("plain"), 3))
    gc.collect()
    return float(reference() is not None)


FAULTS_OF_TWO: dict[str, tuple[Callable[[Subject], float], float]] = {
    "sharding counts a step": (hidden_step, 1.0),
    "sharding decays weights": (hidden_decay, 1e-3),
    "the first key of a group must be params": (first_key_is_not_params, 1.0),
    "the first group must not be empty": (first_group_is_empty, 1.0),
    "accumulation is wrong under stage 1": (accumulation_under_stage_1, 1e-2),
    "a forward before the step is stale": (forward_before_step, 1e-3),
    "raw parameters show after an evaluation": (parameters_after_evaluation, 1.0),
    "unused parameters move": (unused_parameter, 1e-4),
    "gradients are reduced twice without overlap": (reduced_twice, 1e-2),
    "gradients of a module that two units share are lost": (module_of_two_units, 1e-3),
    "gradients are lost unless the output is a tensor": (output_is_a_dict, 1e-3),
    "gradients are lost unless the last module is used last": (last_module_is_used_first, 1e-3),
    "a replaced parameter never trains": (new_parameter, 1.0),
    "an optimizer that is not sharded trains nothing": (optimizer_not_sharded, 1.0),
    "ranks start with their own weights": (seed_per_rank, 1e-2),
    "a model is never freed": (never_freed, 1.0),
}


def outer_scale(subject: Subject) -> float:
    """How many times too large gradients are with sharded replicas."""
    mesh = mesh_of({**REPLICAS, "tp": 1})
    model = subject.wrap(build_model("plain"), 3, mesh, outer_dp_sharding_strategy=1)
    loss_of(model, share(global_batch(0))).backward()
    return abs(gradient_sum(model) / plain_gradient_sum() - 1.0)


def outer_placement(subject: Subject) -> float:
    """Whether replicas cannot be trained under stage 0."""
    try:
        model = subject.wrap(build_model("plain"), 0, mesh_of({**REPLICAS, "tp": 1}))
        optimizer = subject.shard(model, SGD(model.parameters(), lr=0.1))
        loss_of(model, share(global_batch(0))).backward()
        optimizer.step()
    except (RuntimeError, ValueError, IndexError):
        return 1.0
    return 0.0


FAULTS_OF_FOUR: dict[str, tuple[Callable[[Subject], float], float]] = {
    "gradients of sharded replicas are 4 times too large": (outer_scale, 2.9),
    "replicas cannot be trained under stage 0": (outer_placement, 1.0),
}


#: The first version with a fault, and the first without, where that is not all of them.
FIRST = {"unused parameters move": Version("0.6.0")}
FIXED = {"gradients are lost unless the last module is used last": Version("0.6.0")}
#: The first version of torch under which a fault does no harm: 2.13.0 shows it, 2.14.1 does not.
FIXED_BY_TORCH = {"replicas cannot be trained under stage 0": Version("2.14")}


@pytest.mark.parametrize("fault", FAULTS_OF_TWO)
def test_fault_is_there(bare_ranks, fault):
    if require_version() < FIRST.get(fault, OLDEST):
        pytest.skip(f"came with megatron-fsdp {FIRST[fault]}")
    if fault in FIXED and require_version() >= FIXED[fault]:
        pytest.skip(f"was fixed in megatron-fsdp {FIXED[fault]}")
    measure, size = FAULTS_OF_TWO[fault]
    assert max(bare_ranks.run(measure, Bare())) >= size


@pytest.mark.world_size(2)
@pytest.mark.parametrize("fault", FAULTS_OF_TWO)
def test_polyshard_is_right(ranks, fault):
    measure, _ = FAULTS_OF_TWO[fault]
    assert max(ranks.run(measure, Polyshard())) < 1e-6


@pytest.mark.parametrize("fault", FAULTS_OF_FOUR)
def test_fault_is_there_on_four_ranks(four_bare_ranks, fault):
    if fault in FIXED_BY_TORCH and Version(torch.__version__) >= FIXED_BY_TORCH[fault]:
        pytest.skip(f"does no harm from torch {FIXED_BY_TORCH[fault]} on")
    measure, size = FAULTS_OF_FOUR[fault]
    assert max(four_bare_ranks.run(measure, Bare())) >= size


@pytest.mark.world_size(4)
@pytest.mark.parametrize("fault", FAULTS_OF_FOUR)
def test_polyshard_is_right_on_four_ranks(ranks, fault):
    measure, _ = FAULTS_OF_FOUR[fault]
    assert max(ranks.run(measure, Polyshard())) < 1e-5
