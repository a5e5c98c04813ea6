"""Meshes that do not fit are refused by name; test_support.py trains on those that do."""

from __future__ import annotations

import logging
import re

import pytest
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from polyshard import parallelize
from polyshard.conformance.models import build_model
from polyshard.exceptions import PolyshardError
from polyshard.lifecycle.state_dict import parameter_bytes
from polyshard_megatron_fsdp import MegatronFSDPConfig
from polyshard_megatron_fsdp.megatron_fsdp import version

pytestmark = pytest.mark.world_size(4)

MLP = {"blocks.*.up": "colwise", "blocks.*.down": "rowwise"}

Dimensions = dict[str, int]


def mesh_of(dimensions: Dimensions, flattened: tuple[str, ...] = ()) -> DeviceMesh:
    mesh = init_device_mesh("cpu", tuple(dimensions.values()), mesh_dim_names=tuple(dimensions))
    if flattened:
        mesh[flattened]._flatten("_".join(flattened))
    return mesh


def bytes_on(dimensions: Dimensions, flattened: tuple[str, ...]) -> int:
    config = MegatronFSDPConfig()
    model, _ = parallelize(build_model("plain"), config, mesh=mesh_of(dimensions, flattened))
    return parameter_bytes(model)


def test_flattened_dimension_shards_over_all_its_ranks(ranks):
    flattened = ranks.run(bytes_on, {"dp": 2, "cp": 2, "tp": 1}, ("dp", "cp"))
    assert flattened == ranks.run(bytes_on, {"dp": 4}, ())


def warnings_of_tensor_parallelism_alone() -> list[str]:
    heard: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: heard.append(record.getMessage())
    version.warn_once.cache_clear()
    version.logger.addHandler(handler)
    config = MegatronFSDPConfig(tp_plan=MLP)
    parallelize(build_model("plain"), config, mesh=mesh_of({"dp": 1, "tp": 4}))
    version.logger.removeHandler(handler)
    return heard


def test_tensor_parallelism_alone_is_warned_of(ranks):
    for messages in ranks.run(warnings_of_tensor_parallelism_alone):
        assert any("one data-parallel rank" in message for message in messages)


def refusal(config: MegatronFSDPConfig, dimensions: Dimensions) -> str:
    model = build_model("plain")
    try:
        parallelize(model, config, mesh=mesh_of(dimensions))
    except PolyshardError as error:
        assert type(model.head.weight).__name__ == "Parameter", "expected the model left alone"
        return f"{type(error).__name__}: {error}"
    raise AssertionError("expected the mesh to be refused")


@pytest.mark.parametrize(
    ("options", "dimensions", "expected"),
    [
        ({}, {"x": 2, "tp": 2}, "MeshError: polyshard-megatron-fsdp .* found x, tp; name"),
        ({}, {"dp": 2, "pp": 2}, "UnsupportedError: .*pipeline parallelism .* pp=2"),
        ({}, {"dp": 2, "ep": 2}, "UnsupportedError: .*expert parallelism .* ep=2"),
        ({"tp_plan": MLP}, {"dp": 4}, "MeshError: MegatronFSDPConfig.tp_plan: .*'tp'"),
        ({}, {"dp": 2, "tp": 2}, "ConfigError: MegatronFSDPConfig.tp_plan: .*none of its own"),
        (
            {"tp_plan": {"nowhere": "colwise"}},
            {"dp": 2, "tp": 2},
            "ConfigError: MegatronFSDPConfig.tp_plan: .*'nowhere', which matches none of",
        ),
        (
            {"outer_dp_sharding_strategy": 1},
            {"dp": 4},
            "UnsupportedError: .*outer_dp_sharding_strategy=1 needs a mesh with .*dp_replicate",
        ),
    ],
)
def test_meshes_that_do_not_fit_are_refused(ranks, options, dimensions, expected):
    for message in ranks.run(refusal, MegatronFSDPConfig(**options), dimensions):
        assert re.search(expected, message), message
