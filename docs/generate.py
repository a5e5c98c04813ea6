"""Write the pages of the reference that code or tests decide: ``python docs/generate.py``.

A test fails while a page and the code differ.
"""

import runpy
from collections.abc import Iterable, Iterator
from inspect import cleandoc
from pathlib import Path

import attrs
import click

from polyshard import DistributedConfig, MixedPrecision, ParallelismSizes
from polyshard.cli.app import polyshard as command_group
from polyshard.conformance.parameter_changes import CHANGES
from polyshard.conformance.rebuild_suite import RebuildConformance
from polyshard.registry.registry import default_registry
from polyshard.registry.schema import describe_class

ROOT = Path(__file__).parents[1]
REFERENCE = ROOT / "docs" / "reference"
BAR = r"\|"  # which would end the cell of a table otherwise


def table(head: list[str], rows: Iterable[Iterable[str]]) -> str:
    """Return a table, and the empty line after it."""
    titles, *body = (f"| {' | '.join(cells)} |" for cells in [head, *rows])
    return "\n".join([titles, "|---" * len(head) + "|", *body, ""])


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
        (f"`{a.name}`", f"`{default(a)}`", described[a.name].replace("|", BAR))
        for a in attrs.fields(cls)
    ]
    return "\n".join([title, table(["field", "default", "meaning"], rows)])


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
    rows = [(f"`{option_form(option, context)}`", option_help(option)) for option in options]
    listed = [table(["option", "meaning"], rows)] if rows else []
    return "\n".join([f"## {path}\n\n`{usage}`\n\n{text}\n", *listed])


def option_form(option: click.Option, context: click.Context) -> str:
    value = "" if option.is_flag else f" {option.make_metavar(context)}"
    return (", ".join(option.opts) + value).replace("|", BAR)


def option_help(option: click.Option) -> str:
    default = option.show_default if isinstance(option.show_default, str) else option.default
    stated = option.show_default and not option.is_flag and default is not None
    return " ".join(filter(None, [option.help, f"Default: {default}." if stated else ""]))


REBUILDS_HEAD = """\
# Changing parameters after `parallelize`

What a script may do inside `with polyshard.rebuild(model):`, and what comes of it on
several ranks. ✓ means that training goes on as it would in one plain process from the new values,
the first forward included, whether the optimizer was built before or after, losses and weights
to 1e-6, and that what was set on a Parameter is still there. Everything else is refused by a
`RebuildError`, which puts the old modules, Parameters and values back, but nothing that was written
over in place. On one rank only those changes are refused that no strategy takes.

Outside of `rebuild` the same changes are refused at the next forward, or train right all the same.
Only what one rank does alone to its own values goes unnoticed there.

— is what torch does itself, by its own assumption of even shards: with
`set_model_state_dict(broadcast_from_rank0=True)` some ranks fail where the assumption is wrong,
while the others wait for them, and where torch notices nothing it is refused.
`polyshard.load_full_state_dict` loads what the first rank has under every strategy.

Each cell is a test, at 1, 2 and 4 ranks (on one rank Megatron-FSDP wraps nothing, and is tested
under stage 3 alone): `tests/lifecycle/test_rebuild_matrix.py` and
`plugins/polyshard-megatron-fsdp/tests/state/test_rebuild_matrix.py`, from which `docs/generate.py`
writes this page. There a few of the changes are tried under replicas and context parallelism, too.
"""

REBUILD_TESTS = (
    "tests/lifecycle/test_rebuild_matrix.py",
    "plugins/polyshard-megatron-fsdp/tests/state/test_rebuild_matrix.py",
)


def rebuilds_page() -> str:
    """Return the page for every kind of change under every strategy that is tested."""
    tests = [test for file in REBUILD_TESTS for test in rebuild_tests(ROOT / file)]
    rows = [
        (change.summary, *(outcome(test, name) for test in tests))
        for name, change in CHANGES.items()
    ]
    refusals = [
        (CHANGES[name].summary, messages(tests, name))
        for name in CHANGES
        if "refused" in [outcome(test, name) for test in tests]
    ]
    return "\n".join(
        [
            REBUILDS_HEAD,
            table(["change", *(title_of(test.config) for test in tests)], rows),
            "## What the refusals say\n",
            table(["change", "the message has"], refusals),
        ]
    )


def rebuild_tests(file: Path) -> list[type[RebuildConformance]]:
    """Return the test classes of a file that are about a strategy, not a layout of it."""
    found = runpy.run_path(str(file)).values()
    classes = [cls for cls in found if isinstance(cls, type) and "config" in vars(cls)]
    return [cls for cls in classes if cls.sizes is None]


def title_of(config: DistributedConfig) -> str:
    stage = getattr(config, "zero_dp_strategy", None)
    return config.strategy if stage is None else f"{config.strategy} {stage}"


def outcome(test: type[RebuildConformance], change: str) -> str:
    if change not in test.changes:
        return "—"
    return "refused" if test.refuses(change, world_size=2) else "✓"


def messages(tests: list[type[RebuildConformance]], change: str) -> str:
    found = dict.fromkeys(t.refusals[change] for t in tests if outcome(t, change) == "refused")
    return "; ".join(f"`{message}`" for message in found)


SUPPORT_HEAD = """\
# What Megatron-FSDP supports

By way of training and stage (`zero_dp_strategy`), on four ranks. ✓ means that losses, gradient
norms and, under SGD, weights are those of one plain process to 1e-6, with the optimizer built
before the wrap or after. Everything else is refused before anything is changed.

Beside this, [rebuilds](rebuild-matrix.md) have a table of their own; the kinds of optimizers, bf16,
and checkpoints on the same and another number of ranks are tested under every stage, too. On one
rank every stage is the plain model. All of it holds for megatron-fsdp 0.5.0, 0.5.1, 0.6.0 and
0.6.1.

Each cell is a test in `plugins/polyshard-megatron-fsdp/tests/test_support.py`, from which
`docs/generate.py` writes this page.
"""

SUPPORT_TESTS = "plugins/polyshard-megatron-fsdp/tests/test_support.py"


def support_page() -> str:
    """Return the page for every way to train under every stage of Megatron-FSDP."""
    tests = runpy.run_path(str(ROOT / SUPPORT_TESTS))
    stages, rows = tests["STAGES"], tests["ROWS"]
    cells = [
        (name, *("refused" if stage in row.refused else "✓" for stage in stages))
        for name, row in rows.items()
    ]
    refusals = [
        (name, "; ".join(f"`{message}`" for message in dict.fromkeys(row.refused.values())))
        for name, row in rows.items()
        if row.refused
    ]
    return "\n".join(
        [
            SUPPORT_HEAD,
            table(["training", *(f"stage {stage}" for stage in stages)], cells),
            "## What the refusals say\n",
            table(["training", "the message matches"], refusals),
        ]
    )


PATCHES_HEAD = """\
# Patches of megatron-fsdp

What the plugin changes inside megatron-fsdp, so that it trains right and on machines without CUDA.
Each patch is applied to the versions in the third column alone; where these end, a later version is
used as it is, which a warning says once. Each is shown to be needed by a test that runs
megatron-fsdp without it, in `plugins/polyshard-megatron-fsdp/tests/`: when that test fails, the
fault is gone, and the patch may go. How large the faults are, and which of them need no patch, is
in [what megatron-fsdp does wrong](../explanation/megatron-fsdp-faults.md).

This page is written by `docs/generate.py` from `polyshard_megatron_fsdp.megatron_fsdp.patches`.
"""


def patches_page() -> str:
    """Return the page for every patch of megatron-fsdp."""
    from polyshard_megatron_fsdp.megatron_fsdp.patches.table import PATCHES

    rows = [(f"`{p.name}`", p.problem, f"`{p.versions}`", f"`{p.test}`") for p in PATCHES]
    return "\n".join([PATCHES_HEAD, table(["patch", "without it", "versions", "test"], rows)])


PAGES = {
    "configs.md": lambda: configs_page(["ddp", "fsdp2", "megatron_fsdp"]),
    "command-line.md": commands_page,
    "rebuild-matrix.md": rebuilds_page,
    "megatron-fsdp-support.md": support_page,
    "megatron-fsdp-patches.md": patches_page,
}


if __name__ == "__main__":
    for name, page in PAGES.items():
        (REFERENCE / name).write_text(page(), encoding="utf-8")
