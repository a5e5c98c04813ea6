"""How ``--strategy`` is written."""

from __future__ import annotations

import click
import pytest

from polyshard.cli.types import STRATEGY, StrategyChoice


@pytest.mark.parametrize(
    ("text", "options"),
    [
        ("ddp", {}),
        ("ddp:", {}),
        ("ddp:a=1", {"a": 1}),
        ("ddp:a=1e-3,b=none", {"a": 1e-3, "b": None}),
        ("ddp:a=[x, y],b=true", {"a": ["x", "y"], "b": True}),
        ("ddp:a.b=1,a.c=2", {"a": {"b": 1, "c": 2}}),
        ("ddp:a=x=y", {"a": "x=y"}),
    ],
)
def test_options_follow_the_name(text: str, options: dict[str, object]) -> None:
    assert STRATEGY.convert(text, None, None) == StrategyChoice("ddp", options)


@pytest.mark.parametrize("text", ["ddp:a", "ddp:=1", "ddp:a=[1"])
def test_a_malformed_option_is_refused(text: str) -> None:
    with pytest.raises(click.BadParameter, match="expected"):
        STRATEGY.convert(text, None, None)
