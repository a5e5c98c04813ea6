"""Every option of FSDP2Config does what it says; training equals one process under each."""

import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from polyshard import FSDP2Config, ParallelismSizes, full_state_dict, parallelize
from polyshard.conformance import RankPool
from polyshard.conformance.models import build_model, global_batch, loss_of
from polyshard.conformance.parity import assert_parity
from polyshard.conformance.recipes import Recipe
from polyshard.conformance.trainings import train_plain, train_under
from polyshard.exceptions import (
    ConfigError,
    MeshError,
    OptimizerError,
    PolyshardError,
    UnitError,
    UnsupportedError,
)

pytestmark = pytest.mark.strategy("fsdp2")


@pytest.mark.parametrize(
    "options",
    [
        {"unit_modules": ["Linear"]},
        {"activation_checkpointing": True},
        {"activation_checkpointing": "selective", "reshard_after_forward": True},
        {"reshard_after_forward": False},
        {"defer_fsdp_grad_sync": False},
        {"forward_prefetch_depth": 1, "backward_prefetch_depth": 2},
        {"forward_prefetch_depth": 9, "backward_prefetch_depth": 9},
    ],
    ids=str,
)
@pytest.mark.parametrize("microbatches", [None, 3])
def test_training_equals_one_process(
    ranks: RankPool, options: dict[str, Any], microbatches: int | None
) -> None:
    recipe = Recipe(model="tied", microbatches=microbatches, max_norm=0.5, evaluate="before step")
    config = FSDP2Config(**options).in_full_precision()
    outcomes = ranks.run(train_under, config, recipe, passed=True)
    assert_parity(outcomes, train_plain(recipe), recipe)


@pytest.mark.world_size(4)
@pytest.mark.parametrize(
    ("options", "sizes"),
    [
        ({}, {"dp_replicate_size": 4}),
        ({}, {"dp_replicate_size": 2, "cp_size": 2}),
        ({"reshard_after_forward": 2, "defer_fsdp_grad_sync": False}, {}),
    ],
    ids=str,
)
@pytest.mark.parametrize("microbatches", [None, 3])
def test_four_ranks_equal_one_process(
    ranks: RankPool, options: dict[str, Any], sizes: dict[str, int], microbatches: int | None
) -> None:
    recipe = Recipe(model="mixed", microbatches=microbatches, max_norm=0.5)
    config = FSDP2Config(**options).in_full_precision()
    shape = ParallelismSizes(**sizes)
    outcomes = ranks.run(train_under, config, recipe, passed=True, sizes=shape)
    assert_parity(outcomes, train_plain(recipe), recipe)


def test_units_and_root_are_sharded(ranks: RankPool) -> None:
    for sharded, parameters in ranks.run(what_is_sharded):
        assert sharded == ["", "blocks.0", "blocks.1", "blocks.2"]
        assert parameters


def what_is_sharded() -> tuple[list[str], bool]:
    model, _ = parallelize(build_model("plain"), FSDP2Config())
    sharded = [name for name, module in model.named_modules() if isinstance(module, FSDPModule)]
    return sharded, all(isinstance(p, DTensor) for p in model.parameters())


@pytest.mark.world_size(1, 2)
def test_the_precision_policy_holds_on_every_number_of_ranks(ranks: RankPool) -> None:
    for inside, output, held, gradient in ranks.run(dtypes_of_forward):
        assert inside == torch.bfloat16
        assert (output, held, gradient) == (torch.float32,) * 3


def dtypes_of_forward() -> tuple[torch.dtype, ...]:
    model = build_model("plain")
    inside: list[torch.dtype] = []
    model.blocks[1].up.register_forward_hook(lambda _, __, output: inside.append(output.dtype))
    model, _ = parallelize(model, FSDP2Config())  # type: ignore[assignment]
    logits = model(global_batch(0))
    logits.sum().backward()
    (gradient,) = [p.grad for n, p in model.named_parameters() if n == "head.weight"]
    assert gradient is not None
    return inside[0], logits.dtype, model.head.weight.dtype, gradient.dtype


def test_between_units_nothing_is_cast(ranks: RankPool) -> None:
    """The output dtype is that of the model: a cast there and back again would lose nothing."""
    assert all(dtype == torch.bfloat16 for dtype in ranks.run(dtype_between_units))


def dtype_between_units() -> torch.dtype:
    model, _ = parallelize(build_model("plain"), FSDP2Config())
    between: list[torch.dtype] = []
    (block, *_) = model.get_submodule("blocks").children()
    block.register_forward_hook(lambda _, __, output: between.append(output.dtype))
    model(global_batch(0))
    return between[0]


def test_autocast_lowers_the_forward_alone(ranks: RankPool) -> None:
    assert ranks.run(dtypes_under_autocast) == [(torch.bfloat16, torch.float32)] * ranks.world_size


def dtypes_under_autocast() -> tuple[torch.dtype, torch.dtype]:
    model, _ = parallelize(nn.Linear(2, 2), FSDP2Config(autocast_dtype="bf16", mp_policy=None))
    output = model(torch.ones(1, 2))
    output.float().sum().backward()
    (gradient, _) = [p.grad for p in model.parameters()]
    assert gradient is not None
    return output.dtype, gradient.dtype


def test_units_are_compiled(ranks: RankPool) -> None:
    for graphs, difference in ranks.run(train_compiled):
        assert graphs == 1, "three blocks of one class share a graph"
        assert difference < 1e-6


def train_compiled() -> tuple[int, float]:
    from torch._dynamo.utils import counters

    counters.clear()
    torch.compiler.reset()
    config = FSDP2Config(enable_compile=True).in_full_precision()
    model, _ = parallelize(build_model("plain"), config)
    loss = loss_of(model, global_batch(0))
    loss.backward()
    expected = loss_of(build_model("plain"), global_batch(0))
    return counters["stats"]["unique_graphs"], abs(loss.item() - expected.item())


@pytest.mark.world_size(2)
@pytest.mark.parametrize("sync", [True, False])
def test_the_initial_weights_are_those_of_rank_0(ranks: RankPool, sync: bool) -> None:
    for weights in ranks.run(weights_from_a_seed_per_rank, sync):
        mine, others = (build_model("buffers", seed=seed).state_dict() for seed in (0, 1))
        rows = mine["head.weight"].shape[0] // 2 + 1
        assert torch.equal(weights["head.weight"][:rows], mine["head.weight"][:rows])
        second = mine if sync else others
        assert torch.equal(weights["head.weight"][rows:], second["head.weight"][rows:])


def weights_from_a_seed_per_rank(sync: bool) -> dict[str, Tensor]:
    config = FSDP2Config(sync_initial_weights=sync)
    model, _ = parallelize(build_model("buffers", seed=dist.get_rank()), config)
    return full_state_dict(model, rank0_only=False)


@pytest.mark.world_size(2)
def test_buffers_are_those_of_rank_0(ranks: RankPool) -> None:
    assert ranks.run(buffers_of_rank) == [(0.0, 0.0)] * 2


def buffers_of_rank() -> tuple[float, float]:
    model = build_model("buffers")
    for name in ("scale", "positions"):
        model.get_buffer(name).fill_(dist.get_rank())
    parallelize(model, FSDP2Config())
    return model.get_buffer("scale")[0].item(), model.get_buffer("positions")[0].item()


def test_an_optimizer_that_has_stepped_goes_on(ranks: RankPool) -> None:
    for moved, difference in ranks.run(step_on):
        assert moved
        assert difference < 1e-6


def step_on() -> tuple[bool, float]:
    """Take a step before the wrap and one after; return the difference to doing it plainly."""
    results = []
    for distribute in (False, True):
        model = build_model("plain")
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)
        _step(model, optimizer)
        config = FSDP2Config().in_full_precision()
        if distribute:
            parallelize(model, config, optimizer=optimizer)
        before = full_state_dict(model, rank0_only=False)["head.weight"]
        _step(model, optimizer)
        results.append((before, full_state_dict(model, rank0_only=False)["head.weight"]))
    (_, expected), (before, found) = results
    return not torch.equal(before, found), (found - expected).abs().max().item()


def _step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    loss_of(model, global_batch(0)).backward()
    optimizer.step()


def test_without_a_process_group_the_model_stays_plain() -> None:
    module = build_model("plain")
    model, _ = parallelize(module, FSDP2Config(mp_policy=None, activation_checkpointing=True))
    assert model is module
    assert not any(isinstance(p, DTensor) for p in model.parameters())
    assert "_checkpoint_wrapped_module" in str(list(dict(model.named_modules())))


@pytest.mark.parametrize(
    ("options", "dtype", "warned"),
    [
        ({}, torch.float32, True),
        ({}, torch.bfloat16, True),
        ({"mp_policy": {"output_dtype": None}}, torch.bfloat16, False),
        ({"mp_policy": {"param_dtype": "fp32"}}, torch.float32, False),
        ({"mp_policy": None}, torch.float32, False),
    ],
    ids=str,
)
def test_without_a_process_group_a_lost_precision_is_warned_of(
    options: dict[str, Any], dtype: torch.dtype, warned: bool
) -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        parallelize(build_model("plain").to(dtype), FSDP2Config(**options))
    assert ["mp_policy has no effect" in str(warning.message) for warning in caught] == (
        [True] if warned else []
    )


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"offload_policy": {}}, UnsupportedError, "a plain process on the CPU"),
        ({"tp_plan": {"head": "colwise"}}, MeshError, "leave tp_plan out"),
        ({"sequence_parallel": True}, MeshError, "leave sequence_parallel out"),
        ({"unit_modules": "Blok"}, UnitError, "'Blok', which none of them has"),
    ],
    ids=str,
)
def test_without_a_process_group_what_needs_one_is_refused(
    options: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        parallelize(build_model("plain"), FSDP2Config(mp_policy=None, **options))


def test_an_optimizer_of_another_model_is_refused() -> None:
    optimizer = torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=0.1)
    with pytest.raises(OptimizerError, match="found 2 of 2 that are not"):
        parallelize(nn.Linear(2, 2), FSDP2Config(mp_policy=None), optimizer=optimizer)


@pytest.mark.world_size(2)
@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"offload_policy": {}}, UnsupportedError, "found one of CPUs"),
        ({"reshard_after_forward": 3}, ConfigError, "a divisor of the 2 ranks"),
        ({"activation_checkpointing": True, "unit_modules": "Embedding"}, None, ""),
        ({"unit_modules": ["Block", "Linear"]}, UnitError, "inside"),
    ],
    ids=str,
)
def test_what_an_option_cannot_do_is_refused(
    ranks: RankPool, options: dict[str, Any], error: type[Exception] | None, message: str
) -> None:
    for found in ranks.run(error_of, options):
        assert found == "" if error is None else found.startswith(error.__name__)
        assert message in found


def error_of(options: dict[str, Any]) -> str:
    try:
        parallelize(build_model("plain"), FSDP2Config(**options))
    except PolyshardError as error:
        return f"{type(error).__name__}: {error}"
    return ""


@pytest.mark.parametrize(
    "options",
    [{"forward_prefetch_depth": 1}, {"backward_prefetch_depth": 1}],
    ids=str,
)
def test_prefetching_needs_units(ranks: RankPool, options: dict[str, Any]) -> None:
    for message in ranks.run(prefetch_without_units, options):
        assert f"FSDP2Config.{next(iter(options))}: expected units to gather ahead" in message


def prefetch_without_units(options: dict[str, Any]) -> str:
    try:
        parallelize(nn.Linear(2, 2), FSDP2Config(**options))
    except UnitError as error:
        return str(error)
    return "no error"


@pytest.mark.world_size(2)
@pytest.mark.parametrize(
    ("option", "kept"),
    [
        (None, {"embedding", "head"}),
        (True, set()),
        (False, {"embedding", "head", "blocks"}),
    ],
)
def test_what_is_kept_between_forward_and_backward(
    ranks: RankPool, option: bool | None, kept: set[str]
) -> None:
    assert ranks.run(kept_after_forward, option) == [kept] * 2


def kept_after_forward(option: bool | None) -> set[str]:
    model, _ = parallelize(build_model("plain"), FSDP2Config(reshard_after_forward=option))
    model(global_batch(0))
    parameters = model.named_parameters()
    return {name.partition(".")[0] for name, p in parameters if not isinstance(p, DTensor)}


@pytest.mark.world_size(4)
def test_a_number_of_ranks_keeps_larger_shards(ranks: RankPool) -> None:
    assert ranks.run(rows_after_forward) == [(16, 32)] * 4


def rows_after_forward() -> tuple[int, int]:
    """Return how many of 64 rows a rank has before the forward, and between it and backward."""
    model = build_model("plain")
    parallelize(model, FSDP2Config(reshard_after_forward=2))
    rows = []
    for _ in range(2):
        weight = model.blocks[0].up.weight
        assert isinstance(weight, DTensor)
        rows.append(weight.to_local().shape[0])
        model(global_batch(0))
    return rows[0], rows[1]


@pytest.mark.world_size(2)
@pytest.mark.parametrize(
    ("option", "depth", "expected"),
    [
        ("forward", 1, {"": "0", "0": "1", "1": "2", "2": ""}),
        ("forward", 2, {"": "01", "0": "12", "1": "2", "2": ""}),
        ("forward", 9, {"": "012", "0": "12", "1": "2", "2": ""}),
        ("backward", 1, {"": "2", "2": "1", "1": "0", "0": ""}),
        ("backward", 2, {"": "21", "2": "10", "1": "0", "0": ""}),
    ],
)
def test_the_next_units_are_gathered_ahead(
    ranks: RankPool, option: str, depth: int, expected: dict[str, str]
) -> None:
    assert ranks.run(gathered_ahead, option, depth) == [expected] * 2


def gathered_ahead(option: str, depth: int) -> dict[str, str]:
    """Return which blocks are gathered ahead by the root ("") and by each block, in order."""
    options: dict[str, Any] = {f"{option}_prefetch_depth": depth}
    model, _ = parallelize(build_model("plain"), FSDP2Config(**options))
    numbers = {
        module._get_fsdp_state(): name.removeprefix("blocks.")
        for name, module in model.named_modules()
        if isinstance(module, FSDPModule)
    }
    return {
        number: "".join(numbers[s] for s in getattr(state, f"_states_to_{option}_prefetch"))
        for state, number in numbers.items()
    }
