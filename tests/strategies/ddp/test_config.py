"""DDPConfig takes what it can do, and says what it cannot."""

from typing import Any

import pytest
import torch

from polyshard import DDPConfig
from polyshard.exceptions import ConfigError

pytestmark = pytest.mark.strategy("ddp")


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("activation_checkpointing", "some"),
        ("activation_checkpointing", 1),
        ("broadcast_buffers", "false"),
        ("find_unused_parameters", None),
        ("static_graph", 1),
        ("bucket_cap_mb", 0),
        ("bucket_cap_mb", "25"),
        ("gradient_as_bucket_view", "yes"),
        ("autocast_dtype", "float32"),
        ("autocast_dtype", "bf17"),
    ],
)
def test_a_wrong_value_is_refused_with_its_field(field: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=rf"DDPConfig\.{field} "):
        DDPConfig(**{field: value})


@pytest.mark.parametrize("dtype", ["bf16", "bfloat16", "torch.bfloat16", torch.bfloat16])
def test_a_dtype_has_many_spellings(dtype: Any) -> None:
    assert DDPConfig(autocast_dtype=dtype).autocast_dtype == "bfloat16"


def test_a_config_survives_a_file() -> None:
    config = DDPConfig(
        activation_checkpointing="selective", bucket_cap_mb=1.5, autocast_dtype="fp16"
    )
    assert DDPConfig.from_dict(config.to_dict()) == config


def test_full_precision_is_without_autocast() -> None:
    config = DDPConfig(autocast_dtype="bf16", static_graph=True)
    assert config.in_full_precision() == DDPConfig(static_graph=True)
