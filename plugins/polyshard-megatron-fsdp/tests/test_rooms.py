"""Imports between the rooms of the plugin go one way."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import polyshard_megatron_fsdp

SOURCE = Path(polyshard_megatron_fsdp.__file__).parent
NAME = "polyshard_megatron_fsdp"

#: Each may import those before it. ``version`` is apart, since configs need it and load no torch.
ORDER = [
    "megatron_fsdp.version",
    "config",
    "megatron_fsdp",
    "model",
    "state",
    "optimizer",
    "parallelize",
    "compat",
    "manager",
    "plugin",
    "",
]


def floor_of(module: str) -> int:
    """Return the place in the order of a module, by its name inside the package."""
    return next(
        index for index, room in enumerate(ORDER) if not room or f"{module}.".startswith(f"{room}.")
    )


MODULES = {
    str(path.relative_to(SOURCE).with_suffix("")).replace("/", ".").removesuffix("__init__"): path
    for path in SOURCE.rglob("*.py")
}


def imports_of(path: Path) -> set[str]:
    """Return the modules of the package that a module imports, in functions too."""
    return {
        node.module.removeprefix(NAME).lstrip(".")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == NAME
    }


@pytest.mark.parametrize("module", MODULES)
def test_imports_go_one_way(module):
    own = floor_of(module)
    up = {name for name in imports_of(MODULES[module]) if floor_of(name) > own}
    assert not up, f"{module} imports {', '.join(sorted(up))}"


def test_every_room_is_in_the_order():
    rooms = {module.split(".")[0] for module in MODULES}
    assert rooms == {room.split(".")[0] for room in ORDER}
