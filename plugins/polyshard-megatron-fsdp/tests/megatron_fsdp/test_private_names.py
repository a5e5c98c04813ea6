"""Private names of torch and megatron-fsdp are there, take what they get, and are in one module."""

from __future__ import annotations

import ast
import inspect
import re
import sys
from importlib import import_module
from pathlib import Path

import pytest

import polyshard_megatron_fsdp
from polyshard.conformance.models import build_model, global_batch, loss_of
from polyshard_megatron_fsdp.megatron_fsdp import private_names, upstream
from polyshard_megatron_fsdp.megatron_fsdp.private_names import (
    ATTRIBUTES,
    FUNCTIONS,
    distributed_parameters,
    modules_with_torch,
    original_of,
    show_distributed,
)

sys.path.append(str(Path(__file__).parent))

from subjects import Bare

SOURCE = Path(polyshard_megatron_fsdp.__file__).parent
#: These change what is inside megatron-fsdp, of which they replace the private names.
PATCHES = SOURCE / "megatron_fsdp" / "patches"
MODULES = [
    path
    for path in SOURCE.rglob("*.py")
    if path != Path(private_names.__file__) and not path.is_relative_to(PATCHES)
]


@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda function: function.name)
def test_function_takes_what_it_is_called_with(function):
    module, _, cls = function.owner.partition(":")
    owner = getattr(import_module(module), cls) if cls else import_module(module)
    callee = inspect.getattr_static(owner, function.name)
    bound = isinstance(callee, staticmethod | classmethod) or not cls
    positional = [None] * (function.positional + (not bound))
    signature = inspect.signature(getattr(owner, function.name))
    signature.bind(*positional, **dict.fromkeys(function.keywords))


def test_modules_use_torch_by_its_name():
    assert upstream.MegatronFSDP.__module__ == "megatron_fsdp.megatron_fsdp"
    for module in modules_with_torch():
        assert module.torch.__name__ == "torch", module.__name__


def missing_attributes() -> list[str]:
    """Return the paths that a wrapped and trained model does not have."""
    model = Bare().wrap(build_model("plain"), 3)
    loss_of(model, global_batch(0)).backward()
    show_distributed(model)
    _, distributed = max(distributed_parameters(model), key=lambda named: named[1].numel())
    known = {"model": model, "distributed": distributed, "original": original_of(distributed)}
    missing = []
    for path in ATTRIBUTES:
        value, *_ = (known[name] for name in [path.partition(".")[0]])
        for name, index in re.findall(r"\.(\w+)(?:\[(\d+)\])?", path):
            if not hasattr(value, name):
                missing.append(path)
                break
            value = getattr(value, name)
            value = value[int(index)] if index else value
    return missing


def test_wrapped_model_has_the_attributes(bare_ranks):
    assert bare_ranks.run(missing_attributes) == [[], []]


@pytest.mark.parametrize("path", MODULES, ids=lambda path: path.stem)
def test_other_modules_use_no_private_name(path):
    tree = ast.parse(path.read_text())
    found = [
        f"line {node.lineno}: {ast.unparse(node)}"
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute)
        and node.attr.startswith("_")
        and not (node.attr.startswith("__") and node.attr.endswith("__"))
        and not (isinstance(node.value, ast.Name) and node.value.id in ("self", "cls"))
    ]
    imported = [
        f"line {node.lineno}: from {node.module} import {alias.name}"
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and not (node.module or "").startswith("polyshard")
        for alias in node.names
        if re.search(r"(^|\.)_(?!_)", f"{node.module}.{alias.name}")
    ]
    assert found + imported == []


def test_patches_replace_listed_names_only():
    listed = {function.name for function in FUNCTIONS} | {
        name for path in ATTRIBUTES for name in re.findall(r"\.(\w+)", path)
    }
    for path in PATCHES.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Attribute) and re.match(r"_(?!_)", node.attr):
                own = isinstance(node.value, ast.Name) and node.value.id == "self"
                assert own or node.attr in listed, f"{path.name}: {ast.unparse(node)}"
