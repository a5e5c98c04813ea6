"""Write the reference of configs and commands from the code: ``python docs/generate.py``.

A test fails while a page and the code differ.
"""

from collections.abc import Iterator
from inspect import cleandoc
from pathlib import Path

import attrs
import click

from polyshard import DistributedConfig, MixedPrecision, ParallelismSizes
from polyshard.cli.app import polyshard as command_group
from polyshard.registry import default_registry
from polyshard.schema import describe_class

REFERENCE = Path(__file__).parent / "reference"
BAR = r"\|"  # which would end the cell of a table otherwise

CONFIGS_HEAD = """\
# The configs

A config's class names the strategy. Every field is checked when the config is built: types are
taken as they are, so that `"2"` is not an int and `1` is not a bool. dtypes may be written as
`"bf16"`, `"bfloat16"`, `"torch.bfloat16"` or `torch.bfloat16`. In a file, an unknown key is an
error that names the nearest valid one and the line.

This page is written by `docs/generate.py` from the classes.
"""


def configs_page(strategies: list[str]) -> str:
    """Return the page for these strategies and for what their configs have in common."""
    configs = [default_registry().config_class(name) for name in strategies]
    return "\n".join([CONFIGS_HEAD, *map(section, [*configs, MixedPrecision, ParallelismSizes])])


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


COMMANDS_HEAD = """\
# The command line

`polyshard COMMAND --help` prints the same. The exit status is 0 after success, 1 after a run that
failed or came out unequal, 2 for a usage error, and 128 plus the signal's number after an
interruption. A message says what was expected, what was found and the cure; there is no traceback
for what a user did wrong.

This page is written by `docs/generate.py` from the commands.
"""


def commands_page() -> str:
    """Return the page for every command, with its arguments and options."""
    return "\n".join([COMMANDS_HEAD, *commands(command_group, "polyshard")])


def commands(group: click.Group, path: str) -> Iterator[str]:
    for name, command in sorted(group.commands.items()):
        if isinstance(command, click.Group):
            yield from commands(command, f"{path} {name}")
        else:
            yield command_section(command, f"{path} {name}")


def command_section(command: click.Command, path: str) -> str:
    context = click.Context(command, info_name=path)
    usage = " ".join([path, *command.collect_usage_pieces(context)])
    lines = cleandoc(command.help or "").splitlines()
    text = "\n".join(f"`{line}`" if line.startswith("#") else line for line in lines)
    options = [p for p in command.params if isinstance(p, click.Option)]
    rows = [f"| `{option_form(option, context)}` | {option_help(option)} |" for option in options]
    table = ["| option | meaning |", "|---|---|", *rows, ""] if rows else []
    return "\n".join([f"## {path}\n\n`{usage}`\n\n{text}\n", *table])


def option_form(option: click.Option, context: click.Context) -> str:
    value = "" if option.is_flag else f" {option.make_metavar(context)}"
    return (", ".join(option.opts) + value).replace("|", BAR)


def option_help(option: click.Option) -> str:
    default = option.show_default if isinstance(option.show_default, str) else option.default
    stated = option.show_default and not option.is_flag and default is not None
    return " ".join(filter(None, [option.help, f"Default: {default}." if stated else ""]))


PAGES = {
    "configs.md": lambda: configs_page(["ddp", "fsdp2", "megatron_fsdp"]),
    "command-line.md": commands_page,
}


if __name__ == "__main__":
    for name, page in PAGES.items():
        (REFERENCE / name).write_text(page())
