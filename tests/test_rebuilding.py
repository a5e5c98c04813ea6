"""A rebuild keeps values and objects, or is refused with the old ones in place.

That training goes on right after it is a part of the kit that every strategy passes.
"""

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from polyshard import full_state_dict, parallelize, rebuild, resolve_config
from polyshard.conformance.models import TinyModel, build_model, global_batch, loss_of
from polyshard.conformance.pool import RankPool
from polyshard.exceptions import RebuildError

each_strategy = pytest.mark.parametrize(
    "strategy",
    [
        pytest.param("ddp", marks=pytest.mark.strategy("ddp")),
        pytest.param("fsdp2", marks=pytest.mark.strategy("fsdp2")),
    ],
)


def _resize(model: TinyModel) -> None:
    model.head.weight = nn.Parameter(torch.zeros(5, 16))


def _untie(model: TinyModel) -> None:
    model.head.weight = nn.Parameter(torch.zeros(33, 16))


def _tie(model: TinyModel) -> None:
    model.blocks[0].up.weight = model.blocks[1].up.weight


def _add(model: TinyModel) -> None:
    model.extra = nn.Parameter(torch.zeros(3))


def _remove(model: TinyModel) -> None:
    del model.blocks[0].up.bias


def _replace_module(model: TinyModel) -> None:
    model.blocks[0].up = nn.Linear(16, 64)


def _empty(model: TinyModel) -> None:
    model.blocks[0].up.bias = nn.Parameter(torch.empty(64, device="meta"))


CHANGES: dict[str, tuple[Callable[[TinyModel], None], str]] = {
    "resize": (_resize, "a value of shape [33, 16] for 'embedding.weight' and 'head.weight'"),
    "untie": (_untie, "one value for 'embedding.weight' and 'head.weight', which are tied"),
    "tie": (_tie, "'blocks.1.up.weight' and 'blocks.0.up.weight' to stay apart"),
    "add": (_add, "others added or removed (extra)"),
    "remove": (_remove, "others added or removed (blocks.0.up.bias)"),
    "replace module": (_replace_module, "the module that holds 'blocks.0.up.weight' to stay"),
    "empty": (_empty, "a value for 'blocks.0.up.bias', found one on the meta device"),
}


@each_strategy
@pytest.mark.parametrize("change", CHANGES)
def test_what_cannot_be_made_right_is_refused(ranks: RankPool, strategy: str, change: str) -> None:
    for message, unchanged in ranks.run(refused, strategy, change):
        assert CHANGES[change][1] in message
        assert unchanged or change == "replace module"


def refused(strategy: str, change: str) -> tuple[str, bool]:
    """Return the error, and whether objects and values are those of before."""
    config = resolve_config(strategy).in_full_precision()
    module = build_model("tied")
    model, _ = parallelize(module, config)
    loss_of(model, global_batch(0)).backward()
    objects, values = dict(module.named_parameters()), full_state_dict(model, config)
    message = "no error"
    try:
        with rebuild(model, config):
            CHANGES[change][0](module)
    except RebuildError as error:
        message = str(error)
    same = all(module.get_parameter(name) is p for name, p in objects.items())
    present = full_state_dict(model, config)
    return message, same and all(torch.equal(present[n], v) for n, v in values.items())


@each_strategy
def test_a_fresh_attribute_is_kept_and_a_lost_one_comes_back(
    ranks: RankPool, strategy: str
) -> None:
    for attributes in ranks.run(attributes_after, strategy):
        assert attributes == {"old": "of before", "fresh": "of the rebuild", "new": "of it too"}


def attributes_after(strategy: str) -> dict[str, str]:
    config = resolve_config(strategy).in_full_precision()
    module = build_model("tied")
    module.head.weight.old = "of before"  # type: ignore[assignment]
    module.head.weight.fresh = "of before"  # type: ignore[assignment]
    model, _ = parallelize(module, config)
    with rebuild(model, config):
        parameter = nn.Parameter(torch.ones(33, 16))
        parameter.fresh, parameter.new = "of the rebuild", "of it too"  # type: ignore[attr-defined]
        module.head.weight = module.embedding.weight = parameter
    kept = module.embedding.weight
    return {name: getattr(kept, name) for name in ("old", "fresh", "new")}


@each_strategy
def test_dtypes_are_those_of_before(ranks: RankPool, strategy: str) -> None:
    """Of parameters, buffers and a gradient that was there; the values are the rounded ones."""
    for dtypes, rounded in ranks.run(cast_down, strategy):
        assert dtypes == {torch.float32, torch.int64}
        assert rounded


def cast_down(strategy: str) -> tuple[set[torch.dtype], bool]:
    config = resolve_config(strategy).in_full_precision()
    module = build_model("buffers")
    model, _ = parallelize(module, config)
    loss_of(model, global_batch(0)).backward()
    expected = full_state_dict(model, config)["head.weight"].bfloat16().float()
    with rebuild(model, config):
        model.to(torch.bfloat16)
    gradients = [p.grad for p in model.parameters()]
    assert all(gradient is not None for gradient in gradients)
    tensors = [*model.parameters(), *model.buffers(), *gradients]
    rounded = torch.equal(full_state_dict(model, config)["head.weight"], expected)
    return {tensor.dtype for tensor in tensors if isinstance(tensor, Tensor)}, rounded


@each_strategy
def test_a_tie_may_be_loaded_as_two_equal_parameters(ranks: RankPool, strategy: str) -> None:
    for tied, loaded in ranks.run(load_untied, strategy):
        assert tied
        assert loaded


def load_untied(strategy: str) -> tuple[bool, bool]:
    config = resolve_config(strategy).in_full_precision()
    module = build_model("tied", seed=dist.get_rank())
    model, _ = parallelize(module, config)
    values = {
        name: value.clone() for name, value in build_model("tied", seed=7).state_dict().items()
    }
    with rebuild(model, config):
        module.load_state_dict(values, assign=True)
        assert module.head.weight is not module.embedding.weight
    present = full_state_dict(model, config)
    same = all(torch.equal(present[name], value) for name, value in values.items())
    return module.head.weight is module.embedding.weight, same
