"""What authors of strategies build on is all in one module, and quick to import."""

from __future__ import annotations

import subprocess
import sys

import polyshard.plugin


def test_every_name_is_there() -> None:
    for name in polyshard.plugin.__all__:
        assert getattr(polyshard.plugin, name).__doc__, name


def test_importing_it_loads_no_torch() -> None:
    program = "import sys, polyshard.plugin; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", program], check=True)
