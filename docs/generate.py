"""Write the reference of the configs from the classes: ``python docs/generate.py``.

A test fails while the page and the classes differ.
"""

from pathlib import Path

import attrs

from polyshard import DistributedConfig, MixedPrecision, ParallelismSizes
from polyshard.registry import default_registry
from polyshard.schema import describe_class

PAGE = Path(__file__).parent / "reference" / "configs.md"
BAR = r"\|"  # which would end the cell of a table otherwise

HEAD = """\
# The configs

A config's class names the strategy. Every field is checked when the config is built: types are
taken as they are, so that `"2"` is not an int and `1` is not a bool. dtypes may be written as
`"bf16"`, `"bfloat16"`, `"torch.bfloat16"` or `torch.bfloat16`. In a file, an unknown key is an
error that names the nearest valid one and the line.

This page is written by `docs/generate.py` from the classes.
"""


def page(strategies: list[str]) -> str:
    """Return the page for these strategies and for what their configs have in common."""
    configs = [default_registry().config_class(name) for name in strategies]
    return "\n".join([HEAD, *map(section, [*configs, MixedPrecision, ParallelismSizes])])


def section(cls: type[attrs.AttrsInstance]) -> str:
    summary, described = describe_class(cls)
    title = f"## {cls.__name__}\n\n{summary}\n"
    if issubclass(cls, DistributedConfig):
        title = title.replace("\n\n", f"\n\nStrategy `{cls.strategy}`. ", 1)
    rows = [
        f"| `{a.name}` | `{default(a)}` | {described[a.name].replace('|', BAR)} |"
        for a in attrs.fields(cls)
    ]
    return "\n".join([title, "| field | default | meaning |", "|---|---|---|", *rows, ""])


def default(attribute: attrs.Attribute) -> str:
    if isinstance(attribute.default, attrs.Factory):  # type: ignore[arg-type]
        return f"{attribute.default.factory.__name__}()"
    return repr(attribute.default)


if __name__ == "__main__":
    PAGE.write_text(page(["ddp", "fsdp2", "megatron_fsdp"]))
