"""The folders are what docs/explanation/architecture.md says, and imports go one way."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
SOURCES = [ROOT / "src", ROOT / "plugins" / "polyshard-megatron-fsdp" / "src"]
MODULES = sorted(file for source in SOURCES for file in source.rglob("*.py"))
FOLDERS = sorted({file.parent for file in MODULES})


def name(path: Path) -> str:
    return str(path.relative_to(ROOT))


def test_imports_go_one_way() -> None:
    """The contracts are in pyproject.toml; the plugin need not be installed to read its imports."""
    program = "from importlinter.cli import lint_imports_command; lint_imports_command()"
    found = subprocess.run(
        [sys.executable, "-c", program, "--no-cache"],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(map(str, SOURCES))},
        capture_output=True,
        text=True,
        check=False,
    )
    assert found.returncode == 0, found.stdout + found.stderr
    assert "0 broken" in found.stdout


def test_modules_are_short() -> None:
    long = {name(file): n for file in MODULES if (n := len(file.read_text().splitlines())) > 400}
    assert not long


def test_folders_are_small() -> None:
    sizes = {name(folder): len([*folder.glob("*.py")]) - 1 for folder in FOLDERS}
    assert not {folder: size for folder, size in sizes.items() if size > 12}
