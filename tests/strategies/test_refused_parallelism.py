"""Pipeline and expert parallelism are refused by name, wherever a script can ask for them."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from torch.distributed.device_mesh import init_device_mesh

from polyshard import DistributedSetup, parallelize, resolve_config
from polyshard.cli import main
from polyshard.conformance import RankPool
from polyshard.conformance.models import build_model
from polyshard.exceptions import MeshError, PolyshardError

each_strategy = pytest.mark.parametrize(
    "strategy",
    [
        pytest.param(name, marks=pytest.mark.strategy(name))
        for name in ("ddp", "fsdp2", "megatron_fsdp")
    ],
)
either_size = pytest.mark.parametrize("size", ["pp_size", "ep_size"])


@each_strategy
@either_size
def test_a_setup_refuses_them(strategy: str, size: str) -> None:
    with pytest.raises(MeshError, match=rf"strategy '{strategy}' \(polyshard.* found {size}=2"):
        DistributedSetup.build(strategy, {size: 2})


@each_strategy
@either_size
@pytest.mark.parametrize("place", ["distributed", "parallelism"])
@pytest.mark.parametrize("written", ["in the file", "as an override"])
def test_the_command_refuses_them_where_they_stand(
    strategy: str,
    size: str,
    place: str,
    written: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    path = tmp_path / "run.yaml"
    text, override = f"distributed:\n  strategy: {strategy}\n", f"{place}.{size}=2"
    if written == "in the file":
        text += ("" if place == "distributed" else "parallelism:\n") + f"  {size}: 2\n"
    path.write_text(text)
    with pytest.raises(SystemExit) as end:
        main(["train", str(path), *([override] if written == "as an override" else [])])
    told = capsys.readouterr()
    assert end.value.code == 2
    where = r"run\.yaml:\d: " if written == "in the file" else "command line: "
    assert re.search(rf"{where}{place}\.{size}: strategy '{strategy}' .* found {size}=2", told.err)
    assert told.out == "", "expected nothing to start"


def refusals(strategy: str) -> list[str]:
    """Give ``parallelize`` meshes with such a dimension, and return what it says of each."""
    messages = []
    for axis in ("pp", "ep", "ep_shard"):
        for shape, names in (((2,), (axis,)), ((1, 2), ("dp", axis)), ((2, 1), (axis, "dp"))):
            mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
            messages.append(f"{axis}: {refusal(strategy, mesh)}")
    return messages


def refusal(strategy: str, mesh: object) -> str:
    model = build_model("plain")
    before = list(model.parameters())
    try:
        parallelize(model, resolve_config(strategy), mesh=mesh)  # type: ignore[arg-type]
    except PolyshardError as error:
        kept = all(p is q for p, q in zip(model.parameters(), before, strict=True))
        return str(error) if kept else "refused too late"
    return "accepted"


@each_strategy
@pytest.mark.world_size(2)
def test_a_mesh_of_ones_own_is_refused(ranks: RankPool, strategy: str) -> None:
    for messages in ranks.run(refusals, strategy):
        assert len(messages) == 9
        for message in messages:
            axis, _, said = message.partition(": ")
            assert f"strategy '{strategy}'" in said
            assert re.search(rf"\b{axis}('?: |=)2", said), message
            assert "use strategy" not in said, "no other one supports it"


def train_with_one_rank_in_them(strategy: str) -> bool:
    mesh = init_device_mesh("cpu", (1, 2, 1), mesh_dim_names=("pp", "dp", "ep"))
    model, _ = parallelize(build_model("plain"), resolve_config(strategy), mesh=mesh)
    return model is not None


@each_strategy
@pytest.mark.world_size(2)
def test_dimensions_of_one_rank_are_no_parallelism(ranks: RankPool, strategy: str) -> None:
    assert all(ranks.run(train_with_one_rank_in_them, strategy))
