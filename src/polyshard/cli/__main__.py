"""``python -m polyshard.cli``, the same as ``polyshard``."""

from polyshard.cli import main

main()
