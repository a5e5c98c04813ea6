"""FSDP2Config takes what it can do, from Python, a file or torch's own classes."""

from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy
from torch.distributed.tensor.parallel import ColwiseParallel

from polyshard import FSDP2Config, MixedPrecision, resolve_config
from polyshard.exceptions import ConfigError
from polyshard.strategies.fsdp2.config import CPUOffload

pytestmark = pytest.mark.strategy("fsdp2")


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("unit_modules", []),
        ("unit_modules", [3]),
        ("sync_initial_weights", "true"),
        ("tp_plan", {}),
        ("tp_plan", "colwise"),
        ("tp_plan", {"head": "columns"}),
        ("tp_plan", {"head": ColwiseParallel}),
        ("tp_plan", {"norm": "sequence_parallel"}),
        ("sequence_parallel", 1),
        ("mp_policy", "bf16"),
        ("offload_policy", True),
        ("autocast_dtype", "float64"),
        ("activation_checkpointing", "half"),
        ("reshard_after_forward", 1),
        ("reshard_after_forward", 0),
        ("reshard_after_forward", 2.0),
        ("defer_fsdp_grad_sync", None),
        ("forward_prefetch_depth", 0),
        ("backward_prefetch_depth", True),
        ("enable_compile", "no"),
    ],
)
def test_a_wrong_value_is_refused_with_its_field(field: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=rf"FSDP2Config\.{field}\b"):
        FSDP2Config(**{field: value})


def test_computes_in_bf16_and_reduces_in_fp32_by_default() -> None:
    policy = FSDP2Config().mp_policy
    assert policy is not None
    assert (policy.param_dtype, policy.reduce_dtype) == ("bfloat16", "float32")


@pytest.mark.parametrize(
    "policy",
    [
        MixedPrecision(param_dtype="fp16", output_dtype=None),
        {"param_dtype": "float16", "output_dtype": None},
        MixedPrecisionPolicy(param_dtype=torch.float16, reduce_dtype=torch.float32),
    ],
    ids=["ours", "mapping", "torch"],
)
def test_a_precision_policy_comes_in_three_forms(policy: Any) -> None:
    expected = MixedPrecision(param_dtype="float16", reduce_dtype="float32", output_dtype=None)
    assert FSDP2Config(mp_policy=policy).mp_policy == expected
    assert resolve_config("fsdp2", mp_policy=policy) == FSDP2Config(mp_policy=expected)


@pytest.mark.parametrize(
    ("policy", "expected"),
    [
        ({}, CPUOffload()),
        ({"pin_memory": False}, CPUOffload(pin_memory=False)),
        (CPUOffloadPolicy(pin_memory=False), CPUOffload(pin_memory=False)),
        (OffloadPolicy(), None),
        (None, None),
    ],
)
def test_an_offload_policy_comes_in_three_forms(policy: Any, expected: CPUOffload | None) -> None:
    assert FSDP2Config(offload_policy=policy).offload_policy == expected


@pytest.mark.parametrize(
    ("options", "path"),
    [
        ({"mp_policy": {"param_dtyp": "bf16"}}, r"mp_policy\.param_dtyp: .*did you mean"),
        ({"mp_policy": {"param_dtype": "bf17"}}, r"mp_policy\.param_dtype: "),
        ({"offload_policy": {"pin": True}}, r"offload_policy\.pin: "),
    ],
)
def test_a_fault_inside_a_policy_is_found_by_its_path(options: dict[str, Any], path: str) -> None:
    with pytest.raises(ConfigError, match=path):
        FSDP2Config.from_dict(options)


@pytest.mark.parametrize(
    ("units", "expected"),
    [
        ("Block", ("Block",)),
        (nn.Linear, (nn.Linear,)),
        (["Block", "Head"], ("Block", "Head")),
    ],
)
def test_units_are_one_class_or_several(units: Any, expected: tuple[Any, ...]) -> None:
    assert FSDP2Config(unit_modules=units).unit_modules == expected


def test_a_config_survives_a_file() -> None:
    config = FSDP2Config(
        unit_modules=["Block"],
        tp_plan={"norm": "sequence_parallel", "head": "colwise"},
        sequence_parallel=True,
        mp_policy={"param_dtype": "fp16"},
        offload_policy={},
        reshard_after_forward=4,
    )
    assert FSDP2Config.from_dict(config.to_dict()) == config


def test_what_a_file_cannot_hold_is_refused_with_its_field() -> None:
    with pytest.raises(ConfigError, match=r"unit_modules\.0: a file cannot hold"):
        FSDP2Config(unit_modules=nn.Linear).to_dict()
    with pytest.raises(ConfigError, match=r"tp_plan\.head: a file cannot hold"):
        FSDP2Config(tp_plan={"head": ColwiseParallel()}).to_dict()


def test_full_precision_lowers_nothing() -> None:
    config = FSDP2Config(autocast_dtype="bf16", defer_fsdp_grad_sync=False)
    expected = FSDP2Config(mp_policy=None, defer_fsdp_grad_sync=False)
    assert config.in_full_precision() == expected
