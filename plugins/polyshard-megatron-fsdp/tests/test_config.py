"""The config: its fields, what they refuse, and its way to a file and back."""

from __future__ import annotations

import subprocess
import sys
from inspect import cleandoc

import attrs
import pytest

from polyshard import resolve_config
from polyshard.exceptions import ConfigError
from polyshard_megatron_fsdp import MegatronFSDPConfig

DEFAULTS = {
    "megatron_fsdp_unit_modules": None,
    "zero_dp_strategy": 3,
    "init_fsdp_with_meta_device": False,
    "grad_reduce_in_fp32": False,
    "preserve_fp32_weights": False,
    "overlap_grad_reduce": True,
    "overlap_param_gather": True,
    "check_for_nan_in_grad": True,
    "report_nan_in_param_grad": False,
    "average_in_collective": False,
    "disable_bucketing": False,
    "calculate_per_token_loss": False,
    "keep_fp8_transpose_cache": False,
    "nccl_ub": False,
    "fsdp_double_buffer": False,
    "activation_checkpointing": False,
}


def test_documented_fields_have_their_defaults():
    config = MegatronFSDPConfig()
    assert {name: getattr(config, name) for name in DEFAULTS} == DEFAULTS


@pytest.mark.parametrize("name", [name for name, value in DEFAULTS.items() if type(value) is bool])
@pytest.mark.parametrize("value", ["false", 1, None])
def test_switches_are_bools(name, value):
    with pytest.raises(ConfigError, match=rf"MegatronFSDPConfig.{name} .*true or false, found"):
        MegatronFSDPConfig(**{name: value})


@pytest.mark.parametrize("value", ["2", True, 4, -1, 2.0])
def test_stage_is_one_of_four(value):
    with pytest.raises(ConfigError, match=r"zero_dp_strategy .*one of 0, 1, 2, 3"):
        MegatronFSDPConfig(zero_dp_strategy=value)


@pytest.mark.parametrize("value", [[], "", 3, [3], ["Block", ""]])
def test_units_are_classes_or_names(value):
    with pytest.raises(ConfigError, match=r"megatron_fsdp_unit_modules .*a module class"):
        MegatronFSDPConfig(megatron_fsdp_unit_modules=value)


def test_stage_0_cannot_start_on_the_meta_device():
    with pytest.raises(ConfigError, match="zero_dp_strategy 1, 2 or 3, found 0"):
        MegatronFSDPConfig(zero_dp_strategy=0, init_fsdp_with_meta_device=True)


def test_sharded_replicas_need_stage_3():
    with pytest.raises(ConfigError, match="outer_dp_sharding_strategy=1 needs zero_dp_strategy=3"):
        MegatronFSDPConfig(zero_dp_strategy=2, outer_dp_sharding_strategy=1)


@pytest.mark.parametrize("plan", [{}, [], {"up": "diagonal"}, {3: "colwise"}])
def test_tensor_parallel_plan_names_modules_and_styles(plan):
    with pytest.raises(ConfigError, match=r"MegatronFSDPConfig\.tp_plan"):
        MegatronFSDPConfig(tp_plan=plan)


@pytest.mark.parametrize(
    "config",
    [
        MegatronFSDPConfig(),
        MegatronFSDPConfig(megatron_fsdp_unit_modules=["Block"], zero_dp_strategy=1),
        MegatronFSDPConfig(tp_plan={"blocks.*.up": "colwise"}, preserve_fp32_weights=True),
    ],
)
def test_config_comes_back_from_plain_values(config):
    assert MegatronFSDPConfig.from_dict(config.to_dict()) == config


def test_class_of_units_cannot_go_to_a_file():
    config = MegatronFSDPConfig(megatron_fsdp_unit_modules=MegatronFSDPConfig)
    with pytest.raises(ConfigError, match="megatron_fsdp_unit_modules"):
        config.to_dict()


@pytest.mark.parametrize("name", ["megatron_fsdp", "Megatron-FSDP", "mfsdp"])
def test_strategy_is_found_by_its_names(name):
    assert resolve_config(name, zero_dp_strategy=1) == MegatronFSDPConfig(zero_dp_strategy=1)


def test_every_field_is_described():
    text = cleandoc(MegatronFSDPConfig.__doc__ or "")  # Python 3.13 has removed the indentation
    names = [a.name for a in attrs.fields(MegatronFSDPConfig)]
    assert [name for name in names if f"\n    {name}: " not in text] == []


def test_config_and_listing_load_neither_torch_nor_megatron_fsdp():
    code = (
        "import sys, polyshard, polyshard_megatron_fsdp as p;"
        "p.MegatronFSDPConfig(zero_dp_strategy=2); p.MegatronFSDPManager; p.fully_shard_optimizer;"
        "p.HAS_MEGATRON_FSDP; p.logger; polyshard.available_strategies();"
        "print(sorted({'torch', 'megatron_fsdp'} & set(sys.modules)))"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    assert result.stdout.strip() == "[]"


def test_full_precision_keeps_the_config():
    config = MegatronFSDPConfig(preserve_fp32_weights=True)
    assert config.in_full_precision() == config
