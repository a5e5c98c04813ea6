"""DistributedSetup carries strategy and mesh, and its methods are the lifecycle functions."""

import os
import subprocess
import sys
from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest
import torch
from torch import nn

import polyshard
from polyshard import (
    DDPConfig,
    DistributedSetup,
    FSDP2Config,
    ParallelismSizes,
)
from polyshard.conformance import RankPool
from polyshard.exceptions import ConfigError, MeshError, StrategyNotFoundError


@pytest.mark.parametrize("strategy", ["ddp", "DDP", {"strategy": "ddp"}, DDPConfig()])
def test_a_strategy_is_named_in_any_way(strategy: Any) -> None:
    setup = DistributedSetup.build(strategy, {"dp_size": 1})
    assert setup.config == DDPConfig()
    assert setup.world_size == 1
    assert setup.device == torch.device("cpu")


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (("nosuch",), StrategyNotFoundError),
        ((3,), ConfigError),
        (("ddp", {"tp_sise": 2}), ConfigError),
        (("ddp", ParallelismSizes(tp_size=2)), MeshError),
        (("ddp", {"dp_size": 2}), MeshError),
        (("ddp", None, "some"), ConfigError),
        (("ddp", None, False, 2), MeshError),
        (("ddp", None, False, True), ConfigError),
        (("ddp", None, False, None, 0), ConfigError),
        (("ddp", None, False, None, "5"), ConfigError),
        (("ddp", None, False, None, float("inf")), ConfigError),
        (("ddp", None, False, None, 1e300), ConfigError),
        (("ddp", None, False, None, None, [1]), MeshError),
        (("ddp", None, False, None, None, None, "gpu"), ConfigError),
        (("ddp", None, False, None, None, None, "cuda"), ConfigError),
    ],
)
def test_a_mistake_is_found_before_anything_starts(arguments: Any, error: type[Exception]) -> None:
    with pytest.raises(error):
        DistributedSetup.build(*arguments)


@pytest.mark.parametrize(
    ("strategy", "size", "supported"),
    [
        ("ddp", "tp_size", "dp_size"),
        ("ddp", "dp_replicate_size", "dp_size"),
        ("ddp", "pp_size", "dp_size"),
        ("ddp", "ep_size", "dp_size"),
        ("fsdp2", "pp_size", "dp_size, dp_replicate_size, tp_size, cp_size"),
        ("fsdp2", "ep_size", "dp_size, dp_replicate_size, tp_size, cp_size"),
    ],
)
def test_a_size_that_the_strategy_does_not_support_is_refused(
    strategy: str, size: str, supported: str
) -> None:
    with pytest.raises(MeshError) as caught:
        DistributedSetup.build(strategy, {size: 2})
    message = str(caught.value)
    for part in (
        f"strategy '{strategy}' (polyshard {polyshard.__version__})",
        f"found {size}=2",
        f"but {supported},",
    ):
        assert part in message


def test_mistakes_are_found_without_torch() -> None:
    script = """
        import sys
        from polyshard import DistributedSetup, PolyshardError

        for arguments in (("ddp", {"tp_size": 2}), ("fsdp2", {"dp_size": 3})):
            try:
                DistributedSetup.build(*arguments)
            except PolyshardError as error:
                print(error)
        assert "torch" not in sys.modules
    """
    environment = os.environ | TORCHRUN
    command = [sys.executable, "-c", dedent(script)]
    ran = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert ran.returncode == 0, ran.stderr
    assert "found tp_size=2" in ran.stdout
    assert "multiply to the 4 ranks of the job" in ran.stdout


#: What torchrun sets; nobody listens at that address, so that whoever joins fails.
TORCHRUN = {
    "RANK": "0",
    "LOCAL_RANK": "0",
    "WORLD_SIZE": "4",
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "1",
}


@pytest.mark.parametrize("wanted", [True, "full", "selective"])
def test_activation_checkpointing_becomes_a_field_of_the_config(wanted: Any) -> None:
    setup = DistributedSetup.build("fsdp2", activation_checkpointing=wanted)
    assert setup.config == FSDP2Config(activation_checkpointing=wanted)


def test_activation_checkpointing_in_the_config_stays_and_is_not_contradicted() -> None:
    config = DDPConfig(activation_checkpointing="selective")
    assert DistributedSetup.build(config).config is config
    assert DistributedSetup.build(config, activation_checkpointing="selective").config is config
    with pytest.raises(ConfigError, match=r"set once, found 'selective' .* and True beside it"):
        DistributedSetup.build(config, activation_checkpointing=True)


def test_a_process_that_torchrun_started_joins_its_group(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(dedent(JOINING))
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    ran = subprocess.run(
        [sys.executable, *launcher, str(script)],
        capture_output=True,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    assert ran.returncode == 0, ran.stderr


JOINING = """
    import os
    from datetime import timedelta

    import torch.distributed as dist
    from polyshard import DistributedSetup
    from polyshard.mesh.process_groups import group_timeout

    setup = DistributedSetup.build("ddp", world_size=2, timeout_minutes=3, device="cpu")
    assert setup.device.type == "cpu"
    assert setup.world_size == dist.get_world_size() == 2
    assert group_timeout(dist.group.WORLD) == timedelta(minutes=3)
    dist.barrier()
    os._exit(0)
"""


def test_without_a_gpu_the_default_is_the_cpu_over_gloo() -> None:
    script = """
        import os
        import torch.distributed as dist
        from polyshard import DistributedSetup

        setup = DistributedSetup.build("ddp")
        print(setup.device, setup.mesh_context.mesh.device_type, dist.get_backend(), flush=True)
        os._exit(0)
    """
    alone = TORCHRUN | {"WORLD_SIZE": "1", "MASTER_PORT": "0"}
    ran = subprocess.run(
        [sys.executable, "-c", dedent(script)],
        capture_output=True,
        text=True,
        env=os.environ | alone | {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"},
    )
    assert ran.stdout == "cpu cpu gloo\n", ran.stderr


def train_on_some_ranks() -> tuple[int, bool]:
    setup = DistributedSetup.build("ddp", world_size=2, ranks=[1, 3])
    model = nn.Linear(2, 1)
    if torch.distributed.get_rank() not in (1, 3):
        with pytest.raises(MeshError, match=r"one of the ranks \[1, 3\] .* found rank [02]"):
            setup.parallelize(model)
        return setup.world_size, False
    model, _ = setup.parallelize(model)
    model(torch.full((1, 2), float(torch.distributed.get_rank()))).sum().backward()
    (gradient, _) = (parameter.grad for parameter in model.parameters())
    return setup.world_size, torch.equal(gradient, torch.full_like(gradient, 2.0))


@pytest.mark.world_size(4)
def test_some_of_the_ranks_train_together(ranks: RankPool) -> None:
    assert ranks.run(train_on_some_ranks) == [(2, False), (2, True)] * 2


def train_one_step() -> tuple[int, list[float]]:
    setup = DistributedSetup.build("ddp")
    torch.manual_seed(0)
    model, optimizer = setup.parallelize(nn.Linear(2, 1))
    assert optimizer is None
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    assert setup.shard_optimizer(model, sgd) is sgd
    with setup.rebuild(model):
        pass
    rank = torch.distributed.get_rank()
    for last in (False, True):
        with setup.accumulate(model, last=last):
            (model(torch.full((1, 2), float(rank))).sum() / 2).backward()
    assert setup.clip_grad_norm(model, 1e3) > 0
    sgd.step()
    weights = setup.full_state_dict(model, rank0_only=False)
    return setup.world_size, [p.sum().item() for p in weights.values()]


def test_its_methods_train(ranks: RankPool, world_size: int) -> None:
    answers = ranks.run(train_one_step)
    torch.manual_seed(0)
    plain = nn.Linear(2, 1)
    # The mean of the inputs 0 and 1 is what the ranks saw together; with one rank it is 0.
    plain(torch.full((1, 2), (world_size - 1) / 2)).sum().backward()
    torch.optim.SGD(plain.parameters(), lr=0.1).step()
    expected = [p.sum().item() for p in plain.parameters()]
    for size, found in answers:
        assert size == world_size
        assert found == pytest.approx(expected, rel=1e-6)


def choose_devices() -> tuple[str, str]:
    on_cpu = DistributedSetup.build("ddp", device="cpu")
    with pytest.raises(ConfigError) as refused:
        DistributedSetup.build("ddp", device="cuda")
    return on_cpu.device.type, str(refused.value)


@pytest.mark.world_size(2)
@pytest.mark.skipif(torch.cuda.device_count() >= 2, reason="the ranks have a device each")
def test_the_device_is_one_that_the_group_serves(ranks: RankPool) -> None:
    for chosen, message in ranks.run(choose_devices):
        assert chosen == "cpu"
        assert "expected a process group for 'cuda', found one for cpu; start" in message
