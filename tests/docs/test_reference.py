"""The reference pages say what the code says."""

import inspect
import re
import runpy
from pathlib import Path

import pytest

from polyshard.registry.registry import HOOK_NAMES, hookspecs

REFERENCE = Path(__file__).parents[2] / "docs" / "reference"


def test_the_page_on_hooks_has_each_with_its_arguments() -> None:
    page = (REFERENCE / "hooks.md").read_text()
    rows = dict(re.findall(r"^\| `(\w+)` \| `([\w, ]+)` \|", page, re.MULTILINE))
    specs = {
        name: ", ".join(inspect.signature(getattr(hookspecs, name)).parameters)
        for name in HOOK_NAMES
    }
    assert rows == specs
    assert f"version {hookspecs.API_VERSION}." in page


@pytest.mark.strategy("megatron_fsdp")
def test_the_generated_pages_are_what_the_code_says() -> None:
    generate = runpy.run_path(str(REFERENCE.parent / "generate.py"))
    for name, page in generate["PAGES"].items():
        found = (REFERENCE / name).read_text(encoding="utf-8")
        assert found == page(), f"{name}: run: python docs/generate.py"
