"""``polyshard strategies`` tells what is installed without importing it."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from textwrap import dedent

import pytest

Polyshard = Callable[..., "subprocess.CompletedProcess[str]"]
Install = Callable[..., Path]


@pytest.fixture
def broken(install: Install) -> Path:
    """Install a strategy that looks well but needs a module that is not there."""
    return install(
        "acme",
        modules={
            "acme_plugin": '"""Shards at Acme."""\nimport acme_kernels\n',
            "acme_config": """
                from typing import ClassVar

                from attrs import frozen

                from polyshard import DistributedConfig


                @frozen(kw_only=True)
                class AcmeConfig(DistributedConfig):
                    strategy: ClassVar[str] = "acme"
            """,
        },
        entry_points={
            "polyshard.strategies": {"acme": "acme_plugin"},
            "polyshard.configs": {"acme": "acme_config:AcmeConfig"},
            "polyshard.aliases": {"rocket": "acme"},
        },
    )


def test_the_table_names_every_strategy(polyshard: Polyshard) -> None:
    done = polyshard("strategies")
    assert done.returncode == 0, done.stderr
    for part in ("ddp", "fsdp2", "FSDP2Config", "distributed_data_parallel", "polyshard "):
        assert part in done.stdout


def test_json_says_everything(polyshard: Polyshard, broken: Path) -> None:
    done = polyshard("strategies", "--json", path=(broken,))
    found = {entry["name"]: entry for entry in json.loads(done.stdout)}
    assert found["acme"] == {
        "name": "acme",
        "config_class": "acme_config:AcmeConfig",
        "distribution": "acme",
        "version": "1.0",
        "aliases": ["rocket"],
        "description": "Shards at Acme.",
        "problem": None,
    }


def test_check_finds_what_only_an_import_can_and_fails(polyshard: Polyshard, broken: Path) -> None:
    done = polyshard("strategies", "--json", "--check", path=(broken,))
    problems = {entry["name"]: entry["problem"] for entry in json.loads(done.stdout)}
    assert done.returncode == 1
    assert "acme_kernels" in problems["acme"]
    assert problems["ddp"] is None
    assert problems["fsdp2"] is None


def test_what_is_broken_stands_in_the_table_with_its_cause(
    polyshard: Polyshard, install: Install
) -> None:
    site = install(
        "acme",
        modules={"acme_plugin": "def (\n"},
        entry_points={"polyshard.strategies": {"acme": "acme_plugin"}},
    )
    done = polyshard("strategies", path=(site,))
    assert done.returncode == 0, done.stderr
    assert "broken: acme_plugin cannot be read: SyntaxError" in " ".join(done.stdout.split())


def test_it_imports_neither_torch_nor_a_strategy(broken: Path) -> None:
    script = """
        import sys
        from polyshard.cli import main
        try:
            main(["strategies"])
        except SystemExit as end:
            assert end.code == 0
        heavy = ("torch", "matplotlib", "acme_", "polyshard.strategies.", "polyshard_")
        print(sorted(name for name in sys.modules if name.startswith(heavy)), file=sys.stderr)
    """
    done = subprocess.run(
        [sys.executable, "-c", dedent(script)],
        env={"PYTHONPATH": str(broken)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert "acme" in done.stdout
    assert done.stderr == "[]\n"
