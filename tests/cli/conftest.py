"""Running the command in a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

Polyshard = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture
def polyshard(tmp_path: Path) -> Polyshard:
    """Run ``polyshard`` with arguments beside a text, with more folders to import from if need be.

    What this process finds by ``PYTHONPATH``, the command finds as well.
    """
    inherited = list(filter(None, [os.environ.get("PYTHONPATH")]))
    (tmp_path / "text.txt").write_text("It was the best of times, it was the worst. " * 20)

    def run(*arguments: object, path: tuple[Path, ...] = ()) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-P", "-m", "polyshard.cli", *map(str, arguments)],
            cwd=tmp_path,
            env=os.environ | {"PYTHONPATH": os.pathsep.join([*map(str, path), *inherited])},
            capture_output=True,
            text=True,
            timeout=240,
        )

    return run
