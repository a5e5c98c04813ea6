"""megatron-fsdp is looked up, and a missing or old one is refused when the plugin is loaded."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

CODE = """
from polyshard import MeshAxisName, parallelize, resolve_config
from polyshard.exceptions import PluginLoadError
import polyshard_megatron_fsdp, torch

print(polyshard_megatron_fsdp.HAS_MEGATRON_FSDP)
model = torch.nn.Linear(2, 2)
actions = {
    "parallelize": lambda: parallelize(model, resolve_config("megatron_fsdp")),
    "shard": lambda: polyshard_megatron_fsdp.fully_shard_optimizer(
        model, torch.optim.SGD(model.parameters())
    ),
}
for name, action in actions.items():
    try:
        action()
    except ImportError as error:
        print(name, type(error).__name__, error)
"""


def run_with_version(folder: Path, version: str) -> str:
    """Run the code with the metadata of another version in front of the installed one's."""
    metadata = folder / f"megatron_fsdp-{version}.dist-info" / "METADATA"
    metadata.parent.mkdir()
    metadata.write_text(f"Metadata-Version: 2.1\nName: megatron-fsdp\nVersion: {version}\n")
    path = os.pathsep.join([str(folder), *filter(None, [os.environ.get("PYTHONPATH")])])
    result = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", CODE],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    return result.stdout


def test_old_version_is_refused_with_the_command_that_cures_it(tmp_path):
    found, parallelized, sharded = run_with_version(tmp_path, "0.4.9").splitlines()
    assert found == "True"
    for line in (parallelized, sharded):
        assert "PluginLoadError" in line
        assert "found 0.4.9" in line
        assert "pip install 'megatron-fsdp>=0.5.0'" in line


def test_oldest_version_is_accepted(tmp_path):
    assert run_with_version(tmp_path, "0.5.0").splitlines() == ["True"]


MISSING = """
from importlib import metadata

original = metadata.version
def version(name):
    if name == "megatron-fsdp":
        raise metadata.PackageNotFoundError(name)
    return original(name)
metadata.version = version

import polyshard_megatron_fsdp
print(polyshard_megatron_fsdp.HAS_MEGATRON_FSDP)
try:
    import polyshard_megatron_fsdp.plugin
except ImportError as error:
    print(error)
"""


def test_missing_distribution_is_not_reported_as_an_old_one():
    result = subprocess.run(
        [sys.executable, "-c", MISSING], capture_output=True, text=True, timeout=60, check=True
    )
    is_installed, message = result.stdout.splitlines()
    assert is_installed == "False"
    assert "needs megatron-fsdp >= 0.5.0, found none; run: pip install" in message


def test_unknown_names_are_attribute_errors():
    import polyshard_megatron_fsdp

    with pytest.raises(AttributeError, match="no attribute 'fully_shard'"):
        polyshard_megatron_fsdp.fully_shard  # noqa: B018
    for name in polyshard_megatron_fsdp.__all__:
        assert name in dir(polyshard_megatron_fsdp)
