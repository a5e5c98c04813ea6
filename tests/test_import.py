"""Importing the package, naming a config and listing strategies load neither torch nor plugins."""

import subprocess
import sys

import pytest

import polyshard


def modules_after(statement: str) -> set[str]:
    code = f"import sys\n{statement}\nprint(*sys.modules)"
    output = subprocess.run(
        [sys.executable, "-c", code], check=True, capture_output=True, text=True, timeout=60
    )
    return set(output.stdout.split())


@pytest.mark.parametrize(
    "statement",
    [
        "import polyshard",
        "import polyshard; polyshard.available_strategies()",
        "import polyshard; polyshard.DDPConfig(); polyshard.FSDP2Config()",
        "import polyshard; polyshard.resolve_config('FSDP', reshard_after_forward=False)",
        "import polyshard; polyshard.ParallelismSizes(tp_size=2).resolve(4)",
    ],
)
def test_torch_is_not_imported(statement: str) -> None:
    modules = modules_after(statement)
    assert "polyshard" in modules
    assert "torch" not in modules
    assert not {name for name in modules if name.endswith(".plugin")}


def test_importing_the_package_imports_none_of_its_dependencies() -> None:
    assert not modules_after("import polyshard") & {"attrs", "cattrs", "click", "pluggy", "rich"}


def test_configs_and_the_list_of_strategies_load_nothing_heavy() -> None:
    modules = modules_after(
        "import polyshard; polyshard.DDPConfig(); polyshard.FSDP2Config()\n"
        "assert polyshard.available_strategies()"
    )
    heavy = {"cattrs", "click", "numpy", "packaging", "rich", "ruamel", "torch"}
    assert "polyshard.registry.discovery" in modules
    assert not modules & heavy


def test_configs_alone_do_without_the_metadata_of_distributions() -> None:
    statement = "import polyshard; polyshard.DDPConfig(); polyshard.FSDP2Config()"
    assert "importlib.metadata" not in modules_after(statement)


def test_every_public_name_resolves_and_is_documented() -> None:
    for name in polyshard.__all__:
        value = getattr(polyshard, name)
        if name != "__version__" and name != "hookimpl":
            assert value.__doc__, name


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="'polyshard' has no attribute 'parallelise'"):
        polyshard.parallelise  # noqa: B018
