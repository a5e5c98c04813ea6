"""The ``polyshard`` command."""

from polyshard.cli.app import main as main

__all__ = ["main"]
