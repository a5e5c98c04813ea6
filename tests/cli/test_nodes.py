"""``polyshard train`` on two machines, both played by this one."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

CONFIG = """\
distributed: ddp
model: {layers: 1, width: 8}
data: {path: text.txt, sequence_length: 16}
steps: 2
batch_size: 4
"""
TRAIN = ("-m", "polyshard.cli", "train", "run.yaml", "--device", "cpu")


@pytest.fixture
def nodes(tmp_path: Path) -> list[Path]:
    """Two folders with the same files, one for each machine."""
    folders = [tmp_path / "node0", tmp_path / "node1"]
    for folder in folders:
        folder.mkdir()
        (folder / "text.txt").write_text("It was the best of times. " * 40)
        (folder / "run.yaml").write_text(CONFIG)
    return folders


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port: int = server.getsockname()[1]
        return port


def run_all(
    folders: Sequence[Path],
    commands: Sequence[Sequence[str]],
    environments: Sequence[Mapping[str, str]],
) -> list[tuple[int, str, str]]:
    """Run one command in each folder, at once, and return status, output and errors of each."""
    processes = [
        subprocess.Popen(
            [sys.executable, *command],
            cwd=folder,
            env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for folder, command, environment in zip(folders, commands, environments, strict=True)
    ]
    try:
        told = [process.communicate(timeout=120) for process in processes]
    finally:
        for process in processes:
            process.kill()
    return [(p.returncode, *texts) for p, texts in zip(processes, told, strict=True)]


def run_agents(nodes: Sequence[Path]) -> list[tuple[int, str, str]]:
    """Run a torchrun agent on each machine, with one process each."""
    place = ["--master-addr", "127.0.0.1", "--master-port", str(free_port())]
    torchrun = ["-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", "1", *place]
    commands = [[*torchrun, "--node-rank", str(rank), *TRAIN] for rank in range(2)]
    return run_all(nodes, commands, [{}, {}])


def test_torchrun_on_two_machines(nodes: list[Path]) -> None:
    (status, first, errors), (other_status, second, other_errors) = run_agents(nodes)
    assert status == other_status == 0, errors + other_errors
    assert "final loss" in first
    assert "final loss" not in second


def test_machines_with_different_files_fail_together(nodes: list[Path]) -> None:
    (nodes[1] / "run.yaml").write_text(CONFIG.replace("steps: 2", "steps: 3"))
    for status, output, errors in run_agents(nodes):
        assert status != 0
        assert "expected the same on every rank, found config" in errors
        assert """'"steps": 2,' on rank 0""" in errors
        assert "final loss" not in output


def test_a_slurm_step_on_two_machines(nodes: list[Path]) -> None:
    step = {
        "SLURM_JOB_ID": "70017",
        "SLURM_STEP_ID": "0",
        "SLURM_STEP_NUM_TASKS": "2",
        "SLURM_STEP_TASKS_PER_NODE": "1(x2)",
        "SLURM_STEP_NODELIST": "localhost",
        "SLURM_LOCALID": "0",
        "MASTER_PORT": str(free_port()),
    }
    tasks = [{**step, "SLURM_PROCID": rank, "SLURM_NODEID": rank} for rank in ("0", "1")]
    (status, first, errors), (other_status, second, other_errors) = run_all(
        nodes, [TRAIN, TRAIN], tasks
    )
    assert status == other_status == 0, errors + other_errors
    assert "final loss" in first
    assert second == ""
