"""``polyshard strategies``: what is installed, told without importing any of it."""

from __future__ import annotations

import json
from typing import Any

import click
from attrs import evolve
from rich import box
from rich.markup import escape
from rich.table import Table

from polyshard.cli.output import console
from polyshard.exceptions import PolyshardError
from polyshard.registry.discovery import StrategyInfo
from polyshard.registry.registry import available_strategies, default_registry

__all__ = ["strategies"]


@click.command()
@click.option("--json", "as_json", is_flag=True, help="Write a JSON list instead of a table.")
@click.option(
    "--check",
    is_flag=True,
    help="Import each strategy as well, and exit with status 1 if one cannot be used.",
)
def strategies(as_json: bool, check: bool) -> int:
    """List the installed strategies.

    Reads the metadata of installed distributions; neither torch nor a strategy is imported
    unless --check asks for it.
    """
    found = list(available_strategies().values())
    if check:
        found = [_checked(info) for info in found]
    if as_json:
        click.echo(json.dumps([_as_dict(info) for info in found], indent=2))
    else:
        _print_table(found)
    return int(check and any(info.problem for info in found))


def _checked(info: StrategyInfo) -> StrategyInfo:
    """Load a strategy and its config class; what fails becomes its problem."""
    try:
        default_registry().load(info.name)
        default_registry().config_class(info.name)
    except PolyshardError as error:
        return evolve(info, problem=str(error))
    return info


def _as_dict(info: StrategyInfo) -> dict[str, Any]:
    return {
        "name": info.name,
        "config_class": info.config_class,
        "distribution": info.distribution,
        "version": info.version,
        "aliases": list(info.aliases),
        "description": info.summary,
        "problem": info.problem,
    }


def _print_table(found: list[StrategyInfo]) -> None:
    if not found:
        click.echo("No strategy is installed.")
        return
    table = Table(box=box.SIMPLE_HEAD)
    for heading in ("strategy", "config class", "distribution", "aliases", "description"):
        table.add_column(heading, overflow="fold")
    for info in found:
        broken = f"[red]broken:[/red] {escape(info.problem)}" if info.problem else ""
        table.add_row(
            info.name,
            (info.config_class or "").replace(":", ":\n"),
            info.origin,
            "\n".join(info.aliases),
            "\n".join(filter(None, (escape(info.summary), broken))),
        )
    console().print(table)
