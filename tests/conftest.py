"""Fixtures for all tests of the core."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from textwrap import dedent

import pytest

Install = Callable[..., Path]


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Install]:
    """Install a distribution as pip would: its modules and its metadata on the import path.

    ``install("acme", modules={"acme": "..."}, entry_points={"polyshard.strategies": {...}})``
    returns the folder to put on a subprocess's ``PYTHONPATH``.
    """
    installed: set[str] = set()

    def install_one(
        name: str,
        *,
        modules: Mapping[str, str],
        entry_points: Mapping[str, Mapping[str, str]],
        version: str = "1.0",
        requires: Sequence[str] = (),
    ) -> Path:
        site = tmp_path / "site" / name
        metadata = site / f"{name.replace('-', '_')}-{version}.dist-info"
        metadata.mkdir(parents=True)
        requirements = "".join(f"Requires-Dist: {r}\n" for r in requires)
        (metadata / "METADATA").write_text(
            f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n{requirements}"
        )
        sections = (
            f"[{group}]\n" + "".join(f"{key} = {value}\n" for key, value in points.items())
            for group, points in entry_points.items()
        )
        (metadata / "entry_points.txt").write_text("\n".join(sections))
        for module, source in modules.items():
            path = site / f"{module.replace('.', '/')}.py"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(dedent(source))
            installed.add(module)
        monkeypatch.syspath_prepend(str(site))
        importlib.invalidate_caches()
        return site

    yield install_one
    for module in installed:
        sys.modules.pop(module, None)
